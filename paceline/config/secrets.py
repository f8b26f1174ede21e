"""Secrets in a configuration or a command: found by the names they are under, and from then on hidden by value."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from paceline.config import ROOTS
from paceline.config.keys import known_keys
from paceline.redaction import MASK, is_secret, is_secret_name, redacted, remember

_ADDRESS = re.compile(r"://([^/\s@:]*):([^/\s@]+)@")


def without_secrets(tree: Mapping[str, object]) -> dict[str, object]:
    """A configuration as it may be logged and saved.

    >>> without_secrets({"ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": {"HF_TOKEN": "hf_abc", "A": "b"}}}}})
    {'ray_kwargs': {'ray_init': {'runtime_env': {'env_vars': {'HF_TOKEN': '***', 'A': 'b'}}}}}
    """
    return {name: masked(name, value) for name, value in tree.items()}


def masked(key: str, value: object) -> object:
    """The value of a key as it may be shown.

    Masked are values of users' own keys whose names look like secrets (`runtime_env.env_vars.WANDB_API_KEY`,
    `reward_kwargs.api_key`) with all that is below them, and in any text what is known as a secret or has the form of
    one. Keys of ours, such as data.prompt_key, hold none.

    >>> masked("a.HF_TOKEN", "x"), masked("data.prompt_key", "prompt"), masked("url", "https://me:pw@host/run")
    ('***', 'prompt', 'https://***@host/run')
    >>> masked("login", {"credentials": {"user": "me", "words": ["a"]}, "accessToken": "b"})
    {'credentials': {'user': '***', 'words': ['***']}, 'accessToken': '***'}
    """
    return _masked(key, value, hidden=False)


def _masked(key: str, value: object, hidden: bool) -> object:
    hidden = hidden or _names_a_secret(key, value)
    if isinstance(value, Mapping):
        return {name: _masked(f"{key}.{name}".lstrip("."), item, hidden) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(key, item, hidden) for item in value]
    if hidden and value is not None and not isinstance(value, bool):
        return MASK
    return redacted(value) if isinstance(value, str) else value


def remember_secrets(key: str, value: object) -> None:
    """Hide from now on what is a secret by its name in this value of a key, or in all that is below it."""
    for name, text in _secrets(key, value):
        remember(name, text)


def _secrets(key: str, value: object, under: str = "") -> Iterator[tuple[str, str]]:
    """(name, value) of each; `under` is the name of a secret that the value belongs to."""
    under = under or (_field(key) if _names_a_secret(key, value) else "")
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _secrets(f"{key}.{name}".lstrip("."), item, under)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secrets(key, item, under)
    elif under and value is not None and not isinstance(value, bool):
        yield under, str(value)
    elif isinstance(value, str):
        yield from (("password", match[2]) for match in _ADDRESS.finditer(value))


def _names_a_secret(key: str, value: object) -> bool:
    return not any(key in known_keys(root) for root in ROOTS) and is_secret(_field(key), value)


def _field(key: str) -> str:
    return re.sub(r"\W", "_", key.rpartition(".")[2])


def masked_command(arguments: Sequence[str]) -> list[str]:
    """A command line without its secrets: of `name=value`, also where the value is a section, and of `--name value`.

    >>> masked_command(["train", "a.WANDB_API_KEY=1234", "--token", "5678", "trainer.seed=1", "a={HF_TOKEN: qwertz1}"])
    ['train', 'a.WANDB_API_KEY=***', '--token', '***', 'trainer.seed=1', 'a={HF_TOKEN: ***}']
    """
    shown, name = [], ""
    for argument in arguments:
        key, sign, text = argument.partition("=")
        key_name = key.lstrip("+-~")
        if sign and text.lstrip().startswith(("{", "[")):
            shown.append(f"{key}={_masked_section(key_name, text)}")
        else:
            shown.append(f"{key}={masked(key_name, text)}" if sign else str(masked(name, argument)))
        name = argument.lstrip("-") if argument.startswith("--") else ""
    return shown


def _masked_section(key: str, text: str) -> str:
    """A dict or a list as typed, without its secrets; all of it is hidden where it can't be read and names one."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        value = OverridesParser.create().parse_override(f"{key}={text}").value()
    except HydraException:
        return MASK if any(is_secret_name(word) for word in re.findall(r"[\w-]+", text)) else redacted(text)
    for name, secret in _secrets(key, value):
        remember(name, secret)
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", MASK, text)
    return redacted(text)
