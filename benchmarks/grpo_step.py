"""A whole GRPO step at paceline's defaults against TRL's GRPOTrainer.

The policy of `benchmarks.ppo_step`, 8 prompts with 8 responses each, of 64 tokens (`equal`) or 90 % of them of 8
(`long-tailed`), a reward by rule (vowels), no reference, one optimizer step on all responses, float32. `paceline` is
the ordinary command with nothing set but model, data, sizes and algorithm; `trl` is TRL 1.16.0 in its own environment
(`make bench-peers`), without gradient checkpointing, which it turns on by default. Both take turns in slices of two
seconds.

    python -m benchmarks.grpo_step
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from omegaconf import OmegaConf

from benchmarks.chain_model import LONG_TOKENS, MOST_PROMPT_TOKENS, make_material
from benchmarks.step_runs import STEPS_TO_THE_SLOWEST, StepBenchmark, step_parser
from paceline.trainer.main_ppo import run_ppo

GROUP = 8
WORKLOADS = ("equal", "long-tailed")
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(character in "aeiou" for character in solution_str))
"""


def run_paceline(material: Path, workload: str, prompts: int, threads: int, folder: Path) -> None:
    """The ordinary run; its one worker takes all cores, as many as there are threads."""
    config = {
        "data": {
            "train_files": str(material / f"{workload}.parquet"),
            "train_batch_size": prompts,
            "max_prompt_length": MOST_PROMPT_TOKENS,
            "max_response_length": LONG_TOKENS,
            "shuffle": False,
        },
        "actor_rollout_ref": {
            "model": {"path": str(material / "policy")},
            "actor": {"ppo_mini_batch_size": prompts, "optim": {"lr": 1e-6}},
            "rollout": {"n": GROUP},
        },
        "custom_reward_function": {"path": str(material / "reward.py")},
        "algorithm": {"adv_estimator": "grpo"},
        "trainer": {
            "device": "cpu",
            "total_epochs": 1,
            "log_train_samples": 0,
            "logger": [],
            "default_local_dir": str(folder),
        },
    }
    run_ppo(OmegaConf.create(config))


BENCHMARK = StepBenchmark(
    "GRPO step", "benchmarks.grpo_step", {"paceline": run_paceline}, {"trl": ("trl", "trl_grpo.py")}
)


def main() -> None:
    args = step_parser(__doc__, prompts=8).parse_args()
    with tempfile.TemporaryDirectory() as name:
        material = Path(name)
        make_material(material, args.prompts, STEPS_TO_THE_SLOWEST * (1 + args.steps))
        (material / "reward.py").write_text(REWARD)
        for workload in WORKLOADS:
            BENCHMARK.compare(workload, material, args)


if __name__ == "__main__":
    if not BENCHMARK.run_as_asked():
        main()
