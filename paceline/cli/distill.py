"""`paceline distill key=value ...`: on-policy distillation, `paceline train` with a teacher in place of rewards.

Takes Hydra's flags, too. What the user types comes last and wins: with `use_task_rewards=True` rewards train as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cli.hydra_command import run_trainer
from paceline.front import DISTILL_KEYS


def main(argv: Sequence[str]) -> int:
    """Train as the arguments say. Gives the exit code."""
    return run_trainer(
        "distill", "ppo", "main_ppo", [*(f"{key}={value}" for key, value in DISTILL_KEYS.items()), *argv]
    )
