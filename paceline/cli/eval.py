"""`paceline eval`: how well a model, or a checkpoint of a run, answers prepared data. No Ray."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.catalog import ROLLOUTS
from paceline.cli import make_parser
from paceline.cli.policy_options import add_policy_options, at_least_one
from paceline.command_line import errors_as_exit_codes
from paceline.errors import ConfigError
from paceline.machine import keep_freed_memory
from paceline.run_folder import RUNS_FOLDER

if TYPE_CHECKING:
    from paceline.trainer.saved_policy import Origin

EXAMPLES = (
    "--model ~/models/qwen --data test.parquet --temperature 0",
    "--model runs/paceline/ppo --data test.parquet -n 8 --k 1 4 8       pass@k, and the majority's answer",
    "--model runs/paceline/ppo --step 0 --data test.parquet             what the run began with, to compare",
    "--model runs/paceline/ppo --data test.parquet --output evals/a     in a folder of your choice",
)


def main(argv: Sequence[str]) -> int:
    """Evaluate, write the records and their page, and print the figures. Gives the exit code."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    keep_freed_memory()
    with errors_as_exit_codes():
        run(arguments)
    return 0


def run(arguments: argparse.Namespace) -> dict[str, float]:
    """Evaluate; gives the metrics."""
    ks = _chosen_ks(arguments.k, arguments.n)
    from paceline.report.page import PAGE_FILE, write_page
    from paceline.trainer.evaluation import evaluate, fingerprint, summarize, write_records
    from paceline.trainer.saved_policy import SamplingOptions, SavedPolicy

    options = SamplingOptions(arguments.temperature, arguments.top_p, arguments.max_tokens)
    policy = SavedPolicy.open(arguments.model, arguments.step, options, arguments.engine)
    folder = arguments.output or default_folder(policy.origin, arguments.data)
    prompts = policy.read_data(arguments.data, arguments.limit or -1)
    asked = {
        "model": policy.origin.model,
        "step": policy.origin.step,
        "data": list(arguments.data),
        "prompts": len(prompts),
        "n": arguments.n,
        "seed": arguments.seed,
        "engine": arguments.engine,
        "sampling": vars(policy.sampling),
    }
    question = asked | {
        "weights": fingerprint(policy.origin.model),
        "files": [fingerprint(file) for file in arguments.data],
    }
    rows = evaluate(policy, prompts, folder, question, n=arguments.n, seed=arguments.seed)
    metrics = summarize(rows, n=arguments.n, ks=ks)
    write_records(folder, rows, metrics, asked, policy.origin.step or 0)
    write_page([folder], folder / PAGE_FILE)
    print("\n".join(_table(metrics)))
    print(f"eval: {_headline(metrics, arguments.n)} on {len(prompts)} prompts ({folder})")
    return metrics


def default_folder(origin: Origin, data: Sequence[str]) -> Path:
    """Beside runs: named after the model or run, its step, and the data."""
    name = (origin.run_dir or Path(origin.model)).resolve().name
    step = "" if origin.step is None else f"-step{origin.step}"
    files = "-".join(Path(file).stem for file in data)
    return RUNS_FOLDER / "eval" / re.sub(r"[^\w.-]+", "_", f"{name}{step}-{files}")


def _chosen_ks(asked: Sequence[int] | None, n: int) -> list[int]:
    """The k of pass@k: those asked for; else 1, 2, 4, ... and n."""
    ks = sorted({*asked}) if asked else sorted({*(2**power for power in range(n.bit_length())), n} - {0})
    if large := [k for k in ks if k > n]:
        raise ConfigError(f"--k {large[-1]} is more than -n {n}: pass@k needs at least k responses to each prompt.")
    return ks


def _table(metrics: Mapping[str, float]) -> list[str]:
    """A line for each figure, by source."""
    shown = {name.partition("/")[2]: value for name, value in metrics.items() if not name.endswith("standard_error")}
    width = max((len(name) for name in shown), default=0)
    return [f"{name:<{width}}  {value:.4f}" for name, value in sorted(shown.items())]


def _headline(metrics: Mapping[str, float], n: int) -> str:
    from paceline.report.validation_metrics import headlines

    parts = []
    for name in headlines(metrics):
        _, _, rest = name.partition("/")
        error = metrics.get(f"val-aux/{rest}/standard_error")
        parts.append(f"{rest.removesuffix(f'/mean@{n}')} {metrics[name]:.3f}" + (f" ± {error:.3f}" if error else ""))
    return ", ".join(parts) or "nothing was graded, since no rule of the data's sources is known,"


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "eval",
        "Answer prepared data n times each, grade the answers by the rules of training, and write a page of it.",
        EXAMPLES,
    )
    add_policy_options(parser)
    parser.add_argument("--data", nargs="+", required=True, metavar="FILE", help="prompts as for training")
    parser.add_argument("--limit", type=at_least_one, help="the first so many prompts (all)")
    parser.add_argument("-n", type=at_least_one, default=1, help="responses to each prompt (1)")
    parser.add_argument("--k", type=at_least_one, nargs="+", help="of pass@k (1, 2, 4, ... up to n)")
    parser.add_argument("--engine", choices=list(ROLLOUTS.built_in), default="native", help="what samples (native)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="(runs/eval/<model>-<step>-<data>)")
    return parser
