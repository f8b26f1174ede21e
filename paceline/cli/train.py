"""`paceline train key=value ...`: PPO by configuration. Takes Hydra's flags too, such as --cfg job."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Hand everything on to the trainer, whose Hydra reads the process's own arguments."""
    if {"--help", "-h"} & set(argv):
        from paceline.config.describe import render_help

        sys.stdout.write(render_help("paceline train"))  # without loading Hydra
        return 0

    from paceline.trainer import main_ppo

    sys.argv = ["paceline train", *argv]
    main_ppo.cli()
    return 0
