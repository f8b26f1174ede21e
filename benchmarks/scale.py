"""What the driver takes of a step with many workers: the real driver, dispatch and loop, on workers that only sleep.

GRPO with a reference: 32 responses a worker, of up to 1024 tokens, answered with references as real workers answer.
The workers import no torch, so that 128 of them fit on a small machine. Measured is the time of a step less what the
workers sleep. The figures of all but the largest number of workers give a curve (a + b n + c n^2, for what each worker
costs, and for the pieces that go from each to each); it is held against the largest, and drawn on to 10,000.

    python -m benchmarks.scale --output docs/images/scale.svg
"""

from __future__ import annotations

import argparse
import json
import pickle
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache, lru_cache
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import OmegaConf

from benchmarks.driver_bytes import RewardAtTheEnd, write_prompts
from benchmarks.light_worker import LightShell
from benchmarks.overlap import make_material
from benchmarks.table import remark, report
from paceline.protocol import DataProto
from paceline.protocol.held import HeldColumn, tensordict_of
from paceline.protocol.leaving import ANSWER_SHARE
from paceline.protocol.stretches import Stretches, pack
from paceline.report.trackers import read_metrics
from paceline.single_controller.ray import group as ray_group
from paceline.single_controller.ray.column_store import Maker
from paceline.single_controller.ray.object_rows import ObjectRows
from paceline.trainer.main_ppo import TaskRunner, complete_config

PROMPT, RESPONSE, RESPONSES, ROWS = 128, 1024, 8, 32
SECONDS = {"generate_sequences": 2.0, "compute_ref_log_prob": 0.5, "compute_log_prob": 0.1, "update_actor": 1.5}
REWARD_WORKERS = 4
FAR = (1000, 10_000)
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 360, 60, 40


def answer(method: str, parts: dict[str, Any]) -> Any:
    """In the driver: what a real worker's answer would have been unpickled to."""
    rows, (prompt, response) = parts["rows"], parts["widths"]
    if method in ("compute_reward", "compute_log_prob"):
        zeros = torch.zeros(rows, response)
        if method == "compute_log_prob":
            return DataProto.from_dict({"old_log_probs": zeros, "rollout_log_probs": zeros})
        zeros[:, 0] = torch.from_numpy(parts["lengths"] % 7 / 7)
        info: list[dict[str, float]] = [{}] * rows
        return DataProto.from_dict({"token_level_scores": zeros}, {"reward_extra_info": info})
    if method == "update_actor":
        return {"actor/rows": float(rows)}
    if not parts["refs"]:
        return None
    columns: dict[str, Any] = {}
    if method == "generate_sequences":
        for name, runs in masks(parts["lengths"].tobytes(), prompt, response).items():
            columns[name] = HeldColumn([runs], torch.int64, (runs.width,), is_finite=True)
    width = {"prompts": prompt, "input_ids": prompt + response}
    for name, refs in parts["refs"].items():
        sizes = [len(part) for part in np.array_split(np.arange(rows), len(refs))]
        pieces = [ObjectRows(ref, size, Maker(*parts["maker"])) for ref, size in zip(refs, sizes, strict=True)]
        dtype = torch.float32 if "log_prob" in name else torch.int64
        columns[name] = HeldColumn(pieces, dtype, (width.get(name, response),), is_finite=True)
    return DataProto(tensordict_of(columns, (rows,)))


@cache
def masks(lengths: bytes, prompt: int, response: int) -> dict[str, Stretches]:
    """What a worker packs, made once: its time is not the driver's."""
    mask = (torch.arange(response) < torch.from_numpy(np.frombuffer(lengths, dtype=np.int64).copy())[:, None]).long()
    attention = torch.cat([torch.ones(len(mask), prompt, dtype=torch.long), mask], dim=1)
    dense = {"response_mask": mask, "attention_mask": attention, "position_ids": attention.cumsum(dim=1) - 1}
    found = {name: pack(column, ANSWER_SHARE) for name, column in dense.items()}
    return {name: runs for name, runs in found.items() if runs is not None}


