"""The configuration as yaml, as a page and as help, from the dataclasses and the docstrings under their fields.

`python -m paceline.config.describe yaml` writes the shipped yaml of PPO to standard output, `yaml sft` that of another
kind of run, `markdown` the reference in docs/config.md, `verl` docs/verl_keys.md; a test holds these files equal to
this.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Literal, Union, get_args, get_origin

import yaml

from paceline.config import AnyRunConfig, DPOConfig, PPOConfig, RewardModelTrainingConfig, SFTConfig
from paceline.config.dialect.choices import CHOICES, REFUSED_CHOICES
from paceline.config.dialect.rule_kinds import show
from paceline.config.dialect.translation import RULES
from paceline.config.keys import Key, walk_keys

_YAML_HEAD = """\
# Every key of a run with its default. Set keys on the command line (trainer.nnodes=2) or keep a yaml of your own with
# only those that differ: paths may begin with ~ and values may refer to others (${{{model}.path}}).
# Written by `python -m paceline.config.describe {command}`.

# Hydra: no folder of its own, no change of the working directory, and logging is left to paceline.
defaults:
  - override hydra/hydra_logging: none
  - override hydra/job_logging: none
  - _self_
hydra:
  run:
    dir: .
  output_subdir: null
  sweep:
    dir: .
    subdir: .
"""

_MARKDOWN_HEAD = """\
# Configuration

Every key with its type, its default and its meaning. Set keys on the command line:

```
python -m paceline.trainer.main_ppo data.train_files=train.parquet actor_rollout_ref.model.path=model
```

or give `run_ppo` an `OmegaConf.load(...)` of a yaml with any subset of them. `~` in paths is expanded, and relative
paths start at the folder in which the run was started. Unknown keys, wrong types and contradictions are listed all
together before anything starts; `trainer.dry_run=True` shows the derived batch sizes, the placement and an estimate of
the memory.

This page is written by `python -m paceline.config.describe markdown`.
"""

_VERL_HEAD = """\
# Keys of verl's

What becomes of the keys and values that launch scripts of verl have and that are not keys here. In a name, `*` is one
part, `**` the rest, `{a,b}` one of several. A key that is in no row, and is none of [ours](config.md), is refused with
the nearest one that is. [Coming from verl](coming_from_verl.md) says what behaves otherwise, and how to read a script.

This page is written by `python -m paceline.config.describe verl`.
"""

_HELP_HEAD = """\
{about}

