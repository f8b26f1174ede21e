"""From what a user gives (Hydra's config, a yaml, a dict, dataclasses) to one complete, frozen, typed PPOConfig.

Takes any subset of the keys; the rest are the defaults of the dataclasses. Gives all problems at once.
"""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from paceline.config import PPOConfig
from paceline.config.field_rules import Names
from paceline.config.keys import known_keys, nearest_key
from paceline.config.secrets import remember_secrets
from paceline.config.unsupported import UNSUPPORTED_KEYS, refused_choice
from paceline.errors import ConfigError

Config = DictConfig | Mapping[str, Any] | PPOConfig
Problems = dict[str, str]
"""Key to message; a message begins with the key that it is about."""

_TOO_LARGE = 2**63
"""What no file and no tensor can hold."""

HYDRA_KEYS = ("hydra", "defaults")
"""Top-level keys of the shipped yaml that speak to Hydra, not to us."""


def load_config(config: Config) -> PPOConfig:
    """The complete configuration: `config` over the defaults, interpolations resolved, paths made absolute.

    Raises ConfigError with every unknown key, unsupported key and wrong type.
    """
    cfg, problems = read_config(config)
    if problems:
        raise ConfigError(list(problems.values()))
    return cfg


def read_config(config: Config) -> tuple[PPOConfig, Problems]:
    """As load_config, but gives the problems back; a key with a problem has its default in the result.

    From here on, what is a secret in it is hidden in all that this process logs, raises and writes.
    """
    problems: Problems = {}
    merged = _merge(to_dict(PPOConfig()), _plain(config))
    try:
        tree = _resolve(OmegaConf.create(merged), "", problems)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the configuration can't be parsed: {error}") from error
    remember_secrets("", tree)
    return _read_section(tree, PPOConfig(), "", problems), problems


def read_saved(file: Path) -> DictConfig:
    """The config.yaml that a run left; a ConfigError if it can't be read as such."""
    try:
        saved = OmegaConf.load(file)
        OmegaConf.to_container(saved, resolve=False)
    except (OSError, ValueError, RecursionError, YAMLError, OmegaConfBaseException) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{file} can't be read: {reason}. Bring it back, or give another run.") from error
    if not isinstance(saved, DictConfig):
        raise ConfigError(f"{file} holds no keys. Bring it back, or give another run.")
    return saved


def to_dict(cfg: PPOConfig) -> dict[str, Any]:
    """The configuration as nested plain dicts and lists."""
    return _as_lists(dataclasses.asdict(cfg))


def to_dictconfig(cfg: PPOConfig) -> DictConfig:
    """The configuration as a DictConfig that refuses unknown keys."""
    result = OmegaConf.create(to_dict(cfg))
    OmegaConf.set_struct(result, True)
    return result


