from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.agents.calculator import evaluate
from paceline.agents.conversation import Conversation, Limits
from paceline.agents.parsers import ToolCall, hermes_calls, json_calls
from paceline.agents.tools import ToolAnswer, Toolbox, read_tools, truncated
from paceline.errors import ConfigError
from tests.unit.agents.chats import chat_template

TOOL_FILE = """
import threading, time
from paceline.agents import Tool, ToolAnswer

def schema(name):
    return {"type": "function", "function": {"name": name}}

class Odd(Tool):
    schema = schema("odd")
    def __init__(self, events=None):
        self.events = [] if events is None else events
    def create(self, **kwargs):
        return kwargs
    def execute(self, state, arguments, memory):
        memory["calls"] = memory.get("calls", 0) + 1
        kind = arguments.get("do")
        if kind == "hang":
            threading.Event().wait(60)
        if kind == "raise":
            raise KeyError("no such thing")
        if kind == "flood":
            return "x" * 1_000_000
        if kind == "sleep":
            time.sleep(0.2)
        if kind == "earn":
            return {"calls": memory["calls"], **state}, 0.5, {"m": 1.0}
        return "fine"

class AsyncTool(Tool):
    schema = schema("later")
    async def execute(self, state, arguments, memory):
        return ToolAnswer("later", 1.0)
"""


@pytest.fixture
def toolbox(tmp_path: Path) -> Toolbox:
    (tmp_path / "my_tools.py").write_text(TOOL_FILE)
    return Toolbox(read_tools(str(write(tmp_path, ODD))), max_characters=20, side="middle")


ODD = """
tools:
  - class_name: FOLDER/my_tools.py:Odd
    config: {type: native, timeout_seconds: 0.5, max_concurrent: 2}
  - class_name: FOLDER/my_tools.py:AsyncTool
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "tools.yaml"
    path.write_text(text.replace("FOLDER", str(folder)))
    return path


def conversation() -> Conversation:
    return Conversation(chat_template("blocks"), Limits(9, 9), [{"role": "user", "content": "?"}], [5])


def test_what_goes_wrong_in_a_tool_is_its_answer(toolbox: Toolbox) -> None:
    talk = conversation()

    async def ask() -> list[ToolAnswer]:
        tools = toolbox.of({})
        calls = [
            ToolCall("odd", {"do": "hang"}), ToolCall("odd", {"do": "raise"}), ToolCall("odd", {"do": "flood"}),
            ToolCall("nothing", {}), ToolCall("odd", {}), ToolCall("later", {}),
        ]  # fmt: skip
        return [await tools.call(call, talk) for call in calls]

    started = time.monotonic()
    hung, raised, flood, unknown, fine, later = asyncio.run(ask())
    assert time.monotonic() - started < 5
    assert hung.text.startswith("Error: odd...")
    assert raised.text.startswith("Error: Key...")
    assert flood.text == "x" * 10 + "...(truncated)..." + "x" * 10
    assert unknown.text.startswith("Error: the...")
    assert (fine.text, later.text, later.reward) == ("fine", "later", 1.0)
    assert talk.counts == {"tool_calls": 6, "tool_errors": 3}


def test_a_tool_has_the_rows_arguments_and_remembers_its_conversation_alone(toolbox: Toolbox) -> None:
    async def ask() -> list[ToolAnswer]:
        row = {"extra_info": {"tools_kwargs": {"odd": {"create_kwargs": {"k": 1}}}}}
        first, second = toolbox.of(row), toolbox.of({})
        call = ToolCall("odd", {"do": "earn"})
        return [await tools.call(call, conversation()) for tools in (first, first, second)]

    answers = asyncio.run(ask())
    assert [answer.text for answer in answers] == ['{"calls": 1, "k": 1}', '{"calls": 2, "k": 1}', '{"calls": 1}']
    assert [(answer.reward, answer.metrics) for answer in answers] == [(0.5, {"m": 1.0})] * 3


def test_no_more_calls_run_together_than_a_tool_allows(toolbox: Toolbox) -> None:
    async def ask() -> float:
        started = time.monotonic()
        tools = toolbox.of({})
        await asyncio.gather(*(tools.call(ToolCall("odd", {"do": "sleep"}), conversation()) for _ in range(4)))
        return time.monotonic() - started

    assert asyncio.run(ask()) >= 0.39


def test_a_row_may_choose_among_the_tools(toolbox: Toolbox) -> None:
    chosen = toolbox.of({"extra_info": {"tool_selection": ["later"]}})
    assert [schema["function"]["name"] for schema in chosen.schemas] == ["later"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "list `tools`"),
        ("tools: [{config: {}}]", "class_name"),
        ("tools: [{class_name: no.such.Thing}]", "no.such.Thing"),
        ("tools: [{class_name: paceline.agents.calculator.Calculator, config: {type: mcp}}]", "type=mcp"),
        ("tools: [{class_name: paceline.agents.tools.Tool}]", "tool_schema"),
        ("tools: [{class_name: paceline.agents.calculator.Calculator, config: {max_concurrent: 0}}]", "max_concurrent"),
        ("tools: [{class_name: paceline.agents.calculator.Calculator, config: {timeout_seconds: -1}}]", "timeout"),
        ("[", "can't be read"),
    ],
)
def test_a_tool_file_that_can_not_be_used_says_why(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_tools(str(write(tmp_path, text)))


def test_two_tools_of_one_name_are_an_error(tmp_path: Path) -> None:
    one = "{class_name: paceline.agents.calculator.Calculator}"
    with pytest.raises(ConfigError, match="two tools are called 'calculator'"):
        read_tools(str(write(tmp_path, f"tools: [{one}, {one}]")))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('<tool_call>{"name": "a", "arguments": {}}</tool_call> <tool_call>{"name": "b"}</tool_call>', ["a", "b"]),
        ('<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', ["a"]),
        ("<tool_call>{broken</tool_call>", []),
        ('<tool_call>{"name": 3}</tool_call><tool_call>[1]</tool_call>', []),
        ('<tool_call>{"name": "a", "arguments": "x"}</tool_call>', []),
        ('<tool_call>{"name": "a"}', []),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", []),
    ],
)
def test_hermes_calls_are_the_blocks_that_can_be_read(text: str, found: list[str]) -> None:
    assert [call.name for call in hermes_calls(text)] == found


def test_json_calls_are_a_whole_turn() -> None:
    assert json_calls('[{"name": "a", "arguments": {"x": 1}}, {"name": "b"}]') == [
        ToolCall("a", {"x": 1}),
        ToolCall("b", {}),
    ]
    assert json_calls('say {"name": "a"}') == []


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_a_short_text_is_not_cut(side: Any) -> None:
    assert truncated("0123", 4, side) == "0123"


def test_texts_are_cut_on_the_side_that_was_asked_for() -> None:
    assert truncated("012345", 2, "left") == "(truncated)...45"
    assert truncated("012345", 2, "right") == "01...(truncated)"


@pytest.mark.parametrize(
    "expression",
    ["__import__('os')", "2**100000", "9**64**64", "1/0", "a+1", "True+1", "1" * 300, "(-8)**0.5", "'a'*9"],
)
def test_the_calculator_computes_numbers_and_nothing_else(expression: str) -> None:
    with pytest.raises((ValueError, ArithmeticError)):
        evaluate(expression)


def test_the_calculator_is_right() -> None:
    assert [evaluate(text) for text in ("347+581", "-2*(3-5)", "7//2", "7%4", "2**10", "0.1+0.2", "6/3")] == [
        "928", "4", "3", "3", "1024", "0.30000000000000004", "2",
    ]  # fmt: skip
