"""A real browser for tests of pages: Chromium without a window, driven by its DevTools protocol."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
STARTUP_SECONDS = 120
READY = "!window.is_left && document.documentElement?.dataset.ready === 'yes'"


class Browser:
    """One page. `errors` has what it complained of: exceptions, console errors, failed or refused loads."""

    def __init__(self, folder: Path) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loop = asyncio.new_event_loop()
        # A browser as root has no sandbox; the page is our own.
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--remote-debugging-port=0",
        ]
        self._process = subprocess.Popen(
            [str(CHROMIUM), *options, f"--user-data-dir={folder}", "--window-size=1200,900", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(folder)},
        )
        self._last_id = 0
        self._loop.run_until_complete(self._connect(folder / "DevToolsActivePort"))
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    async def _connect(self, port_file: Path) -> None:
        deadline = time.monotonic() + STARTUP_SECONDS
        while not port_file.exists() or not port_file.read_text().strip():
            assert time.monotonic() < deadline, "chromium did not start"
            await asyncio.sleep(0.1)
        address = f"http://127.0.0.1:{port_file.read_text().splitlines()[0]}/json"
        self._session = aiohttp.ClientSession()
        while True:
            async with self._session.get(address) as response:
                pages = [page for page in await response.json() if page["type"] == "page"]
            if pages:
                break
            assert time.monotonic() < deadline, "chromium has no page"
            await asyncio.sleep(0.1)
        self._socket = await self._session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its answer; events that come meanwhile are noted."""
        return self._loop.run_until_complete(self._call(method, parameters))

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._last_id += 1
        await self._socket.send_str(json.dumps({"id": self._last_id, "method": method, "params": parameters}))
        while True:
            message = json.loads((await self._socket.receive()).data)
            if message.get("id") == self._last_id:
                assert "error" not in message, message
                return message["result"]
            self._note(message.get("method"), message.get("params", {}))

    def _note(self, event: str | None, parameters: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"].get("exception", parameters)))
        elif event == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.errors.append(str(parameters["args"]))
        elif event == "Log.entryAdded":
            self.errors.append(parameters["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def open(self, path: Path) -> None:
        """Load a page of ours, and wait until its script is through or has failed."""
        self.errors.clear()
        self.requests.clear()
        self.run("window.is_left = true")
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + STARTUP_SECONDS
        while not self.errors and not self.run(READY):
            assert time.monotonic() < deadline, "the page did not get ready"
            time.sleep(0.05)

    def go(self, address: str) -> None:
        """Load any page, and wait until the browser has it all."""
        self.run("window.is_left = true")
        self.call("Page.navigate", url=address)
        deadline = time.monotonic() + STARTUP_SECONDS
        while not self.run("!window.is_left && document.readyState === 'complete'"):
            assert time.monotonic() < deadline, "the page did not load"
            time.sleep(0.05)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def set(self, name: str, value: object, event: str = "change") -> None:
        """Give a control of the page a value, as a user does."""
        control = f"document.getElementById('{name}')"
        self.run(f"{control}.value = {json.dumps(value)}; {control}.dispatchEvent(new Event('{event}'))")

    def close(self) -> None:
        self._loop.run_until_complete(self._socket.close())
        self._loop.run_until_complete(self._session.close())
        self._loop.close()
        self._process.terminate()
        self._process.wait()
