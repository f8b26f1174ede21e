"""`paceline serve`: a model, or a checkpoint of a run, for clients of OpenAI's protocol on this machine. No Ray."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Sequence

from paceline.cli import make_parser
from paceline.cli.policy_options import add_policy_options, at_least_one
from paceline.command_line import errors_as_exit_codes, sigterm_as_interrupt
from paceline.errors import ConfigError

EXAMPLES = (
    "--model ~/models/qwen                      a model; the address and a key are printed",
    "--model runs/paceline/ppo --port 8000      the latest checkpoint of a run",
    "--model runs/paceline/ppo --step 0         what the run began with",
)
KEY = "PACELINE_SERVE_KEY"
SHORTEST_KEY = 16


def main(argv: Sequence[str]) -> int:
    """Serve until Ctrl-C, or SIGTERM. Gives the exit code."""
    arguments = _parser().parse_args(argv)
    with errors_as_exit_codes(), sigterm_as_interrupt():
        try:
            _serve(arguments)
        except KeyboardInterrupt:
            print("ended", flush=True)
    return 0


def _serve(arguments: argparse.Namespace) -> None:
    key = os.environ.get(KEY) or f"paceline-{secrets.token_urlsafe(24)}"
    if len(key) < SHORTEST_KEY:
        raise ConfigError(f"{KEY} has {len(key)} characters. Give at least {SHORTEST_KEY}, or none: one is made.")
    from paceline.trainer.saved_policy import SamplingOptions, SavedPolicy
    from paceline.trainer.serving import serve_policy

    sampling = SamplingOptions(arguments.temperature, arguments.top_p, arguments.max_tokens)
    policy = SavedPolicy.open(arguments.model, arguments.step, sampling)

    def ready(url: str) -> None:
        shown = "$" + KEY if os.environ.get(KEY) else key
        print(f"export OPENAI_BASE_URL={url} OPENAI_API_KEY={shown}", flush=True)
        print("For programs on this machine that have the key; Ctrl-C ends it.", flush=True)

    serve_policy(
        policy,
        port=arguments.port,
        key=key,
        answers=arguments.max_requests,
        tool_format=arguments.format or policy.origin.config.actor_rollout_ref.rollout.multi_turn.format,
        seed=arguments.seed,
        ready=ready,
    )


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "serve",
        "Answer OpenAI's protocol by a model or a checkpoint of a run, on the loopback address and with a key: "
        f"that of the environment variable {KEY}, or one that is made.",
        EXAMPLES,
    )
    add_policy_options(parser)
    parser.add_argument("--port", type=int, default=0, help="(any free one)")
    parser.add_argument("--max-requests", type=at_least_one, default=64, help="answers at a time; more get 429 (64)")
    parser.add_argument("--format", metavar="FORMAT", help="of tool calls: hermes, json (the run's, or hermes)")
    return parser
