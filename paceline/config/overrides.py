"""Command-line overrides, made ready for Hydra.

Hydra refuses a key that its yaml does not have, one at a time and in its own words. Here every override is turned
into Hydra's "set or add" form, so that composing always works and load_config reports all problems together. It
also lets `ray_kwargs.ray_init.num_cpus=4` and `+trainer.nnodes=2` mean what they seem to mean.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from paceline.config import AnyRunConfig, PPOConfig
from paceline.config.keys import is_known_key, known_keys, nearest_key
from paceline.config.secrets import masked_command
from paceline.errors import ConfigError

# Hydra's flags that are followed by a value of their own.
_FLAGS_WITH_VALUE = {"--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd", "--package", "-p"}
_FLAGS_WITH_VALUE |= {"--cfg", "-c", "--experimental-rerun"}
# Flags that bring yaml files of the user's own: a name without a dot may then be a config group.
_FLAGS_WITH_GROUPS = ("--config-path", "-cp", "--config-dir", "-cd")


def check_overrides(argv: Sequence[str], root: type[AnyRunConfig] = PPOConfig) -> list[str]:
    """Arguments (without the program's name) for Hydra, given those of the user.

    Raises ConfigError for what is no override at all and for `~key` with an unknown key; unknown keys that are set
    are left for load_config.

    >>> check_overrides(["trainer.nnodes=2", "+trainer.seed=3", "--cfg", "job"])
    ['++trainer.nnodes=2', '++trainer.seed=3', '--cfg', 'job']
    """
    argv = _without_files_of_verl(argv)
    has_groups = any(argument.split("=")[0] in _FLAGS_WITH_GROUPS for argument in argv)
    ready: list[str] = []
    problems: list[str] = []
    flag = ""
    for argument in argv:
        is_value = flag in _FLAGS_WITH_VALUE or (flag in ("--info", "-i") and "=" not in argument)
        flag = argument if argument.startswith("-") else ""
        if flag or is_value:
            ready.append(argument)
            continue
        try:
            ready.append(_for_hydra(argument, has_groups, root))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return ready


def override_tree(argv: Sequence[str]) -> tuple[dict[str, str], dict[str, object]]:
    """Overrides without Hydra: each key with its argument as typed, and the nested values of all of them.

    Flags and keys of Hydra's own are left out. A key that is given twice has its last value.
    """
    asked: dict[str, str] = {}
    tree: dict[str, object] = {}
    for argument in check_overrides(argv):
        if argument.startswith(("-", "~")):
            continue
        override = OverridesParser.create().parse_override(argument)
        key = override.key_or_group
        if key.split(".")[0] in ("hydra", "defaults") or "/" in key:
            continue
        asked[key] = argument.lstrip("+")
        node = tree
        *sections, last = key.split(".")
        for section in sections:
            below = node.get(section)
            if not isinstance(below, dict):
                below = node[section] = {}
            node = below
        node[last] = override.value()
    return asked, tree


def _without_files_of_verl(argv: Sequence[str]) -> list[str]:
    """Arguments without the flags that choose one of verl's own yaml files.

    Its `config` folder is ours, and ppo_megatron_trainer is our yaml with another training backend.

    >>> _without_files_of_verl(["--config-path=./config", "--config-name=ppo_megatron_trainer.yaml", "a.b=1"])
    ['model_engine=megatron', 'a.b=1']
    """
    kept: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag not in ("--config-path", "-cp", "--config-name", "-cn"):
            kept.append(argument)
            continue
        value = value if equals else next(arguments, "")
        name = re.fullmatch(r"ppo_(?:(\w+)_)?trainer(?:\.yaml)?", value)
        if flag in ("--config-name", "-cn") and name is not None:
            kept += [f"model_engine={name[1]}"] if name[1] else []
        elif flag in ("--config-name", "-cn") or value.removeprefix("./").rstrip("/") != "config":
            kept += [argument] if equals else [argument, value]
    return kept


def _quoted_home(argument: str) -> str:
    """`key=~/folder` with the value in quotes, and in a list each item: Hydra's grammar has no bare `~`, and the shell
    leaves it as it is.

    >>> _quoted_home("data.val_files=[~/a.parquet,b.parquet]")
    "data.val_files=['~/a.parquet',b.parquet]"
    """
    key, equals, value = argument.partition("=")
    if value.startswith("[") and "~" in value:
        return f"{key}=" + re.sub(r"(?<=[\[,])(\s*)(~[^,\]'\"\s]*)(?=\s*[,\]])", r"\1'\2'", value)
    return f"{key}='{value}'" if equals and value.startswith("~") and "'" not in value else argument


def _for_hydra(argument: str, has_groups: bool, root: type[AnyRunConfig]) -> str:
    argument = _quoted_home(argument)
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException as error:
        shown = masked_command([argument])[0]
        reason = f": {error}" if shown == argument else ""  # Hydra repeats what it can't read
        raise ConfigError(
            f"{shown!r} is not an override{reason}. Write key=value; a value with special characters needs quotes "
            """that the shell leaves: "key='value'"."""
        ) from error
    key = override.key_or_group
    if override.package is not None and not has_groups and not override.is_delete():
        return f"++_groups_.{override.package}={argument.partition('=')[2]}"
    is_group = "/" in key or override.package is not None or (has_groups and "." not in key)
    if is_group or key.split(".")[0] == "hydra":
        return argument
    known = known_keys(root)
    if key in known and known[key].is_section and (override.is_delete() or override.value() is None):
        raise ConfigError(
            f"{argument} would drop all keys of the section {key}, with what was set before. Name the keys to change, "
            f"such as {next(name for name in known if name.startswith(f'{key}.'))}=..."
        )
    if override.is_delete():
        if not is_known_key(key, root):
            close = nearest_key(key, root)
            raise ConfigError(f"~{key}: {key} is not a key" + (f"; did you mean ~{close}?" if close else "."))
        return argument
    return "++" + argument.lstrip("+")
