"""The `paceline` command. A subcommand's module is imported only when it is called, so help answers at once."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from paceline import __version__
from paceline.text import did_you_mean

COMMANDS = {
    "quickstart": "make a tiny model and a task, and teach it with PPO: a few minutes on a CPU",
    "diff": "find the first step and the first value in which two runs part",
    "doctor": "say what this machine can run, and how to get what it lacks",
    "data": "prepare a public dataset for training: gsm8k, math, hellaswag, full_hh_rlhf",
    "config": "look up keys of the configuration: type, default, meaning",
    "train": "run PPO as configured by key=value ...; the same as python -m paceline.trainer.main_ppo",
    "sft": "teach a model conversations, before RL: supervised fine-tuning as configured by key=value ...",
    "reward-model": "train a reward model on pairs of replies, as configured by key=value ...",
    "distill": "let a model learn from a larger one, on what it samples itself",
    "dpo": "train a model on pairs of replies without a reward model, as configured by key=value ...",
    "recipe": "chains of commands from nothing to a trained model, such as SFT, GRPO, eval: list, show, run",
    "import-verl": "turn a launch script of verl's into a command of ours, and say what became of its keys",
    "export": "write the policy or the critic of a run as a Hugging Face folder, LoRA merged, and check it",
    "report": "make a page of one run, or of several to compare them",
    "runs": "list the runs in a folder: state, best score, age",
    "replay": "make a recorded step again, without Ray, and compare it with the record",
    "rollout": "sample from a model or a checkpoint, and score the responses",
    "serve": "answer OpenAI's protocol by a model or a checkpoint, on this machine",
    "eval": "measure a model or a checkpoint on prepared data: accuracy, pass@k, majority",
}
"""Name of each subcommand, which with _ for - is also its module's, and what it does. A module has `main(argv) -> exit
code`."""
EXAMPLES = (
    "quickstart",
    "train actor_rollout_ref.model.path=model data.train_files=train.parquet trainer.total_training_steps=100",
    "report runs/paceline/ppo",
    "COMMAND --help              what a command takes",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Gives the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"paceline {__version__}")
        return 0
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS)
        print(f"paceline has no command {name!r}.{hint}\n\n{_help()}", file=sys.stderr)
        return 2
    return importlib.import_module(f"paceline.cli.{name.replace('-', '_')}").main(arguments[1:])


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    head = "usage: paceline COMMAND [options] [key=value ...]"
    examples = ["examples:", *(f"  paceline {example}" for example in EXAMPLES)]
    return "\n".join([head, "", *lines, "", *examples])


def make_parser(command: str, description: str, examples: Sequence[str]) -> argparse.ArgumentParser:
    """A parser of `paceline <command>`; the examples stand at the end of its help."""
    return argparse.ArgumentParser(
        prog=f"paceline {command}",
        description=description,
        epilog="\n".join(["examples:", *(f"  paceline {command} {example}".rstrip() for example in examples)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
