"""`paceline data NAME`: a public dataset's original files as parquet files for training."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli import make_parser
from paceline.command_line import errors_as_exit_codes
from paceline.log_file import configure_logging

if TYPE_CHECKING:
    from paceline.data.sources import SplitReport

DATASETS = {
    "gsm8k": "word problems of grade school; rewarded for the number after ####",
    "math": "problems of mathematics competitions; rewarded for the answer in \\boxed{}",
    "hellaswag": "which of four endings is plausible; rewarded for its letter",
    "full_hh_rlhf": "dialogues with a chosen and a rejected reply; rewarded by a reward model",
}
"""Name of each dataset and what it holds."""
EXAMPLES = {
    "gsm8k": ("gsm8k --hub --output data/gsm8k",),
    "math": ("math --input downloads/MATH --output data/math --on-error skip",),
    "hellaswag": ("hellaswag --input downloads/hellaswag --output data/hellaswag",),
    "full_hh_rlhf": (
        "full_hh_rlhf --input downloads/hh --output data/hh",
        "full_hh_rlhf --input downloads/hh --output data/hh_pairs --for rm",
    ),
}


def main(argv: Sequence[str]) -> int:
    """Prepare one dataset, and print what became of its rows. Gives the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.input is None and arguments.hub is None:
        if not any(argument.startswith(("--local_save_dir", "--local_dir")) for argument in argv):
            parser.error("one of the arguments --input --hub is required")
        arguments.hub = ""  # as scripts of this kind do that name where to save alone
    if arguments.revision is not None and arguments.hub is None:
        parser.error("--revision is one of the hub: it takes --hub")

    configure_logging()
    start = time.monotonic()
    with errors_as_exit_codes():
        reports = run(arguments)
    print(table(arguments.dataset, reports, time.monotonic() - start))
    return 0


def run(arguments: argparse.Namespace) -> dict[str, SplitReport]:
    """Find or download the files, and prepare them."""
    from paceline.data.sources import download, find_files, get_source, prepare

    source = get_source(arguments.dataset, arguments.purpose, arguments.data_source)
    folder = arguments.input
    if folder is None:
        hub_id = arguments.hub or source.hub_id
        folder = download(hub_id, source.preferred if hub_id == source.hub_id else (), arguments.revision)
    files = find_files(
        folder, split=arguments.split, preferred=source.preferred, ignored=source.ignored, output=arguments.output
    )
    return prepare(source, files, arguments.output, arguments.on_error)


def table(name: str, reports: dict[str, SplitReport], seconds: float) -> str:
    """Counts of each split, with the reasons for which rows were dropped."""
    lines = [f"{name}: {'split':<10} {'read':>9} {'kept':>9} {'dropped':>9}  file"]
    indent = " " * (len(name) + 2)
    for split, report in reports.items():
        dropped = report.dropped.total()
        lines.append(f"{indent}{split:<10} {report.read:>9} {report.kept:>9} {dropped:>9}  {report.path or 'none'}")
        lines += [f"{indent}  dropped {count}: {reason}" for reason, count in report.dropped.most_common()]
    return "\n".join([*lines, f"{indent}{seconds:.1f} s"])


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "data",
        "Prepare a public dataset: original files in, parquet files for training out.",
        sum(EXAMPLES.values(), ()),
    )
    datasets = parser.add_subparsers(dest="dataset", metavar="NAME", required=True)
    for name, what in DATASETS.items():
        like = make_parser("data", f"{name}: {what}.", EXAMPLES[name])
        dataset = datasets.add_parser(
            name, help=what, description=like.description, epilog=like.epilog, formatter_class=like.formatter_class
        )
        _add_options(dataset)
        if name == "full_hh_rlhf":
            dataset.add_argument(
                "--for",
                dest="purpose",
                choices=("rl", "sft", "rm"),
                default="rl",
                help="prompts for RL, prompt and response for supervised, or prompt, chosen and rejected for "
                "reward-model training (default: rl)",
            )
        else:
            dataset.set_defaults(purpose="rl")
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    origin = parser.add_mutually_exclusive_group()
    origin.add_argument(
        "--input",
        "--local_dataset_path",
        type=Path,
        metavar="DIR_OR_FILE",
        help="the original files: .jsonl, .jsonl.gz or .parquet",
    )
    origin.add_argument(
        "--hub",
        nargs="?",
        const="",
        metavar="OWNER/NAME",
        help="download from the Hugging Face hub; without a name the dataset's usual one",
    )
    parser.add_argument(
        "--output", "--local_save_dir", "--local_dir", type=Path, required=True, metavar="DIR",
        help="folder of the parquet files",
    )  # fmt: skip
    parser.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="at a malformed row: write nothing, or leave it out and count it (default: stop)",
    )
    parser.add_argument(
        "--split",
        choices=("train", "validation", "test"),
        help="the split of all files (default: by their names)",
    )
    parser.add_argument("--data-source", metavar="NAME", help="the name that rows carry, by which scorers know them")
    parser.add_argument("--revision", help="branch, tag or commit on the hub (default: main)")
