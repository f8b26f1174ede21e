"""Options of the commands that sample from a model or a run."""

from __future__ import annotations

import argparse


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    """Which weights, and how they are sampled from."""
    parser.add_argument("--model", required=True, metavar="DIR_OR_RUN", help="a model, a hub id, a run or a checkpoint")
    parser.add_argument("--step", type=int, help="of a run: the checkpoint, or 0: the model it began with (latest)")
    parser.add_argument("--temperature", type=float, help="0 is greedy (the run's, or 1)")
    parser.add_argument("--top-p", type=float, help="(the run's, or 1)")
    parser.add_argument("--max-tokens", type=at_least_one, help="longest response (the run's, or 256)")
    parser.add_argument("--seed", type=int, default=0, help="one seed, one result (0)")


def at_least_one(text: str) -> int:
    """A whole number above 0, as an argument's type."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number
