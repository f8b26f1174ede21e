"""A whole PPO step against a bare loop with the same kernels, and against TRL's PPOTrainer.

One workload for all: a Qwen2 of 4 million parameters, 64 prompts of 10 to 40 tokens, responses of 64 tokens (`equal`)
or 90 % of them of 8 (`long-tailed`), a reward model, a critic, a reference, two mini-batches, float32. `paceline` is
the ordinary command on real Ray workers, colocated; `bare` calls the same engines in one process with nothing around
them; `bare beside an idle Ray` is the same while Ray and two actors wait on the same cores; `trl` is TRL 1.12.0 in its
own environment (`make bench-peers`), left out where that is missing. All have the niceness of Ray's workers and run at
the same time, in slices: one goes on for two seconds while all processes of the others are stopped. A step takes the
seconds in which it was not stopped. The first of each is for warming up, and of the others each has as many.
Printed: the medians, the quartiles, and the ratios of medians; and so the driver's share of paceline's steps, in which
no worker is at work.

    python -m benchmarks.ppo_step
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from json import JSONDecodeError
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import OmegaConf

from benchmarks.chain_model import LONG_TOKENS, MOST_PROMPT_TOKENS, make_material
from benchmarks.slices import SlicedProcess, take_slices
from benchmarks.table import remark, report
from paceline.algorithms.kl import make_kl_controller
from paceline.config import ActorConfig, CriticConfig, ModelConfig, OptimConfig, PPOConfig
from paceline.data.tokenizer import load_tokenizer
from paceline.engine import EngineSpec, get_engine
from paceline.protocol import DataProto
from paceline.report.timeline import read_events, spans
from paceline.rewards.combine import at_last_token
from paceline.rollout.native import NativeRollout
from paceline.rollout.postprocess import prompt_token_lists, to_batch
from paceline.rollout.rollout_interface import SamplingParams
from paceline.trainer.constants_ppo import PPO_RAY_RUNTIME_ENV
from paceline.trainer.launch import running_ray
from paceline.trainer.main_ppo import run_ppo
from paceline.trainer.ppo.phases import apply_kl_penalty, compute_advantage, deal_mini_batches, make_requests
from paceline.workers.losses import MiniBatch, actor_loss, critic_loss

WORKER_VARIABLES = PPO_RAY_RUNTIME_ENV["env_vars"]
TRL_PYTHON = Path(__file__).parents[1] / ".peers" / "trl" / "bin" / "python"
WORKLOADS = ("equal", "long-tailed")
MICRO_TOKENS = 4096
NICENESS_OF_RAY_WORKERS = 15
"""Ray's default. Others get it too, or whatever else the machine does would slow down paceline alone."""
BARE = "bare"
BESIDE_RAY = "bare beside an idle Ray"
STEPS_TO_THE_SLOWEST = 8
"""How many steps a system makes, at most, while the slowest makes one. Prompts are made for so many."""
STEP_ENDS = "step_ends.txt"
"""Where a loop other than paceline notes when each step ended, a line each."""


def run_paceline(material: Path, workload: str, prompts: int, threads: int, folder: Path) -> None:
    """The ordinary run."""
    local = {"strategy": "local", "use_dynamic_bsz": True}
    model = {"use_remove_padding": True}
    config = {
        "data": {
            "train_files": str(material / f"{workload}.parquet"),
            "train_batch_size": prompts,
            "max_prompt_length": MOST_PROMPT_TOKENS,
            "max_response_length": LONG_TOKENS,
            "shuffle": False,
        },
        "actor_rollout_ref": {
            "model": {"path": str(material / "policy"), **model},
            "actor": {
                **local,
                "ppo_mini_batch_size": prompts // 2,
                "ppo_max_token_len_per_gpu": MICRO_TOKENS,
                "optim": {"lr": 1e-6},
            },
            "rollout": {"trust_log_probs": True},
        },
        "critic": {**local, "model": model, "ppo_max_token_len_per_gpu": MICRO_TOKENS, "optim": {"lr": 1e-6}},
        "reward_model": {
            **local,
            "enable": True,
            "model": {"path": str(material / "judge"), **model},
            "forward_max_token_len_per_gpu": MICRO_TOKENS,
        },
        "algorithm": {"use_kl_in_reward": True},
        "trainer": {
            "device": "cpu",
            "threads_per_worker": threads,
            "total_epochs": 1,
            "log_train_samples": 0,
            "logger": [],
            "default_local_dir": str(folder),
        },
    }
    run_ppo(OmegaConf.create(config))


