"""A whole PPO step against a bare loop with the same kernels, and against TRL's PPOTrainer.

One workload for all: a Qwen2 of 4 million parameters, 64 prompts of 10 to 40 tokens, responses of 64 tokens (`equal`)
or 90 % of them of 8 (`long-tailed`), a reward model, a critic, a reference, two mini-batches, float32. `paceline` is
the ordinary command on real Ray workers, colocated; `bare` calls the same engines in one process with nothing around
them; `trl` is TRL 1.12.0 in its own environment (`make bench-peers`), left out where that is missing. Each runs in
processes of its own with the niceness of Ray's workers, in turns; the first step of each is for warming up. Printed:
the median over all steps, the quartiles, and the ratios of medians; and so the driver's share of paceline's steps, in
which no worker is at work.

    python -m benchmarks.ppo_step
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from benchmarks.chain_model import LONG_TOKENS, MOST_PROMPT_TOKENS, make_material
from benchmarks.table import remark, report
from paceline.algorithms.kl import make_kl_controller
from paceline.config import ActorConfig, CriticConfig, ModelConfig, OptimConfig
from paceline.data.tokenizer import load_tokenizer
from paceline.engine import EngineSpec, get_engine
from paceline.protocol import DataProto
from paceline.rewards.combine import at_last_token
from paceline.rollout.base import SamplingParams
from paceline.rollout.native import NativeRollout
from paceline.rollout.postprocess import prompt_token_lists, to_batch
from paceline.trainer.main_ppo import run_ppo
from paceline.trainer.ppo.phases import apply_kl_penalty, compute_advantage, deal_mini_batches, make_requests
from paceline.workers.losses import MiniBatch, actor_loss, critic_loss

TRL_PYTHON = Path(__file__).parents[1] / ".peers" / "trl" / "bin" / "python"
WORKLOADS = ("equal", "long-tailed")
MICRO_TOKENS = 4096
NICENESS_OF_RAY_WORKERS = 15
"""Ray's default. Others get it too, or whatever else the machine does would slow down paceline alone."""


def run_paceline(material: Path, workload: str, prompts: int, steps: int, threads: int) -> dict[str, list[float]]:
    """The ordinary run; the times of its steps as its metrics have them."""
    local = {"strategy": "local", "use_dynamic_bsz": True}
    model = {"use_remove_padding": True}
    with tempfile.TemporaryDirectory() as run_dir:
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
                "total_training_steps": steps,
                "log_train_samples": 0,
                "logger": [],
                "default_local_dir": run_dir,
            },
        }
        run_ppo(OmegaConf.create(config))
        lines = [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
    return {
        "seconds": [line["timing_s/step"] for line in lines][1:],
        "idle": [line["timing_s/idle/global_pool"] for line in lines][1:],
    }


def run_bare(material: Path, workload: str, prompts: int, steps: int, threads: int) -> dict[str, list[float]]:
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
    seconds = []
    for step in range(steps):
        start = time.perf_counter()
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
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds[1:]}


def left_padded(token_lists: list[list[int]], pad: int) -> dict[str, torch.Tensor]:
    attention_mask = torch.tensor([[0] * (MOST_PROMPT_TOKENS - len(ids)) + [1] * len(ids) for ids in token_lists])
    return {
        "input_ids": torch.tensor([[pad] * (MOST_PROMPT_TOKENS - len(ids)) + ids for ids in token_lists]),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
    }


RUNS = {"paceline": run_paceline, "bare": run_bare}


def times_of(system: str, material: Path, workload: str, args: argparse.Namespace) -> dict[str, list[float]]:
    """The steps of one system, in a process of its own."""
    if system == "trl":
        script = Path(__file__).parent / "peers" / "trl_ppo.py"
        command = [str(TRL_PYTHON), str(script), str(material), workload]
        command += [str(args.prompts), str(LONG_TOKENS), str(args.threads)]
    else:
        command = [sys.executable, "-m", "benchmarks.ppo_step", "--run", system, "--workload", workload]
        command += ["--material", str(material), "--steps", str(args.steps), "--prompts", str(args.prompts)]
        command += ["--threads", str(args.threads)]
    if system != "paceline":
        command = ["nice", "-n", str(NICENESS_OF_RAY_WORKERS), *command]
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{system} failed:\n{result.stderr[-4000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64, help="per step")
    parser.add_argument("--steps", type=int, default=5, help="of each process; the first is not counted")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each system")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    parser.add_argument("--material", help=argparse.SUPPRESS)
    parser.add_argument("--workload", choices=WORKLOADS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        print(json.dumps(RUNS[args.run](Path(args.material), args.workload, args.prompts, args.steps, args.threads)))
        return
    systems = ["bare", "paceline"]
    if TRL_PYTHON.exists():
        systems.append("trl")
    else:
        remark("TRL is left out: `make bench-peers` installs it.")
    with tempfile.TemporaryDirectory() as name:
        material = Path(name)
        make_material(material, args.prompts, args.steps)
        for workload in WORKLOADS:
            seconds: dict[str, list[float]] = {system: [] for system in systems}
            idle: list[float] = []
            for turn in range(args.rounds):
                for system in systems if turn % 2 else systems[::-1]:
                    times = times_of(system, material, workload, args)
                    seconds[system] += times["seconds"]
                    idle += times.get("idle", [])
            report(f"PPO step, {workload} lengths", seconds, "s", of="paceline")
            shares = [100 * alone / whole for alone, whole in zip(idle, seconds["paceline"], strict=True)]
            report(f"driver's share of a PPO step, {workload} lengths", {"paceline": shares}, "%", of="paceline")


if __name__ == "__main__":
    main()
