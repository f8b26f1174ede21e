"""Against a real server in a process of its own, over stdio."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from paceline.agents.conversation import Conversation, Limits
from paceline.agents.parsers import ToolCall
from paceline.agents.tools import Toolbox, read_tools
from paceline.errors import ConfigError
from tests.unit.agents.chats import chat_template

pytest.importorskip("mcp")
pytestmark = pytest.mark.slow

SERVER = """
import os, time
from mcp.server.mcpserver import MCPServer

server = MCPServer("odd")

@server.tool()
def double(number: int) -> str:
    "Twice a number."
    return str(2 * number)

@server.tool()
def fail(kind: str) -> str:
    "Goes wrong."
    if kind == "die":
        os._exit(3)
    if kind == "hang":
        time.sleep(60)
    raise ValueError("on purpose")

server.run()
"""


def tool_file(folder: Path, *names: str) -> str:
    server = folder / "server.py"
    server.write_text(SERVER)
    config = f"type: native, command: [{sys.executable}, {server}], timeout_seconds: 20"
    entries = [
        f"- {{class_name: paceline.agents.mcp_tools.McpTool, config: {{{config}, tool: {name}}}}}" for name in names
    ]
    path = folder / "tools.yaml"
    path.write_text("tools:\n" + "\n".join(entries))
    return str(path)


def test_a_servers_tools_answer_and_its_death_costs_one_call(tmp_path: Path) -> None:
    toolbox = Toolbox(read_tools(tool_file(tmp_path, "double", "fail")), max_characters=200, side="right")
    talk = Conversation(chat_template("blocks"), Limits(9, 9), [{"role": "user", "content": "?"}], [5])

    async def ask() -> list[str]:
        tools = toolbox.of({})
        schemas = [schema["function"] for schema in tools.schemas]
        assert schemas[0]["description"] == "Twice a number."
        assert schemas[0]["parameters"]["properties"]["number"]["type"] == "integer"
        calls = [
            ("double", {"number": 4}),
            ("fail", {"kind": "raise"}),
            ("fail", {"kind": "die"}),
            ("double", {"number": 5}),
        ]
        return [(await tools.call(ToolCall(name, arguments), talk)).text for name, arguments in calls]

    first, raised, died, again = asyncio.run(ask())
    assert (first, again) == ("8", "10")
    assert raised.startswith("Error: ")
    assert died.startswith("Error: ")
    assert talk.counts == {"tool_calls": 4, "tool_errors": 2}


def test_a_tool_or_server_that_is_not_there_is_named_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tool 'tripple'; it has double, fail"):
        read_tools(tool_file(tmp_path, "tripple"))
    missing = tmp_path / "missing.yaml"
    entry = "{class_name: paceline.agents.mcp_tools.McpTool, config: {command: [/no/such/program], tool: x}}"
    missing.write_text(f"tools: [{entry}]")
    with pytest.raises(ConfigError, match=r"could not be started"):
        read_tools(str(missing))
