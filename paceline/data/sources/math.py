r"""MATH: problems of mathematics competitions; the right answer is in the solution's last `\boxed{}`."""

from __future__ import annotations

import pyarrow as pa

from paceline.data.sources.base import (
    MalformedRow,
    Record,
    Row,
    Source,
    UnusableRow,
    chat,
    optional_text,
    rl_schema,
    text_field,
)
from paceline.text import last_boxed, shorten

INSTRUCTION = r"Think step by step, and put the final answer within \boxed{}."


def convert(record: Record, split: str) -> Row:
    r"""A row whose ground truth is what the solution's last `\boxed{}` holds."""
    problem, solution = text_field(record, "problem"), text_field(record, "solution")
    ground_truth = last_boxed(solution)
    if ground_truth is None:
        raise MalformedRow(r"no '\boxed' in 'solution'", f"it ends with {shorten(solution[-60:])!r}")
    if not ground_truth:
        raise UnusableRow(r"the solution's '\boxed' is empty")  # so are two of the original training split
    optional = {name: optional_text(record, name, may_be_empty=True) for name in ("level", "type")}
    return {
        "prompt": chat(f"{problem.strip()}\n\n{INSTRUCTION}"),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {**optional, "solution": solution},
    }


SOURCE = Source(
    name="math",
    data_sources=("DigitalLearningGmbH/MATH-lighteval", "lighteval/MATH"),
    schema=rl_schema(level=pa.string(), type=pa.string(), solution=pa.string()),
    convert=convert,
    hub_id="DigitalLearningGmbH/MATH-lighteval",
    preferred=("data/*",),  # beside it is a folder for each subject
)
