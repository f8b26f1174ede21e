"""HellaSwag: how a text goes on, of four endings. The ground truth is the right ending's letter."""

from __future__ import annotations

import re

import pyarrow as pa

from paceline.data.sources.base import (
    MalformedRow,
    Record,
    Row,
    Source,
    UnusableRow,
    chat,
    checked_text,
    optional_text,
    required,
    rl_schema,
    text_field,
)
from paceline.text import shorten

LETTERS = "ABCD"
INSTRUCTION = 'Which ending is the most plausible? End your reply with "Answer: X", where X is A, B, C or D.'

# Texts from WikiHow have marks where the page had a heading, a step or a list.
_TITLE = re.compile(r"(?<=[^\s.!?:;,])\s*\[title\]\s*")
_MARK = re.compile(r"\[(?:header|title|step|substeps)\]")


def convert(record: Record, split: str) -> Row:
    """A row that shows the four endings by letter."""
    context = clean(text_field(record, "ctx"))
    label = _label(record, split)
    endings = _endings(record)
    activity = optional_text(record, "activity_label", may_be_empty=True)
    heading = f"{activity.strip()}: " if activity and activity.strip() else ""
    choices = "\n".join(f"{letter}. {ending}" for letter, ending in zip(LETTERS, endings, strict=True))
    return {
        "prompt": chat(f"{heading}{context} ...\n\n{choices}\n\n{INSTRUCTION}"),
        "ability": "commonsense",
        "reward_model": {"style": "rule", "ground_truth": LETTERS[label]},
        "extra_info": {"endings": endings, "activity_label": activity},
    }


def clean(text: str) -> str:
    """Text without the marks of WikiHow pages.

    >>> clean("[header] How to bake [title] Heat the oven. [step] To 200 degrees.")
    'How to bake. Heat the oven. To 200 degrees.'
    """
    return " ".join(_MARK.sub(" ", _TITLE.sub(". ", text)).split())


def _label(record: Record, split: str) -> int:
    if split == "test" and record.get("label") in (None, ""):
        raise UnusableRow("no label: those of the test split are not public")
    label = required(record, "label")
    number = int(label) if isinstance(label, str) and label.isdecimal() else label
    if isinstance(number, bool) or not isinstance(number, int):
        raise MalformedRow("'label' is not a number", f"it is {shorten(repr(label))}")
    if not 0 <= number < len(LETTERS):
        raise MalformedRow("'label' is out of range", f"it is {number}; it must be 0, 1, 2 or 3")
    return number


def _endings(record: Record) -> list[str]:
    endings = required(record, "endings")
    if not isinstance(endings, list) or len(endings) != len(LETTERS):
        raise MalformedRow("'endings' is not a list of four", f"it is {shorten(repr(endings))}")
    cleaned = [clean(checked_text(ending, "endings")) for ending in endings]
    if not all(cleaned):
        raise MalformedRow("'endings' has an empty one", f"it is {shorten(repr(endings))}")
    if len(set(cleaned)) < len(cleaned):
        raise UnusableRow("two endings are the same")
    return cleaned


SOURCE = Source(
    name="hellaswag",
    data_sources=("Rowan/hellaswag",),
    schema=rl_schema(endings=pa.list_(pa.string()), activity_label=pa.string()),
    convert=convert,
    hub_id="Rowan/hellaswag",
    preferred=("data/*",),
)
