"""From what a user gives (Hydra's config, a yaml, a dict, dataclasses) to one complete, frozen, typed
configuration: a PPOConfig, or that of another kind of run.

Takes any subset of the keys; the rest are the defaults of the dataclasses. Gives all problems at once.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, get_args, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from paceline.config import (
    AnyRunConfig,
    DPOConfig,
    PPOConfig,
    RewardModelTrainingConfig,
    SFTConfig,
    SupervisedConfig,
)
from paceline.config.derived import Root
from paceline.config.dialect.choices import refused_choice
from paceline.config.dialect.translation import Note, translate
from paceline.config.field_rules import Names
from paceline.config.keys import item_section, known_keys, nearest_key, walk_keys
from paceline.config.read_value import (
    MismatchError,
    NoPathError,
    UnknownChoiceError,
    how_to_quote,
    read_value,
    shown_text,
    wanted_text,
    with_local_paths,
    without_none,
)
from paceline.config.secrets import remember_secrets
from paceline.errors import ConfigError
from paceline.text import did_you_mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SectionType = TypeVar("SectionType", bound="DataclassInstance")
Config = DictConfig | Mapping[str, object] | PPOConfig
SupervisedSource = DictConfig | Mapping[str, object] | SupervisedConfig
Problems = dict[str, str]
"""Key to message; a message begins with the key that it is about."""

HYDRA_KEYS = ("hydra", "defaults")
"""Top-level keys of the shipped yaml that speak to Hydra, not to us."""


def load_config(config: Config) -> PPOConfig:
    """The complete configuration: `config` over the defaults, interpolations resolved, paths made absolute.

    A PPOConfig is taken as it is. Raises ConfigError with every unknown key, unsupported key and wrong type.
    """
    if isinstance(config, PPOConfig):
        return config
    reading = read_config(config)
    if reading.problems:
        raise ConfigError(list(reading.problems.values()))
    return reading.cfg


@dataclass(frozen=True)
class Reading(Generic[Root]):
    """A configuration as far as it could be read."""

    cfg: Root
    """A key with a problem has its default here."""
    problems: Problems
    notes: list[Note] = field(default_factory=list)
    """What became of keys of verl's that were taken."""


def read_config(config: Config) -> Reading[PPOConfig]:
    """As load_config, but gives the problems back, and what was said of keys of verl's.

    From here on, what is a secret in it is hidden in all that this process logs, raises and writes.
    """
    if isinstance(config, PPOConfig):
        return Reading(config, {})
    problems: Problems = {}
    translation = translate(_resolved_tree(config, PPOConfig(), problems))
    problems |= translation.problems
    cfg = _read_section(translation.tree, PPOConfig(), "", problems, PPOConfig)
    return Reading(cfg, problems, translation.notes)


def read_config_of(root: type[Root], config: SupervisedSource) -> Reading[Root]:
    """The same for another kind of run, with keys of its own and none of verl's."""
    if isinstance(config, root):
        return Reading(config, {})
    problems: Problems = {}
    tree = _resolved_tree(config, root(), problems)
    return Reading(_read_section(tree, root(), "", problems, cast(type[AnyRunConfig], root)), problems)


def _resolved_tree(config: Config | SupervisedSource, default: AnyRunConfig, problems: Problems) -> dict[str, object]:
    """What was given over the defaults, its references followed; its secrets are hidden from here on."""
    merged = _merge(to_dict(default), _plain(config))
    try:
        is_ready = _is_resolved(merged)
        tree = copy.deepcopy(merged) if is_ready else _resolve_section(OmegaConf.create(merged), "", problems)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the configuration can't be parsed: {error}") from error
    remember_secrets("", tree)
    return tree


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


def read_policy_config(saved: DictConfig) -> Reading[PPOConfig]:
    """What `read_saved` gave, as the configuration of a policy: of a run on given texts its model, and its template."""
    if root_of(saved) is PPOConfig:
        return read_config(saved)
    template = OmegaConf.select(saved, "data.apply_chat_template_kwargs")
    policy = {"actor_rollout_ref": {"model": saved.model}, "data": {"apply_chat_template_kwargs": template or {}}}
    return read_config(OmegaConf.create(policy))


def root_of(saved: Mapping[Any, Any]) -> type[AnyRunConfig]:
    """Of which kind the run is that left this configuration."""
    if "model" not in saved or "engine" not in saved:
        return PPOConfig
    loss = saved.get("loss")
    if not isinstance(loss, Mapping):
        return SFTConfig
    return DPOConfig if "beta" in loss else RewardModelTrainingConfig


def to_dict(cfg: AnyRunConfig) -> dict[str, Any]:
    """The configuration as nested plain dicts and lists."""
    return {key: _as_lists(value) for key, value in dataclasses.asdict(cfg).items()}


def to_dictconfig(cfg: AnyRunConfig) -> DictConfig:
    """The configuration as a DictConfig that refuses unknown keys."""
    result = OmegaConf.create(to_dict(cfg))
    OmegaConf.set_struct(result, True)
    return result


def section_dictconfig(section: DataclassInstance) -> DictConfig:
    """One section as a DictConfig, for code of users."""
    return OmegaConf.create(dataclasses.asdict(section))


