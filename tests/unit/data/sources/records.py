"""A record of each dataset as it is published, and preparing some."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from paceline.data.sources import find_files, get_source, prepare

GSM8K = {"question": "What is 600 + 600?", "answer": "600 + 600 = <<600+600=1200>>1200\n#### 1,200"}
MATH = {
    "problem": "Halve $x=1$.",
    "solution": r"Not \boxed{2}, but $\boxed{\frac{1}{2}}$.",
    "level": "Level 1",
    "type": "Algebra",
}
ENDINGS = ["wraps a pair of skis.", "rips level tiles off.", "holds a cube.", "starts pulling up roofing."]
HELLASWAG = {
    "ind": 24,
    "activity_label": "Roof shingle removal",
    "ctx": "A man is sitting on a roof. he",
    "endings": ENDINGS,
    "label": 3,
}
OPENING = "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: What is 2+2?"
ORIGINAL_HH = {"chosen": f"{OPENING}\n\nAssistant: It is 4.", "rejected": f"{OPENING}\n\nAssistant: Who cares?"}
DAHOAS_HH = {
    "prompt": f"{OPENING}\n\nAssistant:",
    "response": " It is 4.",
    "chosen": " It is 4.",
    "rejected": " Who cares?",
}
HH_PROMPT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "What is 2+2?"},
]
RECORDS = {"gsm8k": GSM8K, "math": MATH, "hellaswag": HELLASWAG, "full_hh_rlhf": ORIGINAL_HH}


def write_lines(path: Path, records: list[Any]) -> Path:
    """Records as jsonl, gzipped if the name says so; bytes are written as they are."""
    lines = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]
    data = b"".join(line + b"\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def run(name: str, path: Path, output: Path, purpose: str = "rl", on_error: str = "stop", **options: Any) -> dict:
    source = get_source(name, purpose)
    files = find_files(path, preferred=source.preferred, ignored=source.ignored, output=output, **options)
    return prepare(source, files, output, on_error)


def prepared(name: str, records: list[Any], tmp_path: Path, split: str = "train", **options: Any) -> list[dict]:
    run(name, write_lines(tmp_path / "in" / f"{split}.jsonl", records), tmp_path / "out", **options)
    return pq.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist()
