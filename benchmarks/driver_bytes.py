"""Bytes that pass through the driver in a step, and the driver's time for it: columns that stay, against all carried.

The real driver and loop on Ray, two workers. These compute nothing: they answer with columns of the right shapes at
once. Prompts of 200 to 512 tokens, eight responses each, of 100 to 1024 tokens. Counted are all arguments and answers
as they are pickled, and every part of a column that the driver fetches; the batch's bytes are those of all columns at
the end of the step. The goal is 2 % where a row has one score (GRPO).

    python -m benchmarks.driver_bytes
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import torch
from omegaconf import OmegaConf
from ray._private.worker import global_worker

from benchmarks.overlap import make_material
from benchmarks.table import remark, report
from paceline.protocol import DataProto
from paceline.single_controller.base import Dispatch
from paceline.single_controller.ray import group as ray_group
from paceline.trainer.main_ppo import TaskRunner, complete_config
from paceline.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from paceline.workers.role_worker import role_method

PROMPT, RESPONSE, RESPONSES = 512, 1024, 8
BYTES_PER_ROW = 8 * (PROMPT + 3 * (PROMPT + RESPONSE) + 3 * RESPONSE) + 4 * 6 * RESPONSE
WAYS = {"columns that stay": 32_000, "all carried": None}
KINDS: dict[str, dict[str, Any]] = {
    "GRPO": {"adv_estimator": "grpo"},
    "PPO": {"adv_estimator": "gae", "use_kl_in_reward": True},
}


class Policy(ActorRolloutRefWorker):
    """Answers at once, with columns as a model gives them."""

    leaves_inputs_alone = True

    @role_method(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None: ...

    @role_method(Dispatch.ONE_TO_ALL)
    def set_version(self, version: int) -> None: ...

    @role_method(Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        ids, mask = prompts.batch["input_ids"], prompts.batch["attention_mask"]
        generator = torch.Generator().manual_seed(int(prompts.batch["seeds"][0]))
        rows, width = len(prompts), self.run.max_response_length
        lengths = torch.randint(width // 10, width + 1, (rows, 1), generator=generator)
        response_mask = (torch.arange(width) < lengths).long()
        responses = torch.randint(100, (rows, width), generator=generator) * response_mask
        attention_mask = torch.cat([mask, response_mask], dim=1)
        return DataProto.from_dict(
            {
                "prompts": ids,
                "responses": responses,
                "input_ids": torch.cat([ids, responses], dim=1),
                "attention_mask": attention_mask,
                "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0),
                "response_mask": response_mask,
                "rollout_log_probs": numbers_on(response_mask, generator),
            }
        )

    @role_method(Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        own = data.batch["rollout_log_probs"]
        return DataProto.from_dict({"old_log_probs": own, "rollout_log_probs": own})

    @role_method(Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"ref_log_prob": numbers_on(data.batch["response_mask"])})

    @role_method(Dispatch.DP_COMPUTE_METRIC)
    def update_actor(self, data: DataProto) -> dict[str, float]:
        return {"actor/rows": float(len(data))}


class Critic(TrainingWorker):
    """The same for values."""

    leaves_inputs_alone = True

    @role_method(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None: ...

    @role_method(Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"values": numbers_on(data.batch["response_mask"])})

    @role_method(Dispatch.DP_COMPUTE_METRIC)
    def update_critic(self, data: DataProto) -> dict[str, float]:
        return {"critic/rows": float(len(data))}


def numbers_on(mask: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    return -torch.rand(mask.shape, generator=generator) * mask


class RewardAtTheEnd:
    """One number at the last token of each response."""

    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        mask = data.batch["response_mask"]
        scores = torch.zeros(mask.shape)
        last = mask.sum(dim=1) - 1
        scores[torch.arange(len(mask)), last] = (last % 7) / 7
        return {"reward_tensor": scores} if return_dict else scores


class Runner(TaskRunner):
    """A run with these workers."""

    def _add(self, config: Any, worker: type, *roles: Any) -> None:
        super()._add(config, Policy if worker is ActorRolloutRefWorker else Critic, *roles)


class Counter:
    """What goes through this process, and its own time, less what counting takes."""

    def __init__(self) -> None:
        self.bytes = 0
        self.counting_seconds = 0.0

    def add(self, value: Any) -> None:
        started = time.process_time()
        if isinstance(value, torch.Tensor):
            self.bytes += value.nbytes
        else:  # as Ray sends it, references with the addresses of their owners included
            self.bytes += global_worker.get_serialization_context().serialize(value).total_bytes
        self.counting_seconds += time.process_time() - started

    @property
    def seconds(self) -> float:
        return time.process_time() - self.counting_seconds

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, count what is put, got, and sent with calls."""
        put, get, call, pending = ray.put, ray.get, ray_group.Call, ray_group.PendingCall
        last: Any = None

        def counted_put(value: Any, *args: Any, **options: Any) -> Any:
            self.add(value)
            return put(value, *args, **options)

        def counted_get(refs: Any, *args: Any, **options: Any) -> Any:
            values = get(refs, *args, **options)
            for value in values if isinstance(refs, list) else [values]:
                self.add(value)
            return values

        def kept_call(*args: Any) -> Any:
            nonlocal last
            last = call(*args)
            return last

        def counted_pending(*args: Any) -> Any:
            self.add(last)  # each rank gets the call, also where it is pickled once
            return pending(*args)

        ray.put, ray.get = counted_put, counted_get  # type: ignore[assignment]
        ray_group.Call, ray_group.PendingCall = kept_call, counted_pending  # type: ignore[assignment,misc]
        try:
            yield
        finally:
            ray.put, ray.get, ray_group.Call, ray_group.PendingCall = put, get, call, pending  # type: ignore[misc]


