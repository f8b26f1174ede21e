from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from paceline.agents.conversation import Conversation, Limits
from paceline.agents.parsers import ToolCall
from paceline.agents.tools import ConversationTools, Toolbox, read_tools
from paceline.errors import ConfigError
from tests.unit.agents.chats import chat_template

ENTRY = "tools: [{class_name: paceline.workers.code_interpreter.CodeInterpreter, config: {type: native, %s}}]"


def toolbox(folder: Path, config: str) -> Toolbox:
    path = folder / "tools.yaml"
    path.write_text(ENTRY % config)
    return Toolbox(read_tools(str(path)), max_characters=300, side="right")


def answers(tools: ConversationTools, talk: Conversation, *cells: str) -> list[str]:
    async def ask() -> list[str]:
        calls = [ToolCall("code_interpreter", {"code": cell}) for cell in cells]
        return [(await tools.call(call, talk)).text for call in calls]

    return asyncio.run(ask())


def conversation() -> Conversation:
    return Conversation(chat_template("blocks"), Limits(9, 9), [{"role": "user", "content": "?"}], [5])


def test_names_are_those_of_the_conversation_and_what_goes_wrong_costs_a_call(tmp_path: Path) -> None:
    box, talk = toolbox(tmp_path, "wall_seconds: 2, cpu_seconds: 1"), conversation()
    found = answers(
        box.of({}), talk, "x = 2\nprint('set')", "x + 3", "x / 0", "while True: pass", "import socket\nx * 10"
    )
    assert found[:2] == ["set", "5"]
    assert found[2].startswith("ZeroDivisionError")
    assert found[3].startswith("Error: ")
    assert "timeout" in found[3]
    assert found[4] == "20"
    assert talk.counts == {"tool_calls": 5, "tool_errors": 1}
    assert answers(box.of({}), talk, "x")[0].startswith("NameError")


def test_limits_that_can_not_be_set_are_named_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"SandboxLimits.wall_seconds=0"):
        toolbox(tmp_path, "wall_seconds: 0")
