"""What sending a batch through Ray costs: a DataProto against dicts of the same columns, numpy arrays and tensors.

Measured in turns, so that other work on the machine meets all alike: the time to put a batch and have an actor read
one column of it (send), and to get it back from there too (round trip). The goal is a ratio to numpy of at most 1.2. On
a loaded machine ratios of 20 measurements were seen between 0.86 and 1.25; use more --repeats there.

verl's DataProto is measured in the same way in an environment of its own (`make bench-peers`), with numpy beside it
there; it is left out where that environment is missing.

    python -m benchmarks.transport
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from benchmarks.table import remark, report
from benchmarks.timing import take_turns

ROOT = Path(__file__).parents[1]
VERL_PYTHON = ROOT / ".peers" / "verl" / "bin" / "python"
PROMPT, RESPONSE = 512, 1024
LARGE = 64
"""Megabytes from which on a batch takes long enough for few measurements; smaller ones are seen to vary twofold."""


def make_columns(megabytes: int) -> dict[str, torch.Tensor]:
    """The columns of a PPO batch, of about that size."""
    bytes_per_row = 8 * (3 * (PROMPT + RESPONSE) + RESPONSE) + 4 * 4 * RESPONSE
    rows = round(megabytes * 1e6 / bytes_per_row)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(32000, (rows, PROMPT + RESPONSE), generator=generator)
    floats = {
        name: torch.randn(rows, RESPONSE, generator=generator)
        for name in ("old_log_probs", "values", "advantages", "returns")
    }
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "position_ids": torch.arange(PROMPT + RESPONSE).repeat(rows, 1),
        "responses": tokens[:, PROMPT:].clone(),
        **floats,
    }


@ray.remote
class Peer:
    def total_of_proto(self, data: Any) -> float:
        return float(data.batch["values"].sum())

    def total(self, data: dict[str, np.ndarray] | dict[str, torch.Tensor]) -> float:
        return float(data["values"].sum())

    def echo(self, data: Any) -> Any:
        return data


def send(batch: Any, method: Any) -> Any:
    return ray.get(method.remote(ray.put(batch)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[16, 256], help="sizes of the batch")
    parser.add_argument(
        "--repeats", type=int, default=20, help="measurements of each; four times as many of small ones"
    )
    parser.add_argument("--package", default="paceline", help="whose DataProto")
    args = parser.parse_args()
    proto_class = importlib.import_module(args.package).DataProto
    # Room for the batches of a round trip, put and returned, and for those that Ray has not freed yet.
    ray.init(
        "local",  # a cluster of its own, also where another one runs
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=int(6e6 * max(args.megabytes)) + 2**27,
    )
    peer = Peer.remote()
    own = f"{args.package}'s DataProto"
    for megabytes in args.megabytes:
        columns = make_columns(megabytes)
        sent = {
            "numpy": ({name: column.numpy() for name, column in columns.items()}, peer.total),
            "tensors": (columns, peer.total),
            own: (proto_class.from_dict(columns), peer.total_of_proto),
        }
        for kind in ("send", "round trip"):
            taken = take_turns(
                {
                    name: partial(send, batch, peer.echo if kind == "round trip" else read)
                    for name, (batch, read) in sent.items()
                },
                args.repeats * (1 if megabytes > LARGE else 4),
            )
            milliseconds = {name: [1e3 * value for value in seconds] for name, seconds in taken.items()}
            report(f"{megabytes} MB through Ray, {kind}, {args.package}", milliseconds, "ms", of=own)
    ray.shutdown()
    if args.package == "paceline" and not VERL_PYTHON.exists():
        remark("verl's DataProto is left out: `make bench-peers` installs it.")
    elif args.package == "paceline":
        sizes = [str(megabytes) for megabytes in args.megabytes]
        command = [VERL_PYTHON, "-m", "benchmarks.transport", "--package", "verl", "--repeats", str(args.repeats)]
        subprocess.run([*command, "--megabytes", *sizes], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
