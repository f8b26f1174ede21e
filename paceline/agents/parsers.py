"""Tool calls in a model's text, by the format that its chat template taught it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.catalog import TOOL_FORMATS, NameEntry, Registry

_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """What a turn asks for: `ToolCall("calculator", {"expression": "2+3"})`."""

    name: str
    arguments: dict[str, Any]


ToolParser = Callable[[str], list[ToolCall]]
"""All calls in a text that can be read, in their order; others are passed over."""

PARSERS: Registry[ToolParser, NameEntry] = Registry(TOOL_FORMATS)
_OPENINGS: dict[str, str] = {}


def register_tool_parser(name: str, opening: str = "") -> Callable[[ToolParser], ToolParser]:
    """Decorator: make a parser known as `actor_rollout_ref.rollout.multi_turn.format=name`.

    `opening` is what a call begins with. The text before it is no part of a call, and can be streamed at once; without
    an opening, a whole turn may be one.
    """
    _OPENINGS[name] = opening
    return PARSERS.register(name, None if name in TOOL_FORMATS.built_in else NameEntry())


@dataclass(frozen=True)
class ToolFormat:
    """How calls are written: `ToolFormat.named("hermes")`."""

    calls: ToolParser
    opening: str
    """See `register_tool_parser`."""

    @classmethod
    def named(cls, name: str) -> ToolFormat:
        return cls(PARSERS.get(name), _OPENINGS.get(name, ""))


@register_tool_parser("hermes", opening="<tool_call>")
def hermes_calls(text: str) -> list[ToolCall]:
    """
    >>> hermes_calls('So <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [ToolCall(name='add', arguments={'a': 1})]
    """
    return [call for block in _HERMES.findall(text) for call in _calls(block)]


@register_tool_parser("json")
def json_calls(text: str) -> list[ToolCall]:
    """The whole text is one call, or a list of calls.

    >>> json_calls('{"name": "add", "parameters": {"a": 1}}')
    [ToolCall(name='add', arguments={'a': 1})]
    """
    return _calls(text)


def _calls(text: str) -> list[ToolCall]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    found = []
    for item in value if isinstance(value, list) else [value]:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            continue
        arguments = item.get("arguments", item.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                continue
        if isinstance(arguments, dict):
            found.append(ToolCall(item["name"], arguments))
    return found
