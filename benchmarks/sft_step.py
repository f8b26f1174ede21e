"""A step of supervised fine-tuning at paceline's defaults against TRL's SFTTrainer.

The policy of `benchmarks.ppo_step`, 32 prompts of 10 to 40 tokens with a response each, of 64 tokens (`equal`) or 90 %
of them of 8 (`long-tailed`), float32. `paceline` is the ordinary command with nothing set but model, data and sizes;
`trl` is TRL 1.16.0 in its own environment (`make bench-peers`), without gradient checkpointing, which it turns on by
default, and with batches of rows of like length. Both take turns in slices of two seconds.

    python -m benchmarks.sft_step
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

from benchmarks.chain_model import CHAIN, LONG, SHORT_TOKENS, make_material, make_prompts
from benchmarks.step_runs import STEPS_TO_THE_SLOWEST, StepBenchmark, step_parser
from paceline.trainer.sft_trainer import SFTRunner
from paceline.trainer.supervised_run import run_supervised

WORKLOADS = {"equal": 1.0, "long-tailed": 0.1}
"""By name the share of long responses."""


def write_texts(folder: Path, rows_per_step: int, steps: int) -> None:
    """`<workload>.jsonl` with the columns of both: `response` is ours, `completion` TRL's."""
    for workload, long_share in WORKLOADS.items():
        dice = random.Random(0)
        prompts = [prompt for _ in range(steps) for prompt in make_prompts(rows_per_step, long_share, dice)]
        lines = []
        for prompt in prompts:
            response = CHAIN if prompt.endswith(LONG) else CHAIN[1 - SHORT_TOKENS :]
            lines.append(json.dumps({"prompt": prompt, "response": response, "completion": response}) + "\n")
        (folder / f"{workload}.jsonl").write_text("".join(lines))


def run_paceline(material: Path, workload: str, prompts: int, threads: int, folder: Path) -> None:
    """The ordinary run; its one worker takes all cores, as many as there are threads."""
    config = {
        "data": {"train_files": str(material / f"{workload}.jsonl"), "train_batch_size": prompts, "max_length": 128},
        "model": {"path": str(material / "policy")},
        "optim": {"lr": 1e-6},
        "trainer": {"device": "cpu", "logger": [], "save_freq": -1, "default_local_dir": str(folder)},
    }
    run_supervised(config, SFTRunner)


BENCHMARK = StepBenchmark("SFT step", "benchmarks.sft_step", {"paceline": run_paceline}, {"trl": ("trl", "trl_sft.py")})


def main() -> None:
    args = step_parser(__doc__, prompts=32).parse_args()
    with tempfile.TemporaryDirectory() as name:
        material = Path(name)
        make_material(material, args.prompts, 1)
        write_texts(material, args.prompts, STEPS_TO_THE_SLOWEST * (1 + args.steps))
        for workload in WORKLOADS:
            BENCHMARK.compare(workload, material, args)


if __name__ == "__main__":
    if not BENCHMARK.run_as_asked():
        main()
