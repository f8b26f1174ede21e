"""Tries a program on test cases. Runs inside a sandbox, as a script; imports nothing but the standard library.

It reads JSON from standard input, `{"code": ..., "kind": ..., "cases": [...], ...}`, and writes one line of JSON to
standard output for each case that it came to. The program under test runs in processes of its own
and never sees the expected results, nor this process's memory, input or output: a program that knew them could
return them, and one that shared this process could change what `==` means. Only plain data crosses between the two.

    judge          reads the cases, writes the lines
      starter      forked before the judge reads anything, so that it can know nothing; forks at the judge's request
        program    under test

- `stdin`: a case is what the program reads; the line holds a fingerprint of what it printed.
- `call`: a case is a list of arguments of the function `fn_name`; the line holds what it returned.
- `assert`: a case is a piece of test code. It runs here; names of the program stand for proxies, which
  pass calls on. The line says whether it passed.

Kinds `stdin` and `call` are judged by the reader of the lines, which alone knows the expected values.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import itertools
import json
import os
import re
import signal
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Each program waits for this file's imports: those that not every kind of case needs come later.

LONGEST_ITERATION = 1_000_000
PIECE = 1 << 16
MESSAGE_BYTES = 4096
_TYPING_NAMES = re.compile(r"\b(?:List|Dict|Set|Tuple|Optional|Union|Any|Callable|Iterable|Deque|DefaultDict)\b")


class UnsupportedError(Exception):
    """Test code that needs more than plain data to cross: the test can't be judged."""


def fingerprint(text: str) -> str:
    """The same for texts that differ in spaces at the ends of lines and empty lines at the end only."""
    import hashlib

    lines = "\n".join(line.rstrip() for line in text.splitlines()).rstrip("\n")
    return hashlib.sha256(lines.encode("utf-8", "replace")).hexdigest()


# -- plain data -------------------------------------------------------------------------------------------------------


def encode(value: Any, reference: Any) -> Any:
    """JSON for a value; `reference(value)` is the number of an object that is no plain data."""
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        number = int(value)
        return number if -(1 << 62) < number < 1 << 62 else {"type": "int", "value": hex(number)}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list):
        return [encode(item, reference) for item in value]
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {"type": kind.__name__, "value": [encode(item, reference) for item in value]}
    if isinstance(value, dict):
        pairs = [[encode(key, reference), encode(item, reference)] for key, item in value.items()]
        return {"type": "dict", "value": pairs}
    if isinstance(value, bytes | bytearray):
        return {"type": "bytes", "value": value.hex()}
    if isinstance(value, complex):
        return {"type": "complex", "value": [value.real, value.imag]}
    return {"type": "object", "value": reference(value)}


def decode(value: Any, find: Any) -> Any:
    """The value again; `find(number)` is the object, or what stands for it."""
    if isinstance(value, list):
        return [decode(item, find) for item in value]
    if not isinstance(value, dict):
        return value
    kind, held = value["type"], value["value"]
    if kind == "int":
        return int(held, 16)
    if kind == "bytes":
        return bytes.fromhex(held)
    if kind == "complex":
        return complex(*held)
    if kind == "dict":
        return {decode(key, find): decode(item, find) for key, item in held}
    if kind == "object":
        return find(held)
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](decode(item, find) for item in held)


# -- the processes of the program under test --------------------------------------------------------------------------


def start_programs(control: socket.socket) -> dict[str, Any] | None:
    """Fork a process at each request. Returns in the forked ones, with what to do; None at the end of the requests."""
    pid = 0
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 2)
        if not message:
            return None
        request = json.loads(message)
        if request["action"] == "start":
            pid = os.fork()
            if pid == 0:
                os.setsid()
                control.close()
                return {**request, "descriptors": descriptors}
            for descriptor in descriptors:
                os.close(descriptor)
            control.send(b"{}")
            continue
        if request["action"] == "wait":
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # the number stays taken until its group is killed
        try:  # noqa: SIM105 - contextlib would be one more import
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        _, status = os.waitpid(pid, 0)
        control.send(json.dumps({"exit_code": os.waitstatus_to_exitcode(status)}).encode())


