"""`paceline reward-model key=value ...`: a reward model from pairs, by configuration. Takes Hydra's flags, too."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cli.hydra_command import run_trainer


def main(argv: Sequence[str]) -> int:
    """Train as the arguments say. Gives the exit code."""
    return run_trainer("reward-model", "reward_model", "reward_model_trainer", argv)
