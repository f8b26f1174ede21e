"""What the flight recorder costs: the share of a step that goes into its bundle, without weights.

PPO with reference and critic, in this process, every step recorded. Counted are the driver's time for the bundle
(`timing_s/record`) and what the workers take to describe their updates, beside the time of the whole step.

    python -m benchmarks.recording
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from omegaconf import OmegaConf

from benchmarks.overlap import make_material
from benchmarks.table import remark, report
from paceline.report.trackers import read_metrics
from paceline.single_controller.in_process import InProcessWorkerGroup
from paceline.trainer.main_ppo import TaskRunner, complete_config

PARTS = ("record", "describe_update")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=192, help="width of the models (192)")
    parser.add_argument("--steps", type=int, default=6, help="steps of the run; the first is for warming up (6)")
    parser.add_argument("--batch", type=int, default=64, help="responses of a step (64)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a response, at most (64)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_material(folder, args.hidden)
        config = settings(folder, args)
        trainer = TaskRunner().build_trainer(complete_config(OmegaConf.create(config)), InProcessWorkerGroup)  # type: ignore[arg-type]
        trainer.init_workers()
        trainer.fit()
        lines = read_metrics(folder / "run" / "metrics.jsonl")[2:]
        sizes = [path.stat().st_size for path in (folder / "run" / "records").rglob("*") if path.is_file()]
        steps = json.loads((folder / "run" / "status.json").read_text())["step"]
    # The bundle of a step is written when its line is, and counted in the next.
    measured = {name: [line.get(f"timing_s/{name}", 0.0) for line in lines] for name in ("step", *PARTS)}
    report(f"{args.batch} responses of up to {args.tokens} tokens", measured, "s", of="step")
    share = sum(statistics.median(measured[name]) for name in PARTS) / statistics.median(measured["step"])
    remark(f"The flight recorder takes {share:.2%} of a step; a bundle has {sum(sizes) / steps / 1e3:.0f} kB.")


def settings(folder: Path, args: argparse.Namespace) -> dict[str, object]:
    """A run of the material that `benchmarks.overlap` makes."""
    return {
        "actor_rollout_ref": {
            "model": {"path": str(folder / "policy")},
            "actor": {"strategy": "local", "ppo_mini_batch_size": args.batch, "use_kl_loss": True},
            "rollout": {"ignore_eos": True},
        },
        "critic": {"strategy": "local"},
        "data": {
            "train_files": str(folder / "train.parquet"),
            "train_batch_size": args.batch,
            "max_prompt_length": 64,
            "max_response_length": args.tokens,
        },
        "trainer": {
            "record": "every",
            "total_training_steps": args.steps,
            "save_freq": -1,
            "val_before_train": False,
            "threads_per_worker": 1,
            "logger": [],
            "default_local_dir": str(folder / "run"),
        },
    }


if __name__ == "__main__":
    main()
