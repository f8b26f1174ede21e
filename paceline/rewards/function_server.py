"""Runs a reward function in a process that can be killed. `killable.py` starts this file as a script of its own.

It imports nothing but what the function needs. The first message names the function; the answer is None, or what went
wrong. After that every message is `(calls, timeout_seconds)`, and each call is answered by an `Outcome` as soon as it
ends: one after the other, or, for what is awaitable, all together, after AWAITING. The other end watches the clock
and kills. When it closes the pipe, or dies, this process ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import inspect
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

AWAITING = "awaiting"
PR_SET_PDEATHSIG = 1

Call = tuple[tuple[Any, ...], dict[str, Any]]
Outcome = tuple[int, bytes | None, str]
"""Number of the call; its pickled result or exception, None if it can't be pickled; the same as text."""


@cache
def import_file(file: Path, modified_ns: int) -> ModuleType:
    """The module of a file, once per process: what it holds at module level, such as a client, is held once."""
    del modified_ns  # a changed file is another one
    module_name = f"paceline_custom_reward_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ImportError("it is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def load(source: bytes) -> Callable[..., Any]:
    """The function that `killable.py` names: by file, or pickled."""
    kind, *what = pickle.loads(source)
    if kind == "function":
        return what[0]
    path, name = what
    return getattr(import_file(path, path.stat().st_mtime_ns), name)


def outcome(number: int, result: Any) -> Outcome:
    """For the pipe. An exception takes its traceback along as a note."""
    if isinstance(result, BaseException):
        text = "".join(traceback.format_exception(result))
        if not isinstance(result, Exception):  # sys.exit() is the function's failure, not our end
            result = RuntimeError(f"the function ended with {result!r}")
        result.add_note(text)
    else:
        text = f"a {type(result).__name__} that can't be sent between processes"
    try:
        return number, pickle.dumps(result), text
    except Exception:
        return number, None, text


def attempt(fn: Callable[..., Any], call: Call) -> Any:
    try:
        return fn(*call[0], **call[1])
    except BaseException as error:
        return error


async def finish(connection: Connection, waiting: dict[int, Awaitable[Any]], timeout_seconds: float) -> None:
    async def one(number: int, awaitable: Awaitable[Any]) -> None:
        result: Any
        try:
            result = await asyncio.wait_for(awaitable, timeout_seconds)
        except BaseException as error:
            result = error
        connection.send(outcome(number, result))

    await asyncio.gather(*(one(number, awaitable) for number, awaitable in waiting.items()))


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """One loop for the whole life of the process, so that a client or session can be kept between batches."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward-functions", daemon=True).start()
    return loop


def serve(connection: Connection, fn: Callable[..., Any]) -> None:
    while True:
        calls, timeout_seconds = connection.recv()
        waiting: dict[int, Awaitable[Any]] = {}
        for number, call in enumerate(calls):
            result = attempt(fn, call)
            if inspect.isawaitable(result):
                waiting[number] = result
            else:
                connection.send(outcome(number, result))
        if waiting:
            connection.send(AWAITING)
            asyncio.run_coroutine_threadsafe(finish(connection, waiting, timeout_seconds), event_loop()).result()


def main(descriptor: int, dies_with_parent: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the client's end ends us
    if dies_with_parent and sys.platform == "linux":  # also in the middle of a call that hangs
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = Connection(descriptor)
    try:
        source = connection.recv()
        fn = attempt(load, ((source,), {}))
        connection.send(outcome(0, fn if isinstance(fn, BaseException) else None))
        if not isinstance(fn, BaseException):
            serve(connection, fn)
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] == "1")
