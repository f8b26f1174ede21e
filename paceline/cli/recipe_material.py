"""What recipes begin with: a model that knows nothing, and sums as conversations, prompts and pairs of replies."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from paceline.cli.quickstart.model import build_model, build_tokenizer
from paceline.cli.quickstart.task import Sum, pretraining_answer, split_sums, write_parquet
from paceline.files import replacing_folder

SEED = 1


def make_sums(folder: Path) -> None:
    """Write the material, unless it is there: the same at every time.

    <folder>/
      model/  small_model/                     random weights over single characters, with a tokenizer
      chats.parquet  held_out_chats.parquet    for SFT: answers, half of them in the form that the rule wants
      train.parquet  test.parquet              for RL: prompts with their truth
      pairs.parquet  held_out_pairs.parquet    for reward models and DPO: the answer in that form, and without it
    """
    if folder.exists():
        return
    training, held_out = split_sums(SEED)
    with replacing_folder(folder) as place:
        tokenizer = build_tokenizer()
        for name, size in (("model", {}), ("small_model", {"hidden": 64, "layers": 2})):
            build_model(tokenizer, SEED, **size).save_pretrained(place / name)
            tokenizer.save_pretrained(place / name)
        for sums, split, before in ((training, "train", ""), (held_out, "test", "held_out_")):
            write_parquet(sums, split, place / f"{split}.parquet")
            rng = random.Random(f"recipes-{split}")
            write_rows(place / f"{before}chats.parquet", [_chat(item, rng) for item in sums])
            write_rows(place / f"{before}pairs.parquet", [_pair(item) for item in sums])


def _chat(item: Sum, rng: random.Random) -> dict[str, Any]:
    answer = {"role": "assistant", "content": pretraining_answer(item, rng)}
    return {"messages": [{"role": "user", "content": item.question}, answer]}


def _pair(item: Sum) -> dict[str, Any]:
    prompt = [{"role": "user", "content": item.question}]
    return {"prompt": prompt, "chosen": f"#### {item.answer}", "rejected": item.answer}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """A parquet file of these rows."""
    pq.write_table(pa.Table.from_pylist(rows), path)
