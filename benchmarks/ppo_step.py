"""A whole PPO step against a bare loop with the same kernels, and against TRL's PPOTrainer.

One workload for all: a Qwen2 of 4 million parameters, 64 prompts of 10 to 40 tokens, responses of 64 tokens (`equal`)
or 90 % of them of 8 (`long-tailed`), a reward model, a critic, a reference, two mini-batches, float32. `paceline` is
the ordinary command on real Ray workers, colocated and tuned by hand; `paceline, defaults` is the same with nothing set
but models, data, sizes and algorithm; `bare` calls the same engines in one process with nothing around them; `bare
beside an idle Ray` is the same while Ray and two actors wait on the same cores; `trl` is TRL 1.16.0 in its own
environment (`make bench-peers`), left out where that is missing. All have the niceness of Ray's workers and run at the
same time, in slices: one goes on for two seconds while all processes of the others are stopped. A step takes the
seconds in which it was not stopped. The first of each is for warming up, and of the others each has as many. Printed:
the medians, the quartiles, and the ratios of medians; and so the driver's share of paceline's steps, in which no worker
is at work.

    python -m benchmarks.ppo_step
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import DictConfig, OmegaConf

from benchmarks.chain_model import LONG_TOKENS, MOST_PROMPT_TOKENS, make_material
from benchmarks.step_runs import STEP_ENDS, STEPS_TO_THE_SLOWEST, StepBenchmark, step_parser
from paceline.algorithms.kl import make_kl_controller
from paceline.config import ActorConfig, CriticConfig, ModelConfig, OptimConfig, PPOConfig
from paceline.data.tokenizer import load_tokenizer
from paceline.engine import EngineSpec, get_engine
from paceline.protocol import DataProto
from paceline.rewards.combine import at_last_token
from paceline.rollout.native import NativeRollout
from paceline.rollout.postprocess import prompt_token_lists, to_batch
from paceline.rollout.rollout_interface import SamplingParams
from paceline.trainer.launch import running_ray
from paceline.trainer.main_ppo import run_ppo
from paceline.trainer.ppo.computed_columns import apply_kl_penalty, compute_advantage
from paceline.trainer.ppo.dealing import deal_mini_batches
from paceline.trainer.ppo.step import make_requests
from paceline.workers.losses import MiniBatch, actor_loss, critic_loss

WORKLOADS = ("equal", "long-tailed")
MICRO_TOKENS = 4096
DEVICE = os.environ.get("BENCHMARK_DEVICE", "cpu")
"""What the models are on, in every process that is started here: cpu or cuda. TRL's script knows the CPU only."""
BARE = "bare"
BESIDE_RAY = "bare beside an idle Ray"


def run_paceline(material: Path, workload: str, prompts: int, threads: int, folder: Path) -> None:
    """The ordinary run, with all that makes it fast set by hand."""
    asked = OmegaConf.merge(what_is_asked(material, workload, prompts, folder), by_hand(threads))
    assert isinstance(asked, DictConfig)
    run_ppo(asked)


def by_hand(threads: int) -> dict[str, object]:
    """What makes a run fast: today the defaults choose the same, or nearly."""
    packed = {"use_remove_padding": True}
    sizes = {"strategy": "local", "use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": MICRO_TOKENS}
    return {
        "actor_rollout_ref": {"model": packed, "actor": sizes, "rollout": {"trust_log_probs": True}},
        "critic": {**sizes, "model": packed},
        "reward_model": {
            "strategy": "local",
            "use_dynamic_bsz": True,
            "model": packed,
            "forward_max_token_len_per_gpu": MICRO_TOKENS,
        },
        "trainer": {"threads_per_worker": threads},
    }


def run_with_defaults(material: Path, workload: str, prompts: int, threads: int, folder: Path) -> None:
    """The ordinary run of someone who set nothing but what is asked; Ray sees as many cores as there are threads."""
    run_ppo(what_is_asked(material, workload, prompts, folder))


def what_is_asked(material: Path, workload: str, prompts: int, folder: Path) -> DictConfig:
    """Models, data, sizes and the algorithm."""
    return OmegaConf.create(
        {
            "data": {
                "train_files": str(material / f"{workload}.parquet"),
                "train_batch_size": prompts,
                "max_prompt_length": MOST_PROMPT_TOKENS,
                "max_response_length": LONG_TOKENS,
                "shuffle": False,
            },
            "actor_rollout_ref": {
                "model": {"path": str(material / "policy")},
                "actor": {"ppo_mini_batch_size": prompts // 2, "optim": {"lr": 1e-6}},
            },
            "critic": {"optim": {"lr": 1e-6}},
            "reward_model": {"enable": True, "model": {"path": str(material / "judge")}},
            "algorithm": {"use_kl_in_reward": True},
            "trainer": {
                "device": DEVICE,
                "total_epochs": 1,
                "log_train_samples": 0,
                "logger": [],
                "default_local_dir": str(folder),
            },
        }
    )


def run_bare(material: Path, workload: str, prompts: int, threads: int, folder: Path) -> None:
    """The same engines and the same arithmetic in a plain loop: no Ray, no worker groups, no records."""
    torch.set_num_threads(threads)
    sizes = {"max_tokens": MICRO_TOKENS}
    policy_path, judge_path = (str(material / name) for name in ("policy", "judge"))

    def engine(path: str, kind: Any, *, trains: bool = False) -> Any:
        optim = OptimConfig(lr=1e-6) if trains else None
        model = ModelConfig(path=path, use_remove_padding=True)
        built = get_engine("local")(EngineSpec(model, kind, optim, device=DEVICE))
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


BENCHMARK = StepBenchmark(
    "PPO step",
    "benchmarks.ppo_step",
    {
        BARE: run_bare,
        BESIDE_RAY: run_bare_beside_ray,
        "paceline": run_paceline,
        "paceline, defaults": run_with_defaults,
    },
    {"trl": ("trl", "trl_ppo.py")} if DEVICE == "cpu" else {},
)


def main() -> None:
    args = step_parser(__doc__, prompts=64).parse_args()
    with tempfile.TemporaryDirectory() as name:
        make_material(Path(name), args.prompts, STEPS_TO_THE_SLOWEST * (1 + args.steps))
        for workload in WORKLOADS:
            BENCHMARK.compare(workload, Path(name), args)


if __name__ == "__main__":
    if not BENCHMARK.run_as_asked():
        main()
