"""Tools that a model may call: what a tool is, the file that names them, and calls that cost no more than their row.

tools:
  - class_name: paceline.agents.calculator.Calculator
    config: {type: native}
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from paceline.agents.conversation import Conversation
from paceline.agents.parsers import ToolCall
from paceline.errors import ConfigError
from paceline.external import import_named

logger = logging.getLogger(__name__)

T = TypeVar("T")
Side = Literal["left", "right", "middle"]
KEY = "actor_rollout_ref.rollout.multi_turn.tool_config_path"


@dataclass
class ToolAnswer:
    """What a call gives."""

    text: str
    """What the model reads."""
    reward: float = 0.0
    """What its turn earns by the call."""
    metrics: dict[str, float] = field(default_factory=dict)


class Tool:
    """A tool: subclass it, with a `schema` or one in the tool file, and name the class there.

    `config` of the tool file goes to the constructor, but for `type`, `timeout_seconds` and `max_concurrent`. Methods
    may be plain or async; plain ones run in threads. What one raises becomes the tool's text.
    """

    schema: Mapping[str, Any] = {}
    """In OpenAI's form: `{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}`."""

    def __init__(self, **config: Any) -> None:
        self.config = config

    def create(self, **create_kwargs: Any) -> Any:
        """Before a call: what `execute` works on. `create_kwargs` are the row's, from its tools_kwargs."""
        return create_kwargs

    def execute(self, state: Any, arguments: dict[str, Any], memory: dict[str, Any]) -> Any:
        """The answer: a ToolAnswer, a text, a dict (as JSON), or a tuple of these with reward and metrics.

        `memory` is empty when a conversation begins, and the same for all calls of this tool in it.
        """
        raise NotImplementedError

    def release(self, state: Any) -> None:
        """After a call, also one that failed."""

    def close(self, memory: dict[str, Any]) -> None:
        """After a conversation that called this tool."""


@dataclass
class _Known:
    """A tool of this process."""

    tool: Tool
    schema: Mapping[str, Any]
    timeout_seconds: float
    places: asyncio.Semaphore


@dataclass(frozen=True)
class ToolEntry:
    """A tool as the file describes it, checked."""

    tool: Callable[[], Tool]
    schema: Mapping[str, Any]
    timeout_seconds: float
    max_concurrent: int

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


def read_tools(path: str | None) -> list[ToolEntry]:
    """The tools of a tool file; a ConfigError with all that is wrong with it. None has none."""
    if path is None:
        return []
    entries: list[ToolEntry] = []
    problems = list(_read(Path(path), entries))
    names = [entry.name for entry in entries]
    problems += [f"two tools are called {name!r}." for name in sorted({one for one in names if names.count(one) > 1})]
    if problems:
        raise ConfigError([f"{KEY}={path}: {problem}" for problem in problems])
    return entries


def _read(path: Path, entries: list[ToolEntry]) -> Iterator[str]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        yield f"it can't be read: {error}."
        return
    listed = content.get("tools") if isinstance(content, dict) else None
    if not isinstance(listed, list) or not listed:
        yield "it must have a list `tools` with at least one entry."
        return
    for number, item in enumerate(listed):
        where = f"tools[{number}]"
        if not isinstance(item, dict) or not isinstance(item.get("class_name"), str):
            yield f"{where} needs `class_name`, a class with dots or file.py:Class."
            continue
        config = dict(item.get("config") or {})
        if (kind := config.pop("type", "native")) != "native":
            yield f"{where}.config.type={kind} is not supported; set native."
            continue
        timeout, most = config.pop("timeout_seconds", 30.0), config.pop("max_concurrent", 8)
        if not isinstance(timeout, int | float) or timeout <= 0:
            yield f"{where}.config.timeout_seconds={timeout} must be a number above 0."
            continue
        if not isinstance(most, int) or most < 1:
            yield f"{where}.config.max_concurrent={most} must be a whole number of at least 1."
            continue
        try:
            cls = import_named(item["class_name"])
            tool = cls(**config)
        except Exception as error:  # it is the user's code
            yield f"{where}.class_name={item['class_name']}: {type(error).__name__}: {error}."
            continue
        schema = item.get("tool_schema") or tool.schema
        if problem := _schema_problem(schema):
            yield f"{where}: {problem}"
            continue
        entries.append(ToolEntry(_maker(cls, config), schema, float(timeout), most))


def _maker(cls: Any, config: dict[str, Any]) -> Callable[[], Tool]:
    return lambda: cls(**config)