Usage: {command} key=value ...     (--cfg job shows the composed configuration, --hydra-help Hydra's flags)

At least: data.train_files=train.parquet {model}.path=<folder or hub id>

examples:
  {command} data.train_files=train.parquet {model}.path=model trainer.dry_run=True     only a look
  {command} data.train_files=train.parquet {model}.path=model {example}
  paceline config clip                                                                     find a key

Keys, with their defaults:
"""


@dataclass(frozen=True)
class RunKind:
    """A kind of run, as its help and its yaml speak of it."""

    root: type[AnyRunConfig]
    about: str
    model: str
    """The section of its model."""
    example: str


KINDS = {
    "ppo": RunKind(
        PPOConfig, "PPO training of a language model.", "actor_rollout_ref.model", "trainer.placement.name=split"
    ),
    "sft": RunKind(
        SFTConfig, "Supervised fine-tuning of a language model on conversations.", "model", "model.lora_rank=16"
    ),
    "reward_model": RunKind(
        RewardModelTrainingConfig, "Training of a reward model on preference pairs.", "model", "optim.lr=2e-5"
    ),
    "dpo": RunKind(
        DPOConfig, "Direct preference optimisation of a language model on pairs.", "model", "loss.beta=0.05"
    ),
}
"""By the first part of the name of their yaml."""


@cache
def _docstrings(owner: type) -> dict[str, str]:
    """Field name to the docstring under it, on one line; of inherited fields too."""
    base = owner.__mro__[1]
    docs = dict(_docstrings(base)) if is_dataclass(base) else {}
    body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body  # type: ignore[attr-defined]
    for statement, following in pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            value = following.value if isinstance(following, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docs[statement.target.id] = " ".join(value.value.split())
    return docs


def docstring(key: Key) -> str:
    """What the docstring under the key's field says; empty if it has none."""
    return _docstrings(key.owner).get(key.field, "")


def _choices(hint: object) -> tuple[str, ...]:
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(choice for member in get_args(hint) for choice in _choices(member))
    return ()


def description(key: Key) -> str:
    """The docstring, and the choices where the type has some."""
    doc, choices = docstring(key), _choices(key.hint)
    if all(re.search(rf"\b{re.escape(choice)}\b", doc) for choice in choices):
        return doc
    return f"{doc} One of {', '.join(choices)}."


def type_name(hint: object) -> str:
    """A type as yaml users call it."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(arg) for arg in args)
    if origin is Literal:
        return "choice"
    if origin in (list, tuple):
        return f"list of {type_name(args[0])}"
    names: dict[object, str] = {
        str: "text", int: "int", float: "float", bool: "bool", type(None): "null", dict: "section"
    }  # fmt: skip
    return names[origin or hint]


def value_text(value: object) -> str:
    """A default as yaml text on one line."""
    plain = list(value) if isinstance(value, tuple) else value
    text: str = yaml.safe_dump(plain, default_flow_style=True, width=10_000)
    return text.removesuffix("...\n").strip()


def _wrap(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, 118, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def render_yaml(kind: str = "ppo") -> str:
    """trainer/config/<kind>_trainer.yaml: every key with its default, under a comment with its description."""
    command = "yaml" if kind == "ppo" else f"yaml {kind}"
    lines = [_YAML_HEAD.format(model=KINDS[kind].model, command=command).rstrip()]
    for key in walk_keys(KINDS[kind].root()):
        depth = key.name.count(".")
        indent = "  " * depth
        if depth == 0:
            lines.append("")
        lines += _wrap(description(key), indent + "# ")
        lines.append(f"{indent}{key.field}:" if key.is_section else f"{indent}{key.field}: {value_text(key.default)}")
    return "\n".join(lines) + "\n"


def render_markdown() -> str:
    """docs/config.md: one table per section, of PPO, then of the other kinds of runs."""
    lines = [_MARKDOWN_HEAD.rstrip(), *_section_tables(PPOConfig())]
    for name in ("sft", "reward_model", "dpo"):
        command, others = name.replace("_", "-"), "" if name == "sft" else " Other keys are as those of `paceline sft`."
        lines += ["", f"# paceline {command}", "", f"{KINDS[name].about}{others}"]
        known = {} if name == "sft" else {key.name: key for key in walk_keys(SFTConfig())}
        lines += _section_tables(KINDS[name].root(), f"{command}: ", known)
    return "\n".join(lines) + "\n"


def _section_tables(root: AnyRunConfig, title: str = "", known: Mapping[str, Key] | None = None) -> Iterator[str]:
    """A table for each section, without keys that are the same in `known`."""

    def is_known(key: Key) -> bool:
        same = (known or {}).get(key.name)
        return same is not None and (same.default, docstring(same)) == (key.default, docstring(key))

    keys = [key for key in walk_keys(root) if key.is_section or not is_known(key)]
    for section in (key for key in keys if key.is_section):
        leaves = [key for key in keys if not key.is_section and key.name.rpartition(".")[0] == section.name]
        if not leaves:
            continue
        about = inspect.getdoc(type(section.default)) or ""
        yield from ("", f"## {title}{section.name}", "", " ".join(about.split()), "")
        yield from ("| key | type | default | meaning |", "| --- | --- | --- | --- |")
        for key in leaves:
            meaning = description(key).replace("|", "\\|")
            yield f"| `{key.name}` | {type_name(key.hint)} | `{value_text(key.default)}` | {meaning} |"


def render_help(command: str, kind: str = "ppo") -> str:
    """What --help of a command that trains shows: how to start, then every key with its default and description."""
    this = KINDS[kind]
    head = _HELP_HEAD.format(command=command, about=this.about, model=this.model, example=this.example)
    lines = [head.rstrip()]
    for key in walk_keys(this.root()):
        if key.is_section:
            continue
        lines.append(f"  {key.name}={value_text(key.default)}")
        lines += _wrap(description(key), " " * 6)
    return "\n".join(lines) + "\n"


def render_verl_keys() -> str:
    """docs/verl_keys.md: what becomes of the keys and values that people bring from verl."""
    lines = [_VERL_HEAD.rstrip(), "", "## Keys", "", "| key | here |", "| --- | --- |"]
    lines += [f"| `{rule.pattern}` | {_in_table(rule.says)} |" for rule in RULES]
    lines += ["", "## Values of keys that are here", "", "| value | here |", "| --- | --- |"]
    for key, asked, settings, why in CHOICES:
        became = ", ".join(f"`{name}` is {show(value)}" for name, value in settings.items())
        lines.append(f"| `{key}`: {show(asked)} | {became}{f' ({why})' if why else ''} |")
    lines.append("| `trainer.logger`: file | left out: metrics.jsonl is always written |")
    lines += [f"| `{key}`: {name} | {said} |" for key, names in REFUSED_CHOICES.items() for name, said in names.items()]
    return "\n".join(lines) + "\n"


def _in_table(text: str) -> str:
    """Text for a cell, with nothing in it that reads as a setting of a page: `key=value` is `key: value`."""
    return re.sub(r"(?<=[a-z_])=(?=\w)", ": ", text).replace("|", "\\|").replace("**", "\\*\\*")


_RENDERERS: dict[str, Callable[[], str]] = {
    **{f"yaml {kind}": partial(render_yaml, kind) for kind in KINDS},
    "yaml": render_yaml,
    "markdown": render_markdown,
    "verl": render_verl_keys,
}

if __name__ == "__main__":
    asked = " ".join(sys.argv[1:])
    if asked not in _RENDERERS:
        sys.exit(f"usage: python -m paceline.config.describe {'|'.join(_RENDERERS)}")
    sys.stdout.write(_RENDERERS[asked]())
