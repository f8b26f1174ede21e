"""`paceline dpo key=value ...`: direct preference optimisation by configuration. Takes Hydra's flags, too."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Hand everything on to the trainer, whose Hydra reads the process's own arguments."""
    from paceline.trainer import dpo_trainer

    sys.argv = ["paceline dpo", *argv]
    dpo_trainer.cli("paceline dpo")
    return 0
