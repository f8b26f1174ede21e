"""Secrets in a configuration or a command: used, and shown nowhere."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.config.keys import known_keys

MASK = "***"
_SECRET_NAME = re.compile(r"(^|_)(token|key|apikey|secret|passw(or)?d|pwd|credentials?|auth|authorization)($|_)", re.I)
_SECRET_VALUE = re.compile(r"\b(hf_|sk-|ghp_|glpat-)[A-Za-z0-9_-]{8,}|(?<=://)[^/\s@]+(?=@)")


def without_secrets(tree: dict[str, Any]) -> dict[str, Any]:
    """A configuration as it may be logged and saved.

    >>> without_secrets({"ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": {"HF_TOKEN": "hf_abc", "A": "b"}}}}})
    {'ray_kwargs': {'ray_init': {'runtime_env': {'env_vars': {'HF_TOKEN': '***', 'A': 'b'}}}}}
    """
    return masked("", tree)


def masked(key: str, value: Any) -> Any:
    """The value of a key as it may be shown.

    Masked are values of users' own keys whose names look like secrets (`runtime_env.env_vars.WANDB_API_KEY`,
    `reward_kwargs.api_key`), and in any text user and password of an address and the usual forms of tokens. Keys of
    ours, such as data.prompt_key, hold none.

    >>> masked("a.HF_TOKEN", "x"), masked("data.prompt_key", "prompt"), masked("url", "https://me:pw@host/run")
    ('***', 'prompt', 'https://***@host/run')
    """
    if isinstance(value, Mapping):
        return {name: masked(f"{key}.{name}".lstrip("."), item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(key, item) for item in value]
    name = re.sub(r"\W", "_", key.rpartition(".")[2])
    if key not in known_keys() and _SECRET_NAME.search(name) and isinstance(value, str | int):
        return MASK
    return _SECRET_VALUE.sub(MASK, value) if isinstance(value, str) else value


def masked_command(arguments: Sequence[str]) -> list[str]:
    """A command line without its secrets: of `name=value`, and of `--name value`.

    >>> masked_command(["train", "a.WANDB_API_KEY=1234", "--token", "5678", "trainer.seed=1"])
    ['train', 'a.WANDB_API_KEY=***', '--token', '***', 'trainer.seed=1']
    """
    shown, name = [], ""
    for argument in arguments:
        key, sign, value = argument.partition("=")
        shown.append(f"{key}={masked(key.lstrip('+'), value)}" if sign else masked(name, argument))
        name = argument if argument.startswith("--") else ""
    return shown
