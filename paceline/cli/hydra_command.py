"""What commands that train have in common: `key=value ...` goes to a trainer, whose Hydra reads the process's own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence


def run_trainer(command: str, kind: str, module: str, argv: Sequence[str]) -> int:
    """Call `cli` of the trainer's module as if it had been started with these arguments; help without loading Hydra."""
    program = f"paceline {command}"
    if {"--help", "-h"} & set(argv):
        from paceline.config.describe import render_help

        sys.stdout.write(render_help(program, kind))
        return 0
    sys.argv = [program, *argv]
    importlib.import_module(f"paceline.trainer.{module}").cli()
    return 0