def be_the_program(order: dict[str, Any]) -> None:
    """To be called last: the program's end is the interpreter's, which waits for threads and calls exit handlers."""
    first, second = order["descriptors"]
    if order["kind"] != "stdin":
        Served(first, second).loop()
        return
    for descriptor, target in ((first, 0), (second, 1)):
        os.dup2(descriptor, target)
        os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.__stdin__, sys.__stdout__ = sys.stdin, sys.stdout
    with open(order["file"], encoding="utf-8", errors="surrogatepass") as source:
        code = source.read()
    sys.argv = [order["file"]]
    sys.modules["case_runner"] = sys.modules["__main__"]  # which must not be cleared while it is in use
    module = type(os)("__main__")
    module.__file__ = order["file"]
    sys.modules["__main__"] = module
    exec(compile(code, order["file"], "exec"), module.__dict__)


class Served:
    """Loads the program, then does what it is asked for."""

    def __init__(self, requests: int, replies: int) -> None:
        self.requests = os.fdopen(requests, "r", encoding="utf-8", errors="surrogatepass")
        self.replies = os.fdopen(replies, "w", encoding="utf-8", errors="surrogatepass")
        self.objects: list[Any] = []

    def loop(self) -> None:
        while True:
            line = self.requests.readline()
            if not line:
                return
            try:
                reply = self.answer(*json.loads(line))
            except BaseException as error:
                reply = {"raised": type(error).__name__, "message": str(error)[:1000]}
            self.replies.write(json.dumps(reply) + "\n")
            self.replies.flush()

    def answer(self, action: str, target: Any, args: Any = None, named: Any = None) -> dict[str, Any]:
        if action == "load":
            return self.load(target)
        if action == "lookup":
            found = self.lookup(target)
            if isinstance(found, type(os)):
                return {"module": found.__name__}
            return {"returned": self.encoded(found)}
        subject = self.objects[target]
        arguments = self.decoded(args or [])
        if action == "call":
            keywords = {name: self.decoded(item) for name, item in (named or {}).items()}
            before = json.dumps(args)
            returned = {"returned": self.encoded(subject(*arguments, **keywords))}
            after = self.encoded(arguments)
            return returned if json.dumps(after) == before else {**returned, "arguments": after}
        if action == "attribute":
            return {"returned": self.encoded(getattr(subject, arguments[0]))}
        if action == "items":
            return {"returned": self.encoded(list(itertools.islice(subject, LONGEST_ITERATION)))}
        functions = {
            "length": len, "text": str, "truth": bool, "hash": hash,
            "item": lambda held, key: held[key],
            "equal": lambda held, other: bool(held == other),
            "is_instance": lambda held, other: isinstance(other, held),
        }  # fmt: skip
        return {"returned": self.encoded(functions[action](subject, *arguments))}

    def load(self, code: str) -> dict[str, Any]:
        module = type(os)("solution")
        sys.modules["solution"] = module
        self.names = module.__dict__
        if _TYPING_NAMES.search(code):  # tasks in the style of LeetCode take these names as given
            typing = _import("typing")
            self.names.update({name: getattr(typing, name) for name in typing.__all__})
        before = set(self.names)
        exec(compile(code, "solution.py", "exec"), self.names)
        return {"names": [name for name in self.names if name not in before]}

    def lookup(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        solution = self.names.get("Solution")
        if isinstance(solution, type) and hasattr(solution, name):
            return getattr(solution(), name)
        raise NameError(f"name {name!r} is not defined")

    def encoded(self, value: Any) -> Any:
        return encode(value, self.reference)

    def decoded(self, value: Any) -> Any:
        return decode(value, self.objects.__getitem__)

    def reference(self, value: Any) -> int:
        self.objects.append(value)
        return len(self.objects) - 1


def _import(name: str) -> Any:
    return importlib.import_module(name)


# -- the process that judges ------------------------------------------------------------------------------------------


class Ended(Exception):  # noqa: N818
    """The process of the program is gone."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"exit code {code}")
        self.timeout = code in (-signal.SIGXCPU, -signal.SIGKILL)


class Starter:
    """The judge's end of the process that starts programs."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control

    def start(self, descriptors: tuple[int, int], **order: Any) -> None:
        message = json.dumps({"action": "start", **order}).encode()
        try:
            socket.send_fds(self.control, [message], descriptors)
            self._answer()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def end(self, action: str) -> int:
        """`wait` for the end of the program, or `kill` it; its exit code."""
        self.control.send(json.dumps({"action": action}).encode())
        return self._answer()["exit_code"]

    def _answer(self) -> dict[str, Any]:
        answer = self.control.recv(MESSAGE_BYTES)
        if not answer:  # the program has killed it
            raise Ended(None)
        return json.loads(answer)


class Connection:
    """The judge's end of a program that answers calls: starts it, and again if a case ended it."""

    def __init__(self, starter: Starter, code: str) -> None:
        self.starter = starter
        self.code = code
        self.names: list[str] = []
        self.count = 0
        self.running = False
        self.failure: Exception | None = None

    def start(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self.running:
            return
        their_requests, requests = os.pipe()
        replies, their_replies = os.pipe()
        self.starter.start((their_requests, their_replies), kind="call")
        self.requests = os.fdopen(requests, "w", encoding="utf-8")
        self.replies = os.fdopen(replies, "r", encoding="utf-8", errors="replace")
        self.running = True
        self.count += 1
        try:
            self.names = self.ask("load", self.code)["names"]
        except Exception as error:  # half a program is none
            self.failure = error
            raise

    def ask(self, action: str, target: Any, *args: Any) -> dict[str, Any]:
        """What the process answers; raises what the program raised."""
        try:
            self.requests.write(json.dumps([action, target, *args]) + "\n")
            self.requests.flush()
            line = self.replies.readline()
        except BrokenPipeError:
            line = ""
        if not line.endswith("\n"):
            self.running = False
            raise Ended(self.starter.end("wait"))
        reply = json.loads(line)
        if not isinstance(reply, dict):
            raise ValueError("not a reply")
        if "raised" in reply:
            kind = getattr(builtins, str(reply["raised"]), None)
            if not (isinstance(kind, type) and issubclass(kind, Exception)) or kind is AssertionError:
                kind = RuntimeError
            raise _error(kind, f"{reply['raised']}: {reply.get('message')}")
        return reply

    def value(self, reply: dict[str, Any]) -> Any:
        count = self.count
        return decode(reply["returned"], lambda number: Proxy(self, number, count))

    def call(self, number: int, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        keywords = {name: plain(item) for name, item in named.items()}
        reply = self.ask("call", number, [plain(item) for item in args], keywords)
        for mine, theirs in zip(args, reply.get("arguments", ()), strict=False):
            changed = self.value({"returned": theirs})
            if isinstance(mine, list) and isinstance(changed, list):
                mine[:] = changed
            elif isinstance(mine, dict | set) and isinstance(changed, dict | set):
                mine.clear()
                mine.update(changed)
        return self.value(reply)


def _error(kind: type[Exception], message: str) -> Exception:
    try:
        return kind(message)
    except TypeError:  # such as UnicodeDecodeError, which wants more
        return RuntimeError(message)


def plain(value: Any) -> Any:
    return encode(value, _number_of)


def _number_of(value: Any) -> int:
    if isinstance(value, Proxy):
        return object.__getattribute__(value, "_number")
    raise UnsupportedError(f"a test passes a {type(value).__name__} to the program; only plain data can be passed")


class Proxy:
    """Stands for an object of the program. Compared with plain data it is never equal: it is none."""

    def __init__(self, connection: Connection, number: int, count: int) -> None:
        object.__setattr__(self, "_connection", connection)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_count", count)

    def _ask(self, action: str, *args: Any) -> Any:
        connection = object.__getattribute__(self, "_connection")
        if connection.count != object.__getattribute__(self, "_count"):
            raise RuntimeError("an earlier test ended the program's process, and this object with it")
        return connection.value(connection.ask(action, _number_of(self), [plain(item) for item in args]))

    def __call__(self, *args: Any, **named: Any) -> Any:
        return object.__getattribute__(self, "_connection").call(_number_of(self), args, named)

    def __getattr__(self, name: str) -> Any:
        return self._ask("attribute", name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Proxy) and bool(self._ask("equal", other))

    def __hash__(self) -> int:
        return hash(self._ask("hash"))

    def __bool__(self) -> bool:
        return bool(self._ask("truth"))

    def __len__(self) -> int:
        return self._ask("length")

    def __iter__(self) -> Any:
        return iter(self._ask("items"))

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __str__(self) -> str:
        return str(self._ask("text"))

    def __instancecheck__(self, instance: Any) -> bool:
        return bool(self._ask("is_instance", instance))


def _outcome_of_call(connection: Connection, name: str, args: list[Any]) -> dict[str, Any]:
    connection.start()
    target = connection.value(connection.ask("lookup", name))
    if not isinstance(target, Proxy):
        raise TypeError(f"{name} is not a function")
    return {"returned": connection.ask("call", _number_of(target), [plain(item) for item in args], {})["returned"]}


class Tests:
    """Runs pieces of test code, one after the other in one namespace."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.names: dict[str, Any] = {"__name__": "test"}
        self.lent: dict[str, Any] = {}

    def outcome(self, code: str) -> dict[str, Any]:
        import ast

        self.connection.start()
        tree = ast.parse(code)
        for name in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}:
            self.lend(name)
        exec(compile(tree, "test", "exec"), self.names)
        return {"passed": True}

    def lend(self, name: str) -> None:
        """Let a name stand for the program's, unless Python or the tests have their own."""
        own = name in self.names and self.names[name] is not self.lent.get(name)
        if own or hasattr(builtins, name) or name not in self.connection.names:
            return
        reply = self.connection.ask("lookup", name)
        self.lent[name] = _import(reply["module"]) if "module" in reply else self.connection.value(reply)
        self.names[name] = self.lent[name]


def _outcome_of_input(starter: Starter, file: str, text: str, limit: int) -> dict[str, Any]:
    with open(f"{file}.in", "wb") as stdin:
        stdin.write(text.encode("utf-8", "surrogatepass"))
    printed_read, printed_write = os.pipe()
    starter.start((os.open(f"{file}.in", os.O_RDONLY), printed_write), kind="stdin", file=file)
    os.unlink(f"{file}.in")
    printed = bytearray()
    while len(printed) <= limit and (piece := os.read(printed_read, PIECE)):
        printed += piece
    os.close(printed_read)
    if len(printed) > limit:
        starter.end("kill")
        return {"error": "output"}
    code = starter.end("wait")
    if code != 0:
        raise Ended(code)
    return {"printed": fingerprint(printed.decode("utf-8", "replace"))}


def judge(task: dict[str, Any], starter: Starter) -> None:
    """Try every case, and write what came of it."""
    connection = Connection(starter, task["code"])
    tests = Tests(connection)
    file = os.path.abspath(f"solution_{os.getpid()}.py")
    if task["kind"] == "stdin":
        with open(file, "w", encoding="utf-8", errors="surrogatepass") as source:
            source.write(task["code"])
    for number, case in enumerate(task["cases"]):
        try:
            if task["kind"] == "stdin":
                outcome = _outcome_of_input(starter, file, case, task["output_bytes"])
            elif task["kind"] == "call":
                outcome = _outcome_of_call(connection, task["fn_name"], case)
            else:
                outcome = tests.outcome(case)
        except UnsupportedError as error:
            outcome = {"unsupported": str(error)}
        except BaseException as error:
            message = f"{type(error).__name__}: {str(error)[:500]}"
            outcome = {"error": message, "timeout": isinstance(error, Ended) and error.timeout}
        sys.stdout.write(json.dumps({"case": number, "nonce": task["nonce"], **outcome}) + "\n")
        sys.stdout.flush()
        if task["stop_at_first_failure"] and "error" in outcome:
            break
    sys.stdout.write(json.dumps({"done": True, "nonce": task["nonce"]}) + "\n")


def main() -> None:
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() > 0:
        theirs.close()
        judge(json.load(sys.stdin), Starter(control))
        return
    control.close()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)
    gc.freeze()  # forked processes then leave this memory alone, and share it
    order = start_programs(theirs)
    if order is not None:
        be_the_program(order)


if __name__ == "__main__":
    main()