def run_bare(material: Path, workload: str, prompts: int, threads: int, folder: Path) -> None:
    """The same engines and the same arithmetic in a plain loop: no Ray, no worker groups, no records."""
    torch.set_num_threads(threads)
    sizes = {"max_tokens": MICRO_TOKENS}
    policy_path, judge_path = (str(material / name) for name in ("policy", "judge"))

    def engine(path: str, kind: Any, *, trains: bool = False) -> Any:
        optim = OptimConfig(lr=1e-6) if trains else None
        built = get_engine("local")(EngineSpec(ModelConfig(path=path, use_remove_padding=True), kind, optim))
        built.initialize()
        return built

    actor, reference = engine(policy_path, "causal_lm", trains=True), engine(policy_path, "causal_lm")
    critic, judge = engine(policy_path, "value", trains=True), engine(judge_path, "sequence_classification")
    tokenizer = load_tokenizer(policy_path)
    rollout = NativeRollout(actor.module, {tokenizer.eos_token_id}, tokenizer.pad_token_id)
    actor_config, critic_config = ActorConfig(), CriticConfig()
    kl_ctrl = make_kl_controller(type="fixed", kl_coef=0.001, target_kl=0.1, horizon=10000)
    token_lists = json.loads((material / f"{workload}.json").read_text())
    for step in range(len(token_lists) // prompts):
        rows = left_padded(token_lists[step * prompts : (step + 1) * prompts], tokenizer.pad_token_id)
        requests, labels = make_requests(rows, n=1, seed=1, purpose="training", step=step)
        completions = rollout.generate(
            prompt_token_lists(requests), SamplingParams(LONG_TOKENS), requests.batch["seeds"].tolist()
        )
        batch = labels.union(to_batch(requests, completions, LONG_TOKENS, tokenizer.pad_token_id))
        columns = {
            "old_log_probs": batch.batch["rollout_log_probs"],
            "ref_log_prob": reference.infer_batch(batch, **sizes)["log_probs"],
            "values": critic.infer_batch(batch, **sizes)["values"],
            "token_level_scores": at_last_token(
                judge.infer_batch(batch, **sizes)["scores"], batch.batch["response_mask"]
            ),
        }
        batch = batch.union(DataProto.from_dict(columns))
        batch, _ = apply_kl_penalty(batch, kl_ctrl)
        batch = compute_advantage(batch, "gae", gamma=1.0, lam=1.0)
        dealt = deal_mini_batches(batch, rows_per_mini_batch=prompts // 2, num_shards=1)
        first = 0
        for counts in dealt.meta_info["mini_batches"]:
            mini_batch = MiniBatch(**counts)
            part = dealt[first : first + mini_batch.rows_per_shard]
            first += mini_batch.rows_per_shard
            critic.train_batch(part, critic_loss(critic_config, mini_batch), **sizes)
            actor.train_batch(part, actor_loss(actor_config, mini_batch), **sizes)
        with (folder / STEP_ENDS).open("a") as ends:
            ends.write(f"{time.time()}\n")


def run_bare_beside_ray(material: Path, workload: str, prompts: int, threads: int, folder: Path) -> None:
    """The bare loop on a machine where Ray was started as for a run, with as many actors as wait in the run's steps."""

    class Waiting:
        def is_there(self) -> bool:
            return True

    with running_ray(PPOConfig()) as session:
        waiting = [ray.remote(Waiting).options(**session.options()).remote() for _ in ("driver", "rewards")]
        ray.get([actor.is_there.remote() for actor in waiting])
        run_bare(material, workload, prompts, threads, folder)


def left_padded(token_lists: list[list[int]], pad: int) -> dict[str, torch.Tensor]:
    attention_mask = torch.tensor([[0] * (MOST_PROMPT_TOKENS - len(ids)) + [1] * len(ids) for ids in token_lists])
    return {
        "input_ids": torch.tensor([[pad] * (MOST_PROMPT_TOKENS - len(ids)) + ids for ids in token_lists]),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
    }


RUNS = {BARE: run_bare, BESIDE_RAY: run_bare_beside_ray, "paceline": run_paceline}


def start(system: str, material: Path, workload: str, folder: Path, args: argparse.Namespace) -> SlicedProcess:
    """The steps of one system, in processes of its own."""
    folder.mkdir()
    arguments = [str(material), workload, str(args.prompts), str(args.threads), str(folder)]
    if system == "trl":
        command = [str(TRL_PYTHON), str(Path(__file__).parent / "peers" / "trl_ppo.py"), *arguments, str(LONG_TOKENS)]
    else:
        command = [sys.executable, "-m", "benchmarks.ppo_step", "--run", system, *arguments]
    environment = os.environ | {"RAY_ADDRESS": "local"}
    if system != "paceline":  # whose workers have a niceness and a number of threads of their own
        command = ["nice", "-n", str(NICENESS_OF_RAY_WORKERS), *command]
        environment["OMP_NUM_THREADS"] = str(args.threads)
    if system in (BARE, BESIDE_RAY):  # as paceline's workers; TRL runs as one would run it
        environment |= {name: value for name, value in WORKER_VARIABLES.items() if name.startswith("MALLOC_")}
    return SlicedProcess(command, environment, folder / "log.txt")


def has_steps(folder: Path, count: int) -> bool:
    """Whether a system has come so far."""
    try:
        return len(step_times(folder)) >= count
    except (FileNotFoundError, JSONDecodeError):  # not begun, or stopped in the middle of writing
        return False


def step_times(folder: Path) -> list[float]:
    """When the steps of a system ended; those of paceline ended when the next one's rollout began."""
    if (folder / STEP_ENDS).exists():
        return [float(line) for line in (folder / STEP_ENDS).read_text().splitlines()]
    return [begin for begin, _ in spans(folder / "timeline.json", "generate_sequences")][1:]


def compared_steps(folder: Path, count: int) -> list[tuple[float, float]]:
    """Beginnings and ends of the first steps behind the one for warming up: later ones may be slower."""
    return [*pairwise(step_times(folder)[: count + 1])]


def driver_shares(folder: Path, process: SlicedProcess, count: int) -> list[float]:
    """Percent of each of these steps of paceline in which its worker did nothing."""
    calls = [event for event in read_events(folder / "timeline.json") if event["args"]["pool"] == "global_pool"]
    shares = []
    for begin, end in compared_steps(folder, count):
        busy = sum(
            process.own_seconds(event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            for event in calls
            if begin <= event["ts"] / 1e6 < end
        )
        shares.append(100 * (1 - busy / process.own_seconds(begin, end)))
    return shares


def compare(workload: str, systems: list[str], material: Path, args: argparse.Namespace) -> None:
    """Run all in slices until each has its steps, and report them."""
    folders = {system: material / f"{workload} {system}" for system in systems}
    with ExitStack() as ending:
        processes: dict[str, SlicedProcess] = {}
        for system, folder in folders.items():
            processes[system] = start(system, material, workload, folder, args)
            ending.callback(processes[system].end)
            processes[system].run_until(partial(has_steps, folder, 1))
        take_slices(
            list(processes.values()),
            until=lambda: all(has_steps(folder, 1 + args.steps) for folder in folders.values()),
        )
        seconds = {
            system: [process.own_seconds(*step) for step in compared_steps(folders[system], args.steps)]
            for system, process in processes.items()
        }
        shares = driver_shares(folders["paceline"], processes["paceline"], args.steps)
    report(f"PPO step, {workload} lengths", seconds, "s", of="paceline")
    report(f"driver's share of a PPO step, {workload} lengths", {"paceline": shares}, "%", of="paceline")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64, help="per step")
    parser.add_argument("--steps", type=int, default=12, help="of each system, behind its first")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    args = parser.parse_args()
    systems = list(RUNS)
    if TRL_PYTHON.exists():
        systems.append("trl")
    else:
        remark("TRL is left out: `make bench-peers` installs it.")
    with tempfile.TemporaryDirectory() as name:
        make_material(Path(name), args.prompts, STEPS_TO_THE_SLOWEST * (1 + args.steps))
        for workload in WORKLOADS:
            compare(workload, systems, Path(name), args)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:  # a process of `start`
        _, _, system, material, workload, prompts, threads, folder = sys.argv
        RUNS[system](Path(material), workload, int(prompts), int(threads), Path(folder))
    else:
        main()