def _schema_problem(schema: object) -> str | None:
    function = schema.get("function") if isinstance(schema, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return "its schema needs `function` with a `name`: give `tool_schema`, or the class one of its own."
    return None


class Toolbox:
    """The tools of a process; `of` gives those of one conversation."""

    def __init__(self, entries: Sequence[ToolEntry], *, max_characters: int, side: Side) -> None:
        self._known = {
            entry.name: _Known(
                entry.tool(), entry.schema, entry.timeout_seconds, asyncio.Semaphore(entry.max_concurrent)
            )
            for entry in entries
        }
        self._max_characters, self._side = max_characters, side

    def of(self, row: Mapping[str, Any]) -> ConversationTools:
        """Those of a row: all, or those that its extra_info.tool_selection names."""
        extra = row.get("extra_info") or {}
        settings = extra.get("tools_kwargs") or row.get("tools_kwargs") or {}
        selected = extra.get("tool_selection")
        known = self._known if selected is None else {name: self._known[name] for name in selected}
        return ConversationTools(known, settings, self._shown)

    def _shown(self, text: str) -> str:
        return truncated(text, self._max_characters, self._side)


class ConversationTools:
    """The tools of one conversation, with what they remember of it."""

    def __init__(self, known: Mapping[str, _Known], settings: Mapping[str, Any], shown: Callable[[str], str]) -> None:
        self._known, self._settings, self._shown = known, settings, shown
        self._memory: dict[str, dict[str, Any]] = {}

    @property
    def schemas(self) -> list[Mapping[str, Any]]:
        return [known.schema for known in self._known.values()]

    async def call(self, call: ToolCall, conversation: Conversation) -> ToolAnswer:
        """The answer; of a call that fails, what went wrong, with no reward."""
        conversation.count("tool_calls")
        known = self._known.get(call.name)
        if known is None:
            conversation.count("tool_errors")
            return ToolAnswer(
                self._shown(f"Error: there is no tool {call.name!r}; there are {', '.join(self._known)}.")
            )
        try:
            async with known.places, asyncio.timeout(known.timeout_seconds):
                answer = await self._answer(known.tool, call)
        except TimeoutError:
            conversation.count("tool_errors")
            answer = ToolAnswer(f"Error: {call.name} gave no answer within {known.timeout_seconds:g} s.")
        except Exception as error:  # it is the user's code
            logger.debug("tool %s failed", call.name, exc_info=True)
            conversation.count("tool_errors")
            answer = ToolAnswer(f"Error: {type(error).__name__}: {error}")
        return ToolAnswer(self._shown(answer.text), answer.reward, answer.metrics)

    async def _answer(self, tool: Tool, call: ToolCall) -> ToolAnswer:
        create_kwargs = (self._settings.get(call.name) or {}).get("create_kwargs") or {}
        state = await called(tool.create, **create_kwargs)
        try:
            memory = self._memory.setdefault(call.name, {})
            return _as_answer(await called(tool.execute, state, call.arguments, memory))
        finally:
            await called(tool.release, state)

    async def close(self) -> None:
        """The conversation is over."""
        for name, memory in self._memory.items():
            try:
                async with asyncio.timeout(self._known[name].timeout_seconds):
                    await called(self._known[name].tool.close, memory)
            except Exception:  # it is the user's code, and the conversation has ended
                logger.warning("tool %s could not be closed", name, exc_info=True)


def _as_answer(value: Any) -> ToolAnswer:
    if isinstance(value, ToolAnswer):
        return value
    text, *rest = value if isinstance(value, tuple) else (value,)
    reward, metrics = (*rest, *(0.0, {})[len(rest) :])
    return ToolAnswer(text if isinstance(text, str) else json.dumps(text), float(reward), dict(metrics))


async def called(function: Callable[..., T | Awaitable[T]], *args: Any, **kwargs: Any) -> T:
    """The result of a function of a user's: awaited, or from a thread of its own.

    A thread that never ends is left behind when its caller's time is over; it keeps no other call from its place.
    """
    if inspect.iscoroutinefunction(function):
        result: T = await function(*args, **kwargs)
        return result
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(value)

    def run() -> None:
        value, error = None, None
        try:
            value = function(*args, **kwargs)
        except BaseException as raised:
            # A StopIteration can't be the exception of a future.
            error = RuntimeError(repr(raised)) if isinstance(raised, StopIteration) else raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name=f"tool {getattr(function, '__name__', '')}", daemon=True).start()
    return await future


def truncated(text: str, most: int, side: Side) -> str:
    """A tool's text of at most so many characters, and a word of what was left out.

    >>> truncated("0123456789", 4, "middle")
    '01...(truncated)...89'
    """
    if len(text) <= most:
        return text
    if side == "left":
        return f"(truncated)...{text[-most:]}"
    if side == "right":
        return f"{text[:most]}...(truncated)"
    half = most // 2
    return f"{text[:half]}...(truncated)...{text[len(text) - half :]}"
