"""`paceline sft key=value ...`: supervised fine-tuning by configuration. Takes Hydra's flags, too."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cli.hydra_command import run_trainer


def main(argv: Sequence[str]) -> int:
    """Train as the arguments say. Gives the exit code."""
    return run_trainer("sft", "sft", "sft_trainer", argv)
