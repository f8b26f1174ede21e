"""What a pipelined step costs beside the longer of its two sides: the rollout, and all that trains.

PPO on two devices, a core each: one samples, on the other are actor, critic, reference and reward model. The same run
with `trainer.schedule.name` sync and pipelined, in turns. In `sync` a step takes the sum of both sides; pipelined, with
a staleness of one, it should take little more than the longer one. A side is the time in which its pool was at work,
the sending of weights included, so that the ratio shows what is lost in waiting alone. Medians over steps; those in
which the pipeline fills and drains are left out.

Then pipelined beside streaming, GRPO with responses that end where the model ends them: most are short, and a few are
long. Without critic, reference and reward model there is little to train, so that the rollout is the longer side.
Printed are trained tokens per second, and how long both sides were at work in a step.

    python -m benchmarks.schedules
"""

from __future__ import annotations

import argparse
import tempfile
from itertools import pairwise
from pathlib import Path

from benchmarks.overlap import make_material, run
from benchmarks.table import report
from paceline.report.timeline import busy_seconds, read_events
from paceline.report.trackers import read_metrics

SCHEDULES: dict[str, dict[str, object]] = {
    "sync": {"name": "sync"},
    "pipelined": {"name": "pipelined", "max_staleness": 1},
}
SIDES = {"rollout": "rollout_pool", "training": "global_pool"}
GROUP = 8
LITTLE_TO_TRAIN = (
    "algorithm.adv_estimator=grpo",
    f"actor_rollout_ref.rollout.n={GROUP}",
    "actor_rollout_ref.actor.use_kl_loss=False",
    "reward_model.enable=False",
    "reward_model.weights=null",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
)
FILLING, DRAINING = 3, 1
"""Steps at the start and at the end of a run that are not counted."""


def steady_steps(run_dir: Path) -> tuple[list[float], dict[str, list[float]]]:
    """Seconds of each steady step, from one actor's update to the next, and in it the busy time of each side."""
    events = read_events(run_dir / "timeline.json")
    updates = sorted(event["ts"] / 1e6 for event in events if event["name"] == "update_actor")
    steps = list(pairwise(updates))[FILLING - 1 : -DRAINING]
    busy: dict[str, list[float]] = {}
    for side, pool in SIDES.items():
        spans = [
            (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            for event in events
            if event["args"].get("pool") == pool
        ]
        busy[side] = [busy_seconds(spans, start, end) for start, end in steps]
    return [end - start for start, end in steps], busy


def tokens_per_second(run_dir: Path) -> list[float]:
    """Tokens of prompts and responses that trained in each steady step, by its seconds."""
    lines = read_metrics(run_dir / "metrics.jsonl")
    steps = [line for line in lines if line["step"] > FILLING][:-DRAINING]
    return [line["perf/total_num_tokens"] / line["timing_s/step"] for line in steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="of each run")
    parser.add_argument("--tail-steps", type=int, default=30, help="of each run where lengths differ")
    parser.add_argument("--responses", type=int, default=64, help="per step")
    parser.add_argument("--tokens", type=int, default=256, help="per response")
    parser.add_argument("--hidden", type=int, default=256, help="width of the models")
    parser.add_argument("--places", type=int, default=16, help="responses decoded together, where lengths differ")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each")
    arguments = parser.parse_args()
    if arguments.steps < FILLING + DRAINING + 1:
        parser.error(f"--steps {arguments.steps}: {FILLING + DRAINING} of them are not counted")
    walls: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    ratios: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    sides: dict[str, list[float]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_material(folder, arguments.hidden)
        sizes = (arguments.steps, arguments.responses, arguments.tokens)
        for turn in range(arguments.rounds):
            for schedule, settings in SCHEDULES.items():
                run_dir = run(folder, f"{schedule}{turn}", *sizes, schedule=settings, placement={"rollout_devices": 1})
                seconds, busy = steady_steps(run_dir)
                walls[schedule] += seconds
                longer = [max(both) for both in zip(*busy.values(), strict=True)]
                ratios[schedule] += [wall / side for wall, side in zip(seconds, longer, strict=True)]
                if schedule == "pipelined":
                    for side in SIDES:
                        sides[side] += busy[side]
        prompts = arguments.responses // GROUP
        speeds: dict[str, list[float]] = {"pipelined": [], "streaming": []}
        tails: dict[str, list[float]] = {f"{schedule}, {side}": [] for schedule in speeds for side in SIDES}
        for turn in range(arguments.rounds):
            for schedule in speeds:
                run_dir = run(
                    folder,
                    f"tail-{schedule}{turn}",
                    arguments.tail_steps,
                    prompts,
                    arguments.tokens,
                    ignore_eos=False,
                    places=arguments.places,
                    changes=[*LITTLE_TO_TRAIN, f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}"],
                    schedule={"name": schedule, "max_staleness": 1},
                    placement={"rollout_devices": 1},
                )
                speeds[schedule] += tokens_per_second(run_dir)
                _, busy = steady_steps(run_dir)
                for side in SIDES:
                    tails[f"{schedule}, {side}"] += busy[side]
    report("step by trainer.schedule.name", walls, "s", of="sync")
    report("step / the longer of its two sides", ratios, "ratio", of="sync")
    report("busy in a pipelined step", sides, "s", of="rollout")
    report("trained with lengths of a long tail", speeds, "tokens/s", of="streaming")
    report("busy in a step with such lengths", tails, "s", of="pipelined, rollout")


if __name__ == "__main__":
    main()
