"""`paceline export RUN --output DIR`: a trained model as a Hugging Face folder."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from paceline.cli import make_parser
from paceline.command_line import errors_as_exit_codes
from paceline.log_file import configure_logging

EXAMPLES = (
    "runs/paceline/ppo --output ~/models/mine",
    "runs/paceline/ppo --step 40 --dtype bfloat16 --output ~/models/mine",
)


def main(argv: Sequence[str]) -> int:
    """Export one role of a checkpoint, and print what was written. Gives the exit code."""
    arguments = _parser().parse_args(argv)

    from paceline.trainer.hf_export import export_run

    configure_logging()
    with errors_as_exit_codes():
        exported = export_run(
            arguments.run,
            arguments.output,
            step=arguments.step,
            role=arguments.role,
            dtype=arguments.dtype,
            force=arguments.force,
        )
    said = "log-probs" if arguments.role == "actor" else "values"
    print(
        f"{exported.folder}: {exported.source.parent.name}/{arguments.role}, {exported.num_parameters:,} parameters in "
        f"{arguments.dtype}{', LoRA merged' if exported.merged else ''}\n"
        f"read back with transformers: all weights equal, {said} differ by at most {exported.largest_difference:.2g}"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "export",
        "Write the policy or the critic of a run as a Hugging Face folder: LoRA merged, with tokenizer, config and\n"
        "generation config. It is read back and compared before it gets its name.",
        EXAMPLES,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run: trainer.default_local_dir")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--step", type=int, metavar="N", help="which checkpoint (default: the newest complete one)")
    parser.add_argument("--role", choices=("actor", "critic"), default="actor", help="which model (default: actor)")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="numbers of the weights (default: float32)"
    )
    parser.add_argument("--force", action="store_true", help="replace what is in DIR")
    return parser
