"""What sending a batch through Ray costs: a DataProto against dicts of the same columns, numpy arrays and tensors.

Measured: the time to put a batch and have an actor read one column of it (send), and to get it back from there too
(round trip). The goal is a ratio to numpy of at most 1.2.

verl's DataProto needs an environment of its own (`make bench-peers`) and is left out where that is missing. So each
package has processes of its own, in turns; in each, numpy, tensors and the package's DataProto take turns too. The
lines of numpy and tensors are those beside paceline's DataProto.

    python -m benchmarks.transport
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
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


def measure(package: str, sizes: list[int], repeats: int) -> dict[str, dict[str, list[float]]]:
    """In this process: milliseconds of each way, by size and kind of work."""
    proto_class = importlib.import_module(package).DataProto
    # Room for the batches of a round trip, put and returned, and for those that Ray has not freed yet.
    ray.init(
        "local",  # a cluster of its own, also where another one runs
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=int(6e6 * max(sizes)) + 2**27,
    )
    peer = Peer.remote()
    milliseconds = {}
    for megabytes in sizes:
        columns = make_columns(megabytes)
        sent = {
            "numpy": ({name: column.numpy() for name, column in columns.items()}, peer.total),
            "tensors": (columns, peer.total),
            f"{package}'s DataProto": (proto_class.from_dict(columns), peer.total_of_proto),
        }
        for kind in ("send", "round trip"):
            taken = take_turns(
                {
                    name: partial(send, batch, peer.echo if kind == "round trip" else read)
                    for name, (batch, read) in sent.items()
                },
                repeats * (1 if megabytes >= LARGE else 4),
            )
            milliseconds[f"{megabytes} MB through Ray, {kind}"] = {
                name: [1e3 * value for value in seconds] for name, seconds in taken.items()
            }
    ray.shutdown()
    return milliseconds


def measured_apart(package: str, sizes: list[int], repeats: int) -> dict[str, dict[str, list[float]]]:
    """The same in a process of its own, with the interpreter that has the package."""
    command = [sys.executable if package == "paceline" else str(VERL_PYTHON), "-m", "benchmarks.transport"]
    command += ["--package", package, "--repeats", str(repeats), "--megabytes", *map(str, sizes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{package} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[16, 256], help="sizes of the batch")
    parser.add_argument(
        "--repeats", type=int, default=5, help="measurements of each in a process; four times as many of small batches"
    )
    parser.add_argument("--rounds", type=int, default=4, help="processes of each package")
    parser.add_argument("--package", choices=("paceline", "verl"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.package:
        print(json.dumps(measure(args.package, args.megabytes, args.repeats)))
        return
    packages = ["paceline"]
    if VERL_PYTHON.exists():
        packages.append("verl")
    else:
        remark("verl's DataProto is left out: `make bench-peers` installs it.")
    # By package, work and way.
    measured: dict[str, dict[str, dict[str, list[float]]]] = {package: {} for package in packages}
    for turn in range(args.rounds):
        for package in packages if turn % 2 else packages[::-1]:
            for work, ways in measured_apart(package, args.megabytes, args.repeats).items():
                for name, values in ways.items():
                    measured[package].setdefault(work, {}).setdefault(name, []).extend(values)
    for work, ways in measured["paceline"].items():
        if "verl" in packages:
            beside_verl = measured["verl"][work]
            ways["verl's DataProto"] = beside_verl["verl's DataProto"]
        report(work, ways, "ms", of="paceline's DataProto")
        if "verl" in packages:
            ratio = statistics.median(ways["verl's DataProto"]) / statistics.median(beside_verl["numpy"])
            remark(f"{work}: verl's DataProto took {ratio:.2f} times as long as numpy in the same processes.")


if __name__ == "__main__":
    main()
