"""What packing and token budgets do to the speed of an update, and what chunks of logits do to its memory.

Speed: useful tokens per second (padding does not count) of `train_batch` on a small model, all ways in turns, so that
other work on the machine meets them alike; median, quartiles and the ratio to padded rows. Two workloads: `even`, all
sequences of equal length, and `long-tailed`, 90 % of the responses 8 tokens and 10 % 64.

Memory: most resident memory of an update with a vocabulary of 150,000, each in a process of its own, with the logits of
a whole micro-batch and with chunks of them.

    python -m benchmarks.update
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.table import remark, report
from benchmarks.timing import take_turns
from paceline.config import ModelConfig, OptimConfig
from paceline.engine import Engine, EngineSpec, get_engine
from paceline.protocol import DataProto

PAD = 0


@dataclass(frozen=True)
class Way:
    """One way to make the same update."""

    name: str
    packed: bool
    by_tokens: bool


WAYS = (
    Way("padded rows", packed=False, by_tokens=False),
    Way("padded tokens", packed=False, by_tokens=True),
    Way("packed rows", packed=True, by_tokens=False),
    Way("packed tokens", packed=True, by_tokens=True),
)


def save_model(folder: str, *, hidden: int, layers: int, vocabulary: int) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 128),
        pad_token_id=PAD,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def make_engine(folder: str, *, packed: bool) -> Engine:
    model = ModelConfig(path=folder, use_remove_padding=packed)
    engine = get_engine("local")(EngineSpec(model, "causal_lm", OptimConfig(lr=1e-6)))
    engine.initialize()
    return engine


def make_batch(lengths: list[tuple[int, int]], vocabulary: int) -> DataProto:
    """Rows of random tokens with (prompt, response) lengths."""
    prompt_width, response_width = (max(widths) for widths in zip(*lengths, strict=True))
    attention_mask = torch.zeros(len(lengths), prompt_width + response_width, dtype=torch.int64)
    for row, (prompt, response) in enumerate(lengths):
        attention_mask[row, prompt_width - prompt : prompt_width + response] = 1
    return DataProto.from_dict(
        {
            "input_ids": torch.randint(2, vocabulary, attention_mask.shape) * attention_mask,
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
            "response_mask": attention_mask[:, prompt_width:].clone(),
        }
    )


def make_workloads(rows: int) -> dict[str, list[tuple[int, int]]]:
    dice = random.Random(0)
    tails = [64 if row < rows // 10 else 8 for row in range(rows)]
    dice.shuffle(tails)
    return {"even": [(32, 64)] * rows, "long-tailed": [(dice.randint(16, 64), response) for response in tails]}


def loss_fn(output: dict[str, Tensor], micro_batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    return -output["log_probs"].sum() / 1000.0, {}


def compare_speed(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, hidden=args.hidden, layers=args.layers, vocabulary=args.vocabulary)
        engines = {packed: make_engine(folder, packed=packed) for packed in (False, True)}
    parameters = sum(parameter.numel() for parameter in engines[False].model.parameters())
    remark(
        f"Update: {parameters / 1e6:.1f} M parameters, vocabulary {args.vocabulary}, {args.rows} rows in micro-batches "
        f"of {args.micro_rows} rows or {args.micro_tokens} tokens, {args.threads} thread(s), "
        f"{args.repeats} of each in turns."
    )
    for workload, lengths in make_workloads(args.rows).items():
        data = make_batch(lengths, args.vocabulary)
        tokens = int(data.batch["attention_mask"].sum())
        taken = take_turns(
            {way.name: partial(update, engines[way.packed], data, way, args) for way in WAYS}, args.repeats
        )
        speeds = {name: [tokens / value for value in seconds] for name, seconds in taken.items()}
        report(f"update, {workload} lengths", speeds, "tokens/s", of=WAYS[-1].name)


def update(engine: Engine, data: DataProto, way: Way, args: argparse.Namespace) -> None:
    sizes = {"max_tokens": args.micro_tokens} if way.by_tokens else {"micro_batch_size": args.micro_rows}
    engine.train_batch(data, loss_fn, **sizes)


def measure_memory(args: argparse.Namespace) -> None:
    """In this process: one update with all logits or with chunks of them; prints a line of JSON."""
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, hidden=64, layers=1, vocabulary=args.large_vocabulary)
        engine = make_engine(folder, packed=False)
    engine.root.head_apart = args.measure == "chunks"
    data = make_batch([(8, args.large_tokens // 8)] * 8, args.large_vocabulary)
    # AdamW's state is made in the first update; what is measured is one like all others.
    engine.train_batch(data[:1], loss_fn, micro_batch_size=1)
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # Begin to watch the peak again.
    start = time.perf_counter()
    engine.train_batch(data, loss_fn, micro_batch_size=8)
    print(json.dumps({"mib": _resident("VmHWM") - before, "seconds": time.perf_counter() - start}))


def _resident(field: str) -> float:
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def compare_memory(args: argparse.Namespace) -> None:
    logits = args.large_vocabulary * args.large_tokens * 4 / 2**20
    remark(
        f"Logits: vocabulary {args.large_vocabulary:,}, {args.large_tokens:,} response tokens, {logits:,.0f} MiB of "
        "logits; what an update peaks at above what it holds anyway, in processes of their own."
    )
    memory: dict[str, list[float]] = {"whole": [], "chunks": []}
    seconds: dict[str, list[float]] = {"whole": [], "chunks": []}
    for _ in range(3):
        for way in memory:
            command = [sys.executable, "-m", "benchmarks.update", "--measure", way, "--threads", str(args.threads)]
            command += ["--large-vocabulary", str(args.large_vocabulary), "--large-tokens", str(args.large_tokens)]
            seen = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            memory[way].append(seen["mib"])
            seconds[way].append(seen["seconds"])
    report("update, logits", memory, "MiB", of="chunks")
    report("update, logits", seconds, "s", of="chunks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help="sequences of a mini-batch")
    parser.add_argument("--micro-rows", type=int, default=16, help="sequences of a micro-batch")
    parser.add_argument("--micro-tokens", type=int, default=1536, help="tokens of a micro-batch")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model")
    parser.add_argument("--layers", type=int, default=4, help="layers of the model")
    parser.add_argument("--vocabulary", type=int, default=1024, help="vocabulary of the model")
    parser.add_argument("--large-vocabulary", type=int, default=150_000, help="vocabulary where memory is measured")
    parser.add_argument("--large-tokens", type=int, default=1024, help="response tokens where memory is measured")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each")
    parser.add_argument("--measure", choices=("whole", "chunks"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure_memory(args)
        return
    torch.set_num_threads(args.threads)
    compare_speed(args)
    compare_memory(args)


if __name__ == "__main__":
    main()