def write_prompts(path: Path, count: int, shortest: int = 200, longest: int = PROMPT) -> None:
    """Prompts of so many characters, each of which is a token."""
    generator = random.Random(0)
    digits = [str(digit) for digit in range(10)]
    prompts = ["".join(generator.choices(digits, k=generator.randint(shortest, longest))) for _ in range(count)]
    rows = [{"data_source": "openai/gsm8k", "prompt": text, "reward_model": {"ground_truth": "0"}} for text in prompts]
    pq.write_table(pa.Table.from_pylist(rows), path)


def measure(kind: str, way: str, megabytes: int, steps: int) -> dict[str, list[float]]:
    """Of each step: bytes through the driver, the batch's bytes, and seconds of the driver's own."""
    prompts = max(2, round(megabytes * 1e6 / BYTES_PER_ROW / RESPONSES))
    counter = Counter()
    found: dict[str, list[float]] = {"through": [], "batch": [], "seconds": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_material(folder, 32)
        write_prompts(folder / "numbers.parquet", prompts * (steps + 1))
        store = int(8e6 * megabytes) + 2**28
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=store)
        runner = Runner()
        trainer = runner.build_trainer(complete_config(OmegaConf.create(settings(folder, kind, way, prompts, steps))))
        trainer.reward_fn = RewardAtTheEnd()
        trainer.init_workers()
        write_step = trainer_closes(found, counter)
        with counter.counting():
            original = trainer.close
            trainer.close = lambda step: write_step(original, step)  # type: ignore[method-assign]
            trainer.fit()
        ray.shutdown()
    return {name: values[1:] for name, values in found.items()}  # the first step loads what is loaded late


def trainer_closes(found: dict[str, list[float]], counter: Counter) -> Callable[[Any, Any], None]:
    """What to do where a step is closed: note what was counted since the one before."""
    last = [0, counter.seconds]

    def close(original: Any, step: Any) -> None:
        original(step)
        if step is None:
            return
        now = [counter.bytes, counter.seconds]
        found["through"].append(now[0] - last[0])
        found["seconds"].append(now[1] - last[1])
        found["batch"].append(step.batch.nbytes)
        last[:] = now

    return close


def settings(folder: Path, kind: str, way: str, prompts: int, steps: int) -> dict[str, Any]:
    return {
        "actor_rollout_ref": {
            "model": {"path": str(folder / "policy")},
            "actor": {"strategy": "fsdp2", "ppo_mini_batch_size": prompts, "use_kl_loss": kind == "GRPO"},
            "rollout": {"n": RESPONSES},
        },
        "critic": {"strategy": "fsdp2", "ppo_mini_batch_size": prompts},
        "algorithm": KINDS[kind],
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
            "n_gpus_per_node": 2,
            "threads_per_worker": 1,
            "log_train_samples": 0,
            "columns_stay_bytes": WAYS[way],
            "logger": [],
            "default_local_dir": str(folder / "run"),
        },
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[16, 256, 1024], help="sizes of the batch")
    parser.add_argument("--steps", type=int, default=3, help="steps that are counted (3)")
    parser.add_argument("--one", nargs=2, metavar=("KIND", "WAY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one, args.megabytes[0], args.steps)))
        return
    for megabytes in args.megabytes:
        for kind in KINDS:
            measured = {way: measured_apart(kind, way, megabytes, args.steps) for way in WAYS}
            shares = {way: [*np.array(one["through"]) / one["batch"] * 100] for way, one in measured.items()}
            about = f"{kind}, a batch of {megabytes} MB"
            report(f"{about}: through the driver", shares, "% of batch", of="columns that stay")
            seconds = {way: one["seconds"] for way, one in measured.items()}
            report(f"{about}: the driver's own time", seconds, "s a step", of="columns that stay")
            through = statistics.median(measured["columns that stay"]["through"]) / 1e6
            held = statistics.median(measured["columns that stay"]["batch"]) / 1e6
            remark(f"{about}: {through:.2f} of {held:.0f} MB went through the driver where columns stayed.")


def measured_apart(kind: str, way: str, megabytes: int, steps: int) -> dict[str, list[float]]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.driver_bytes", "--one", kind, way]
    command += ["--megabytes", str(megabytes), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{kind}, {way}, {megabytes} MB failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
