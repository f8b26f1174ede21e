r"""hh-rlhf: dialogues with a chosen and a rejected last reply, for RL, supervised and reward-model training.

Reads both schemas: `chosen` and `rejected` as whole dialogues (`\n\nHuman: ... \n\nAssistant: ...`), and `prompt`
beside `chosen` and `rejected` replies. There is no rule by which a reply is right, so rows for RL have no ground truth:
a reward model scores them.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import groupby

import pyarrow as pa

from paceline.data.sources.base import (
    MESSAGES,
    MalformedRow,
    Record,
    Row,
    Source,
    UnusableRow,
    extra_info_type,
    optional_text,
    rl_schema,
    text_field,
)
from paceline.text import shorten

_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_REPLY = "\n\nAssistant:"


def split_dialogue(text: str) -> tuple[list[dict[str, str]], str]:
    r"""The prompt as a chat, which ends with the human's last turn, and the assistant's reply to it.

    Turns of the same speaker in a row become one, so that roles alternate.

    >>> split_dialogue("\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: 2+2?\n\nAssistant: 4")[1]
    '4'
    """
    parts = _TURN.split(text)
    before, speakers, contents = parts[0], parts[1::2], parts[2::2]
    if not speakers or before.strip():
        raise MalformedRow("no dialogue of 'Human:' and 'Assistant:'", f"it starts with {shorten(text)!r}")
    turns = list(zip(speakers, contents, strict=True))
    messages = [
        {"role": _ROLES[speaker], "content": "\n\n".join(filter(None, (content.strip() for _, content in same)))}
        for speaker, same in groupby(turns, key=lambda turn: turn[0])
    ]
    if messages[0]["role"] == "assistant":
        raise UnusableRow("the assistant speaks first")
    if messages[-1]["role"] == "user":
        raise UnusableRow("the dialogue ends with the human")
    if not messages[-2]["content"]:
        raise UnusableRow("the human's last turn is empty")
    return messages[:-1], messages[-1]["content"]


def _dialogue(record: Record, name: str) -> str:
    """The whole dialogue that ends with the `name` reply, `chosen` or `rejected`."""
    reply = text_field(record, name, may_be_empty=True)
    prompt = optional_text(record, "prompt")
    if prompt is None:
        return reply
    opened = prompt.rstrip()
    return f"{opened if opened.endswith(_REPLY) else opened + _REPLY} {reply}"


def convert(record: Record, split: str, purpose: str) -> Row:
    """A row with the prompt alone, with the chosen reply, or with both replies."""
    prompt, chosen = split_dialogue(_dialogue(record, "chosen"))
    if purpose == "rl":
        return {
            "prompt": prompt,
            "ability": "alignment",
            "reward_model": {"style": "model", "ground_truth": None},
        }
    if not chosen:
        raise UnusableRow("the chosen reply is empty")
    if purpose == "sft":
        return {"prompt": prompt, "response": chosen}
    other_prompt, rejected = split_dialogue(_dialogue(record, "rejected"))
    if other_prompt != prompt:
        raise UnusableRow("chosen and rejected reply to different prompts")
    if not rejected:
        raise UnusableRow("the rejected reply is empty")
    if chosen == rejected:
        raise UnusableRow("chosen and rejected are the same")
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _schema(*replies: str) -> pa.Schema:
    columns = [("data_source", pa.string()), ("prompt", MESSAGES), *((reply, pa.string()) for reply in replies)]
    return pa.schema([*columns, ("extra_info", extra_info_type())])


SOURCES = {
    purpose: Source(
        name="full_hh_rlhf",
        data_sources=("Dahoas/full-hh-rlhf",),
        schema=schema,
        convert=partial(convert, purpose=purpose),
        hub_id="Dahoas/full-hh-rlhf",
        preferred=("data/*",),
        ignored=("*red*team*",),  # attempts without a chosen and a rejected reply
    )
    for purpose, schema in {
        "rl": rl_schema(),
        "sft": _schema("response"),
        "rm": _schema("chosen", "rejected"),
    }.items()
}
"""By what the rows are for."""
