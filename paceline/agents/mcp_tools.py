"""Tools of a server that speaks the Model Context Protocol, started as a process and spoken to over its pipes.

    tools:
      - class_name: paceline.agents.mcp_tools.McpTool
        config: {type: native, command: [python, my_server.py], tool: search, timeout_seconds: 10}

Tools with the same command share a server in each agent process. One that dies is started again by the next call.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from paceline.agents.tools import Tool
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from mcp import ClientSession

logger = logging.getLogger(__name__)

START_SECONDS = 30.0
PING_SECONDS = 2.0
"""A server that was slow before, and does not answer within these, is started again."""


class McpServer:
    """A server process and the session with it, in the event loop of whoever calls first."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._command, self._env = list(command), dict(env)
        self._session: ClientSession | None = None
        self._life: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._is_doubtful = False
        """A call did not come back in time, or its pipe broke."""

    async def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """The text of a tool's answer; an error of the tool, or of the server, is raised."""
        session = await self._ready()
        try:
            result: Any = await session.call_tool(tool, arguments)
        except BaseException:
            self._is_doubtful = True
            raise
        text = "\n".join(part.text for part in result.content if part.type == "text")
        if result.is_error:
            raise PacelineError(text or f"{tool} failed")
        return text

    async def tools(self) -> list[Any]:
        """What the server offers."""
        listed: Any = await (await self._ready()).list_tools()
        return list(listed.tools)

    async def _ready(self) -> ClientSession:
        async with self._starting:
            if self._session is not None and self._is_doubtful and not await self._answers(self._session):
                logger.warning("the MCP server %s does not answer and is started again", self._command)
                await self.close()
            if self._session is None:
                await self._start()
            self._is_doubtful = False
            assert self._session is not None
            return self._session

    @staticmethod
    async def _answers(session: ClientSession) -> bool:
        try:
            async with asyncio.timeout(PING_SECONDS):
                await session.send_ping()
        except Exception:  # a closed stream, a broken pipe, a deadline: the library has several
            return False
        return True

    async def _start(self) -> None:
        started: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(started))
        async with asyncio.timeout(START_SECONDS):
            self._session = await started

    async def _live(self, started: asyncio.Future[ClientSession]) -> None:
        """The session from its beginning to its end: both must be in one task."""
        from mcp import ClientSession, StdioServerParameters, stdio_client

        program, *arguments = self._command
        parameters = StdioServerParameters(command=program, args=arguments, env={**os.environ, **self._env})
        try:
            async with stdio_client(parameters) as streams, ClientSession(*streams) as session:
                await session.initialize()
                started.set_result(session)
                await asyncio.Event().wait()
        except Exception as error:
            if not started.done():
                problem = f"the MCP server {self._command} could not be started: {type(error).__name__}: {error}"
                started.set_exception(PacelineError(problem))
        finally:
            self._session = None

    async def close(self) -> None:
        """End the server."""
        self._session = None
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait([self._life], timeout=START_SECONDS)
            self._life = None


@cache
def _server(command: tuple[str, ...], env: tuple[tuple[str, str], ...]) -> McpServer:
    return McpServer(command, dict(env))


@cache
def _offered(command: tuple[str, ...], env: tuple[tuple[str, str], ...]) -> dict[str, Mapping[str, Any]]:
    """By name, the schemas of a server's tools: asked once, of a server that is ended again."""

    async def ask() -> list[Any]:
        server = McpServer(command, dict(env))
        try:
            return await server.tools()
        finally:
            await server.close()

    return {
        tool.name: {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
        }
        for tool in asyncio.run(ask())
    }


class McpTool(Tool):
    """One tool of a server. `command` starts it, with `env` on top of this process's environment."""

    def __init__(self, *, command: Sequence[str], tool: str, env: Mapping[str, str] | None = None) -> None:
        super().__init__(command=command, tool=tool)
        self._place = tuple(command), tuple(sorted((env or {}).items()))
        self._name = tool
        offered = _offered(*self._place)
        if tool not in offered:
            raise PacelineError(f"the MCP server has no tool {tool!r}; it has {', '.join(sorted(offered)) or 'none'}")
        self.schema = offered[tool]

    async def execute(self, state: Any, arguments: dict[str, Any], memory: dict[str, Any]) -> str:
        return await _server(*self._place).call(self._name, arguments)
