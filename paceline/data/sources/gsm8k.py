"""GSM8K: word problems of grade school; the right number stands after the answer's last `####`."""

from __future__ import annotations

import re

import pyarrow as pa

from paceline.data.sources.base import MalformedRow, Record, Row, Source, chat, rl_schema, text_field
from paceline.text import shorten

INSTRUCTION = 'Think step by step, and end with the final answer as a number after "####".'
_NUMBER = re.compile(r"-?(?:\d+(?:\.\d+)?|\.\d+)")


def convert(record: Record, split: str) -> Row:
    """A row whose ground truth is the answer's final number, without separators."""
    question, answer = text_field(record, "question"), text_field(record, "answer")
    _, marker, number = answer.rpartition("####")
    if not marker:
        raise MalformedRow("no '####' in 'answer'", f"it ends with {shorten(answer[-60:])!r}")
    ground_truth = number.strip().replace(",", "").removeprefix("$")
    if not _NUMBER.fullmatch(ground_truth):
        raise MalformedRow("no number after '####'", f"it is {shorten(number)!r}")
    return {
        "prompt": chat(f"{question.strip()}\n\n{INSTRUCTION}"),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"question": question, "answer": answer},
    }


SOURCE = Source(
    name="gsm8k",
    data_sources=("openai/gsm8k",),
    schema=rl_schema(question=pa.string(), answer=pa.string()),
    convert=convert,
    hub_id="openai/gsm8k",
    preferred=("main/*",),
    ignored=("*socratic*",),  # the same problems, with other solutions
)