class LightActor:
    """Stands before the handle of a LightShell, where the driver has that of a WorkerShell."""

    def __init__(self, handle: Any, world_size: int) -> None:
        self._handle = handle
        self._world_size = world_size

    def __getattr__(self, name: str) -> Any:
        return _Remote(self, name) if name in ("prepare", "setup", "execute") else getattr(self._handle, name)

    def call(self, name: str, args: tuple[Any, ...]) -> Any:
        if name == "prepare":
            return self._handle.prepare.remote(None, None)
        if name == "setup":
            return self._handle.setup.remote(args[0].pool_name)
        packed, *refs = args
        # As in a real call: bytes that are the same for all ranks. References inside of a list: the worker does not
        # read what they name.
        return self._handle.execute.remote(packed, _told(packed, self._world_size), list(refs))


@lru_cache(maxsize=16)
def _told(packed: bytes, world_size: int) -> bytes:
    """What a LightShell must know of a call, which is of classes that it does not import."""
    call = pickle.loads(packed)
    rows = ROWS
    if call.method == "compute_reward":
        rows = ROWS * world_size // REWARD_WORKERS
    elif call.method == "compute_log_prob":  # the rows that are checked
        rows = ROWS // 32
    return pickle.dumps((call.role, call.method, call.tag, rows, SECONDS.get(call.method, 0.0), (PROMPT, RESPONSE)))


class _Remote:
    def __init__(self, actor: LightActor, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, *args: Any) -> Any:
        return self._actor.call(self._name, args)


def use_light_workers(workers: int) -> None:
    """Let all worker groups of this process have light processes."""
    real_process, real_kill = ray_group.Process, ray.kill
    ray_group.WorkerShell = LightShell  # type: ignore[assignment,misc]
    ray_group.Process = lambda actor, *args, **more: real_process(LightActor(actor, workers), *args, **more)  # type: ignore[assignment,misc]
    ray.kill = lambda actor, **options: real_kill(getattr(actor, "_handle", actor), **options)  # type: ignore[assignment]


def measure(workers: int, steps: int) -> list[float]:
    """Seconds of each step beyond what the workers sleep."""
    prompts = ROWS * workers // RESPONSES
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_material(folder, 32)
        write_prompts(folder / "numbers.parquet", prompts * (steps + 1), shortest=20, longest=PROMPT)
        ray.init("local", num_cpus=workers, include_dashboard=False, log_to_driver=False)
        use_light_workers(workers)
        config = complete_config(OmegaConf.create(settings(folder, workers, prompts, steps)))
        trainer = TaskRunner().build_trainer(config)
        trainer.reward_fn = RewardAtTheEnd()
        trainer.init_workers()
        trainer.fit()
        lines = read_metrics(folder / "run" / "metrics.jsonl")
        ray.shutdown()
    slept = sum(SECONDS.values())
    return [line["timing_s/step"] - slept for line in lines[1:]]


def settings(folder: Path, workers: int, prompts: int, steps: int) -> dict[str, Any]:
    return {
        "actor_rollout_ref": {
            "model": {"path": str(folder / "policy")},
            "actor": {"strategy": "fsdp2", "ppo_mini_batch_size": prompts, "use_kl_loss": True},
            "rollout": {"n": RESPONSES},
        },
        "algorithm": {"adv_estimator": "grpo"},
        "reward_model": {"num_workers": REWARD_WORKERS},
        "data": {
            "train_files": str(folder / "numbers.parquet"),
            "train_batch_size": prompts,
            "max_prompt_length": PROMPT,
            "max_response_length": RESPONSE,
        },
        "trainer": {
            "total_training_steps": steps + 1,
            "save_freq": -1,
            "val_before_train": False,
            "n_gpus_per_node": workers,
            "threads_per_worker": 1,
            "heartbeat_timeout_seconds": 3600.0,
            "log_train_samples": 0,
            "keep_samples": 0,
            "logger": [],
            "default_local_dir": str(folder / "run"),
        },
    }


