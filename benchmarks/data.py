"""How fast prompts become token ids, from parquet through the chat template, without overlong ones; and the memory.

100,000 rows in the schema of GSM8K, a chat of 20 to 80 words each, and a byte-pair tokenizer that is trained on them.
`row by row` is the plain way: read the table as Python objects, and apply the chat template to prompt after prompt.
`paceline` is `RLHFDataset`; `paceline, again` finds the tokens that an earlier run kept. Each runs in processes of its
own, in turns. Printed: rows per second, and megabytes that the process holds more than before.

    python -m benchmarks.data
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.table import report
from paceline.config import DataConfig
from paceline.data import RLHFDataset
from paceline.data.tokenizer import load_tokenizer

LONGEST = 80
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WAYS = ("row by row", "paceline", "paceline, again")


def make_material(folder: Path, rows: int) -> None:
    """Prompts of made-up words, and a tokenizer of 8,000 tokens trained on them."""
    dice = random.Random(0)
    syllables = [first + second for first in "bcdfghklmnprst" for second in "aeiou"]
    words = ["".join(dice.choices(syllables, k=dice.randint(1, 4))) for _ in range(5000)]
    texts = [" ".join(dice.choices(words, k=dice.randint(20, LONGEST))) for _ in range(rows)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    marks = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
    bpe.train_from_iterator(
        texts[:5000], trainers.BpeTrainer(vocab_size=8000, special_tokens=marks, show_progress=False)
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=marks[0], eos_token=marks[1], chat_template=TEMPLATE)
    fast.save_pretrained(folder / "tokenizer")
    table = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"split": "train", "index": number, "answer": text[:200]},
        }
        for number, text in enumerate(texts)
    ]
    pq.write_table(pa.Table.from_pylist(table), folder / "train.parquet")


def read(way: str, folder: Path) -> dict[str, float]:
    """Rows per second and megabytes, of this process."""
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    tokenizer.apply_chat_template([{"role": "user", "content": "warm up"}], add_generation_prompt=True)
    before, start = psutil.Process().memory_info().rss, time.perf_counter()
    if way == "row by row":
        kept = []
        for row in pq.read_table(folder / "train.parquet").to_pylist():
            encoded = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)
            if len(encoded["input_ids"]) <= 2 * LONGEST:
                kept.append(row | {"input_ids": encoded["input_ids"]})
        rows: int = len(kept)
    else:
        cache = str(folder / "cache") if way == "paceline, again" else ""
        config = DataConfig(max_prompt_length=2 * LONGEST, filter_overlong_prompts=True, cache_dir=cache)
        dataset = RLHFDataset(folder / "train.parquet", tokenizer, config)
        rows = len(dataset)
    seconds = time.perf_counter() - start
    return {"rows": rows, "seconds": seconds, "megabytes": (psutil.Process().memory_info().rss - before) / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--read", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--material", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        print(json.dumps(read(args.read, Path(args.material))))
        return
    with tempfile.TemporaryDirectory() as folder:
        make_material(Path(folder), args.rows)
        speeds: dict[str, list[float]] = {way: [] for way in WAYS}
        memory: dict[str, list[float]] = {way: [] for way in WAYS}
        kept = set()
        for turn in range(args.rounds + 1):
            for way in WAYS if turn % 2 else WAYS[::-1]:
                command = [sys.executable, "-m", "benchmarks.data", "--read", way, "--material", folder]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                result = json.loads(done.stdout.splitlines()[-1])
                kept.add(result["rows"])
                if turn:  # The first fills the cache.
                    speeds[way].append(args.rows / result["seconds"])
                    memory[way].append(result["megabytes"])
        assert len(kept) == 1, f"the ways kept different numbers of rows: {kept}"
        report(f"reading {args.rows:,} chats", speeds, "rows/s", of="paceline")
        report(f"memory of {args.rows:,} chats", memory, "MB", of="paceline")


if __name__ == "__main__":
    main()
