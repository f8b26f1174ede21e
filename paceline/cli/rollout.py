"""`paceline rollout`: responses of a model, or of a checkpoint of a run, with their scores. No Ray."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.cli import make_parser
from paceline.cli.policy_options import add_policy_options, at_least_one
from paceline.command_line import errors_as_exit_codes
from paceline.errors import ConfigError
from paceline.machine import keep_freed_memory
from paceline.report.json_lines import Row, json_line

EXAMPLES = (
    "--model ~/models/qwen --prompt 'What is 12+7?'",
    "--model runs/paceline/ppo --data test.parquet --limit 20",
    "--model runs/paceline/ppo --step 40 --data test.parquet -n 4 --temperature 0.7 --output samples.jsonl",
    "--model runs/paceline/ppo --step 0 --data test.parquet --temperature 0      what the run began with, greedily",
)


def main(argv: Sequence[str]) -> int:
    """Sample and print. Gives the exit code."""
    arguments = _parser().parse_args(argv)
    keep_freed_memory()
    with errors_as_exit_codes():
        run(arguments)
    return 0


def run(arguments: argparse.Namespace) -> list[Row]:
    """Sample and print; gives the rows that were printed."""
    from paceline.trainer.saved_policy import SamplingOptions, SavedPolicy

    if arguments.output and not arguments.output.parent.is_dir():
        raise ConfigError(f"--output {arguments.output}: there is no folder {arguments.output.parent}.")
    if arguments.output and arguments.output.is_dir():
        raise ConfigError(f"--output {arguments.output} is a folder. Give a file in it.")
    sampling = SamplingOptions(arguments.temperature, arguments.top_p, arguments.max_tokens)
    policy = SavedPolicy.open(arguments.model, arguments.step, sampling)
    if arguments.data:
        prompts = policy.read_data(arguments.data, arguments.limit)
    else:
        prompts = [policy.read_prompt(text) for text in arguments.prompt]
    start = time.monotonic()
    batch = policy.answer(prompts, n=arguments.n, seed=arguments.seed)
    seconds = time.monotonic() - start
    rows = policy.grade(batch)
    for number, row in enumerate(rows):
        print(_as_text(row, number, arguments.n))
    print(_summary(rows, seconds))
    if arguments.output:
        arguments.output.write_bytes(b"".join(map(json_line, rows)))
    return rows


def _as_text(row: Row, number: int, n: int) -> str:
    score = "no rule" if row["score"] is None else f"score {row['score']:g}"
    truth = "" if row["ground_truth"] is None else f", ground truth {str(row['ground_truth'])[:200]}"
    head = f"[{number // n + 1}] {row['prompt'].rstrip()}\n" if number % n == 0 else ""
    return f"{head}--- {number % n + 1}/{n}, {row['tokens']} tokens, {score}{truth}\n{row['response']}\n"


def _summary(rows: list[Row], seconds: float) -> str:
    scores = [row["score"] for row in rows if row["score"] is not None]
    tokens = sum(row["tokens"] for row in rows)
    mean = f"mean score {sum(scores) / len(scores):.4g} of {len(scores)} graded, " if scores else ""
    return f"{len(rows)} responses, {mean}{tokens} tokens in {seconds:.1f} s with the loading of the model"


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "rollout", "Sample from a model or a checkpoint of a run, and score where the data have a rule.", EXAMPLES
    )
    add_policy_options(parser)
    origin = parser.add_mutually_exclusive_group(required=True)
    origin.add_argument("--data", metavar="FILE.parquet", help="prompts as for training")
    origin.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may come several times")
    parser.add_argument("--limit", type=at_least_one, default=8, help="prompts of the data to use (8)")
    parser.add_argument("-n", type=at_least_one, default=1, help="responses to each prompt (1)")
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="also write a line for each response")
    return parser
