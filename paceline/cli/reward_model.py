"""`paceline reward-model key=value ...`: a reward model from pairs, by configuration. Takes Hydra's flags, too."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Hand everything on to the trainer, whose Hydra reads the process's own arguments."""
    from paceline.trainer import reward_model_trainer

    sys.argv = ["paceline reward-model", *argv]
    reward_model_trainer.cli("paceline reward-model")
    return 0