def _as_lists(value: object) -> object:
    """Tuples as lists, as yaml has them."""
    if isinstance(value, dict):
        return {key: _as_lists(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_lists(item) for item in value]
    return value


def _plain(config: Config | SupervisedSource) -> dict[str, object]:
    """What the user gave, as plain dicts with interpolations still in, without Hydra's own keys."""
    if isinstance(config, PPOConfig | SupervisedConfig):
        return to_dict(config)
    if isinstance(config, DictConfig):
        plain: object = OmegaConf.to_container(config, resolve=False)
    else:
        plain = config
    if not isinstance(plain, Mapping):
        raise ConfigError(
            f"the configuration must be a DictConfig, a dict or a dataclass of paceline.config; got {type(config)}."
        )
    return {str(key): value for key, value in plain.items() if key not in HYDRA_KEYS}


def _merge(base: dict[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """`over` on top of `base`; an empty section (`trainer:` with nothing below) leaves the base as it is."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, dict):
            merged[key] = _merge(below, value)
        elif value is not None or not isinstance(below, dict):
            merged[key] = value
    return merged


def _is_resolved(value: object) -> bool:
    """Whether OmegaConf would give back the same. Asking it takes longer than everything else in a read."""
    if type(value) is dict:
        return all(type(key) is str and _is_resolved(item) for key, item in value.items())
    if type(value) is list:
        return all(map(_is_resolved, value))
    if type(value) is str:
        return "${" not in value and value != "???"
    return value is None or type(value) in (bool, int, float)


def _resolve_section(section: DictConfig, key: str, problems: Problems) -> dict[str, object]:
    """Plain values of a section; what can't be resolved is a problem and left out."""
    resolved: dict[str, object] = {}
    for name in section:
        full = f"{key}.{name!s}" if key else str(name)
        try:
            resolved[str(name)] = _resolve(section[name], full, problems)
        except MissingMandatoryValue:
            problems[full] = f"{full} is marked as missing (???); set it."
        except OmegaConfBaseException as error:
            problems[full] = f"{full} can't be resolved: {str(error).splitlines()[0]}"
    return resolved


def _resolve(node: object, key: str, problems: Problems) -> object:
    if isinstance(node, DictConfig):
        return _resolve_section(node, key, problems)
    if isinstance(node, ListConfig):
        return [_resolve(item, key, problems) for item in node]
    return node


@functools.cache
def _hints(section: type) -> dict[str, Any]:
    return get_type_hints(section)


@functools.cache
def _names_in(section: type[DataclassInstance]) -> dict[str, Names | None]:
    """Of each field what its text is the name of."""
    return {key.name: key.names for key in walk_keys(section())}


def _read_section(
    tree: Mapping[str, object], default: SectionType, prefix: str, problems: Problems, root: type[Any]
) -> SectionType:
    """The dataclass of one section, with `default` where nothing (right) was given."""
    hints = _hints(type(default))
    values: dict[str, object] = {}
    for name, value in tree.items():
        key = prefix + name
        if name not in hints:
            _report_unknown(key, value, problems, root)
        elif dataclasses.is_dataclass(hints[name]):
            if isinstance(value, Mapping):
                values[name] = _read_section(value, getattr(default, name), key + ".", problems, root)
            else:
                problems[key] = f"{key} is a section and wants keys below it; got {shown_text(value)}."
        elif (item := item_section(hints[name])) is not None:
            values[name] = _read_items(value, item, key, problems, root)
        else:
            try:
                values[name] = with_local_paths(read_value(value, hints[name]), _names_in(type(default))[name])
            except NoPathError as error:
                problems[key] = f"{key}: {str(value)[:200]!r} can't be a path: {error}. Set it to another."
            except UnknownChoiceError:
                problems[key] = refused_choice(key, str(value), get_args(without_none(hints[name])))
            except MismatchError:
                wanted, quoting = wanted_text(hints[name]), how_to_quote(key, value, hints[name])
                problems[key] = f"{key} wants {wanted}; got {shown_text(value)}.{quoting}"
    return dataclasses.replace(default, **values)


def _read_items(
    items: object, section: type[SectionType], key: str, problems: Problems, root: type[Any]
) -> dict[str, SectionType]:
    """Sections under names of the user's own."""
    fields = [field.name for field in dataclasses.fields(section)]
    read: dict[str, SectionType] = {}
    for name, value in items.items() if isinstance(items, Mapping) else [("", items)]:
        full = f"{key}.{name}".rstrip(".")
        if not isinstance(value, Mapping) or not name:
            problems[full] = f"{full} wants keys below it, {' and '.join(fields)}; got {shown_text(value)}."
            continue
        for unknown in value.keys() - set(fields):
            hint = did_you_mean(str(unknown), fields)
            problems[f"{full}.{unknown}"] = f"{full}.{unknown} is not a key.{hint} Known there: {', '.join(fields)}."
        known = {field: value[field] for field in fields if field in value}
        read[str(name)] = _read_section(known, section(), f"{full}.", problems, root)
    return read


def _report_unknown(key: str, value: object, problems: Problems, root: type[AnyRunConfig]) -> None:
    """Say of a key that nobody knows which known one is the nearest; of a section, of what is below it."""
    close, is_below_ours = nearest_key(key, root), key.partition(".")[0] in known_keys(root)
    if isinstance(value, Mapping) and value and close is None and is_below_ours:
        for name, item in value.items():
            _report_unknown(f"{key}.{name}", item, problems, root)
        return
    problems[key] = f"{key} is not a key" + (f"; did you mean {close}?" if close else ".")
