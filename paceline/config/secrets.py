"""Secrets in a configuration: used, and shown nowhere."""

from __future__ import annotations

import re
from typing import Any

from paceline.config.keys import known_keys

MASK = "***"
_SECRET = re.compile(r"(^|_)(token|key|apikey|secret|passw(or)?d|pwd|credentials?|auth|authorization)($|_)", re.I)
_USER_IN_URL = re.compile(r"://[^/\s@]+@")


def without_secrets(tree: dict[str, Any]) -> dict[str, Any]:
    """A configuration as it may be logged and saved.

    Masked are values of users' own keys whose names look like secrets (`runtime_env.env_vars.WANDB_API_KEY`,
    `reward_kwargs.api_key`), and user and password in any address. Keys of ours, such as data.prompt_key, hold none.

    >>> without_secrets({"ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": {"HF_TOKEN": "hf_abc", "A": "b"}}}}})
    {'ray_kwargs': {'ray_init': {'runtime_env': {'env_vars': {'HF_TOKEN': '***', 'A': 'b'}}}}}
    """
    return _masked(tree, "")


def _masked(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {name: _masked_item(str(name), item, f"{key}.{name}".lstrip(".")) for name, item in value.items()}
    if isinstance(value, list):
        return [_masked(item, key) for item in value]
    return _USER_IN_URL.sub(f"://{MASK}@", value) if isinstance(value, str) else value


def _masked_item(name: str, value: Any, key: str) -> Any:
    is_secret = key not in known_keys() and _SECRET.search(re.sub(r"\W", "_", name))
    return MASK if is_secret and isinstance(value, str | int) else _masked(value, key)