def curve(workers: Sequence[int], seconds: Sequence[float]) -> np.ndarray:
    """a, b, c of a + b n + c n^2, none below zero, with the least squares of relative errors."""
    powers = np.array([[1.0, n, n * n] for n in workers]) / np.array(seconds)[:, None]
    best, least = np.zeros(3), np.inf
    for kept in ([0], [0, 1], [0, 2], [1], [1, 2], [2], [0, 1, 2]):
        found, *_ = np.linalg.lstsq(powers[:, kept], np.ones(len(powers)), rcond=None)
        error = float(((powers[:, kept] @ found - 1) ** 2).sum())
        if (found >= 0).all() and error < least:
            best, least = np.zeros(3), error
            best[kept] = found
    return best


def predicted(coefficients: np.ndarray, workers: int) -> float:
    return float(coefficients @ [1.0, workers, workers * workers])


def draw(measured: dict[int, float], coefficients: np.ndarray) -> str:
    """Seconds of the driver over workers, both in powers of ten: points are measured, the line is the curve."""
    numbers = np.geomspace(min(measured), FAR[-1], 60)
    line = [predicted(coefficients, n) for n in numbers]
    low, high = np.log10(min(*measured.values(), *line) / 1.5), np.log10(max(line) * 1.5)
    first, last = np.log10(min(measured) / 1.5), np.log10(FAR[-1] * 1.2)

    def place(workers: float, seconds: float) -> tuple[float, float]:
        x = LEFT + (np.log10(workers) - first) / (last - first) * (WIDTH - LEFT - 20)
        return float(x), float(HEIGHT - BOTTOM - (np.log10(seconds) - low) / (high - low) * (HEIGHT - BOTTOM - 20))

    points = " ".join("{:.1f},{:.1f}".format(*place(n, s)) for n, s in zip(numbers, line, strict=True))
    shapes = [f'<polyline points="{points}" fill="none" stroke="#4c8dd6" stroke-width="2" stroke-dasharray="6 4"/>']
    for workers, seconds in measured.items():
        x, y = place(workers, seconds)
        shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#d9822b"><title>{seconds:.2f} s</title></circle>')
    for power in range(int(np.ceil(low)), int(np.floor(high)) + 1):
        shapes.append(_text(8, place(10, 10.0**power)[1] + 4, f"{10.0**power:g} s"))
    for workers in (10, 100, *FAR):
        shapes.append(_text(place(workers, 10**low)[0] - 14, HEIGHT - BOTTOM + 18, f"{workers:,}"))
    shapes.append(_text(LEFT, 14, "the driver's seconds of a step, by workers: measured, and the curve drawn on"))
    style = "text{font:13px system-ui,sans-serif;fill:#1f2328}@media(prefers-color-scheme:dark){text{fill:#e6edf3}}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">'
    return head + f"<style>{style}</style>\n" + "\n".join(shapes) + "\n</svg>\n"


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}">{escape(text)}</text>'


def main() -> None:
    """Measure, predict, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 16, 32, 64, 128], help="the last is predicted")
    parser.add_argument("--steps", type=int, default=4, help="steps that are measured (4)")
    parser.add_argument("--output", type=Path, help="where to draw the picture")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.workers[0], args.steps)))
        return
    seconds = {f"{workers} workers": measured_apart(workers, args.steps) for workers in args.workers}
    report("the driver's part of a step", seconds, "s", of=None)
    medians = {n: statistics.median(own) for n, own in zip(args.workers, seconds.values(), strict=True)}
    *known, largest = args.workers
    coefficients = curve(known, [medians[workers] for workers in known])
    off = predicted(coefficients, largest) / medians[largest] - 1
    terms = " + ".join(
        f"{value:.2g}{unit}" for value, unit in zip(coefficients, ("", " n", " n^2"), strict=True) if value
    )
    remark(f"Up to {known[-1]} workers: {terms} seconds; for {largest} that says {off:+.0%} of what was measured.")
    for workers in FAR:
        constant, each, pairs = coefficients * [1.0, workers, workers * workers]
        names = {"what no worker changes": constant, "what each worker adds": each, "pieces from each to each": pairs}
        most = max(names, key=lambda name: names[name])
        remark(f"For {workers:,} workers: {predicted(coefficients, workers):.1f} s, most of it {most}.")
    if args.output:
        args.output.write_text(draw(medians, coefficients))
        print(f"wrote {args.output}")


def measured_apart(workers: int, steps: int) -> list[float]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scale", "--one", "--workers", str(workers), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{workers} workers failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