def _as_lists(value: Any) -> Any:
    """Tuples as lists, as yaml has them."""
    if isinstance(value, dict):
        return {key: _as_lists(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_lists(item) for item in value]
    return value


def _plain(config: Config) -> dict[str, Any]:
    """What the user gave, as plain dicts with interpolations still in, without Hydra's own keys."""
    if isinstance(config, PPOConfig):
        return to_dict(config)
    if isinstance(config, DictConfig):
        config = OmegaConf.to_container(config, resolve=False)  # type: ignore[assignment]
    if not isinstance(config, Mapping):
        raise ConfigError(f"the configuration must be a DictConfig, a dict or a PPOConfig; got {type(config)}.")
    return {str(key): value for key, value in config.items() if key not in HYDRA_KEYS}


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`; an empty section (`trainer:` with nothing below) leaves the base as it is."""
    merged = dict(base)
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        elif value is not None or not isinstance(merged.get(key), dict):
            merged[key] = value
    return merged


def _resolve(node: Any, key: str, problems: Problems) -> Any:
    """Plain values of an OmegaConf tree; what can't be resolved is a problem and left out."""
    if isinstance(node, DictConfig):
        resolved: dict[str, Any] = {}
        for name in node:
            full = f"{key}.{name!s}" if key else str(name)
            try:
                resolved[str(name)] = _resolve(node[name], full, problems)
            except MissingMandatoryValue:
                problems[full] = f"{full} is marked as missing (???); set it."
            except OmegaConfBaseException as error:
                problems[full] = f"{full} can't be resolved: {str(error).splitlines()[0]}"
        return resolved
    if isinstance(node, ListConfig):
        return [_resolve(item, key, problems) for item in node]
    return node


def _read_section(tree: Mapping[str, Any], default: Any, prefix: str, problems: Problems) -> Any:
    """The dataclass of one section, with `default` where nothing (right) was given."""
    hints = get_type_hints(type(default))
    values: dict[str, Any] = {}
    for name, value in tree.items():
        key = prefix + name
        if name not in hints:
            _report_unknown(key, value, problems)
        elif dataclasses.is_dataclass(hints[name]):
            if isinstance(value, Mapping):
                values[name] = _read_section(value, getattr(default, name), key + ".", problems)
            else:
                problems[key] = f"{key} is a section and wants keys below it; got {_shown(value)}."
        else:
            try:
                values[name] = _local(_read_value(value, hints[name]), known_keys()[key].names)
            except _NoPathError as error:
                problems[key] = f"{key}: {str(value)[:200]!r} can't be a path: {error}. Set it to another."
            except _UnknownChoiceError:
                problems[key] = refused_choice(key, value, get_args(_without_none(hints[name])))
            except _MismatchError:
                problems[key] = f"{key} wants {_wanted(hints[name])}; got {_shown(value)}.{_quoting(key, value)}"
    return dataclasses.replace(default, **values)


def _report_unknown(key: str, value: Any, problems: Problems) -> None:
    """Say of an unknown key that it is not supported, or which known one is the nearest."""
    if key in UNSUPPORTED_KEYS:
        problems[key] = f"{key} {UNSUPPORTED_KEYS[key]}"
    elif isinstance(value, Mapping) and any(name.startswith(key + ".") for name in UNSUPPORTED_KEYS):
        for name, item in value.items():
            _report_unknown(f"{key}.{name}", item, problems)
    else:
        close = nearest_key(key)
        problems[key] = f"{key} is not a key" + (f"; did you mean {close}?" if close else ".")


class _MismatchError(Exception):
    """A value that is not of the wanted type."""


class _NoPathError(Exception):
    """A text that can't name a file or a folder."""


class _UnknownChoiceError(_MismatchError):
    """A text that is none of the choices."""


def _without_none(hint: Any) -> Any:
    """X of X | None; the hint itself if it has no None or more than one other member."""
    members = [member for member in get_args(hint) if member is not type(None)]
    return members[0] if get_origin(hint) in (Union, types.UnionType) and len(members) == 1 else hint


def _read_value(value: Any, hint: Any) -> Any:
    """`value` as the type `hint`; raises _MismatchError. Numbers may come as text, as from ${oc.env:...} or 1e-6."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        inner = _without_none(hint)
        return _read_value(value, inner) if inner is not hint else _read_any_of(value, args)
    if origin is Literal:
        if not isinstance(value, str):
            raise _MismatchError
        if value not in args:
            raise _UnknownChoiceError
        return value
    if origin is list:
        items = [value] if isinstance(value, str) else value  # one name stands for a list of one
        if not isinstance(items, list | tuple):
            raise _MismatchError
        return [_read_value(item, args[0]) for item in items]
    if origin is tuple:
        if not isinstance(value, list | tuple) or len(value) != len(args):
            raise _MismatchError
        return tuple(_read_value(item, arg) for item, arg in zip(value, args, strict=True))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise _MismatchError
        return dict(value)
    if hint in (int, float):
        return _read_number(value, hint)
    if not isinstance(value, hint):
        raise _MismatchError
    return value


def _read_any_of(value: Any, hints: tuple[Any, ...]) -> Any:
    for hint in hints:
        try:
            return _read_value(value, hint)
        except _MismatchError:
            continue
    raise _MismatchError


def _read_number(value: Any, kind: type[int] | type[float]) -> int | float:
    accepted = (int, str) if kind is int else (int, float, str)
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise _MismatchError
    try:
        number = kind(value)
    except (ValueError, OverflowError) as error:
        raise _MismatchError from error
    if not math.isfinite(number) or (kind is int and abs(number) >= _TOO_LARGE):
        raise _MismatchError
    return number


def _wanted(hint: Any) -> str:
    """A type in words.

    >>> _wanted(int | None)
    'a whole number or null'
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_wanted(arg) for arg in args)
    if origin is Literal:
        return f"one of {', '.join(args)}"
    if origin is list:
        return f"a list, each item {_wanted(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)}, each item {_wanted(args[0])}"
    if origin is dict:
        return "a section with keys of its own"
    words = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text", type(None): "null"}
    return words[hint]


def _shown(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= _TOO_LARGE:
        return f"{value:.3g}, which is too large" if abs(value) < 10**300 else "one that is too large"
    return "null" if value is None else f"{value!r} ({type(value).__name__})"


def _quoting(key: str, value: Any) -> str:
    """How to give a number as text on the command line, where that was probably meant."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    wants_text = _without_none(known_keys()[key].hint) is str
    return f""" On the command line, quote it twice: "{key}='{value}'".""" if is_number and wants_text else ""


def _local(value: Any, names: Names | None) -> Any:
    """Paths with `~` expanded and made absolute: the processes that open them need not share the caller's folder."""
    if isinstance(value, list) and names is Names.PATH:
        return [_local(item, names) for item in value]
    if not isinstance(value, str) or "://" in value or not value:
        return value
    if names is Names.MODULE and (value.endswith(".py") or _is_file(f"{value}.py")):
        return _absolute(value if value.endswith(".py") else f"{value}.py")
    if names is Names.PATH or (names is Names.MODEL and is_local_path(value)):
        return _absolute(value)
    return value


def _absolute(path: str) -> str:
    """Raises _NoPathError for what no file can be called: too long, or with characters that names can't have."""
    absolute = os.path.abspath(os.path.expanduser(path))
    try:
        os.stat(absolute)
    except ValueError as error:
        raise _NoPathError(str(error)) from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise _NoPathError(str(error.strerror)) from error
    return absolute


def is_local_path(path: str) -> bool:
    """Whether a model path means a folder here, rather than a hub id such as org/name."""
    return path.startswith(("/", "~", ".")) or path.count("/") > 1 or _exists(path)


def _exists(path: str) -> bool:
    """False also for what can't be a name."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def _is_file(path: str) -> bool:
    return _exists(path) and Path(path).is_file()
