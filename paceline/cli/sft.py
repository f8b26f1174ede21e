"""`paceline sft key=value ...`: supervised fine-tuning by configuration. Takes Hydra's flags, too."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Hand everything on to the trainer, whose Hydra reads the process's own arguments."""
    from paceline.trainer import sft_trainer

    sys.argv = ["paceline sft", *argv]
    sft_trainer.cli("paceline sft")
    return 0
