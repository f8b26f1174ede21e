"""Runs the program of a response on test inputs and says what came out. It knows nothing of what is expected.

Runs inside a jail, as a script behind `plain_data.py`; imports nothing but the standard library. Standard input
holds the length of a header (12 digits), the header, JSON `{"kind", "code", "lengths", ...}`, and so many pieces of
JSON, which are read one by one: a process that is forked for one piece has no later one in its memory.

- `stdin`: a piece is what the program reads. Each has a process of its own.
- `calls`: a piece is a question, see `Served.answer`. One process answers all; a new one is started if it ends.

Standard output gets a line of JSON for each piece: `{"number", "reply"}`, the reply as text. The program could write
these lines as well as we, so their reader believes nothing but what a program may claim about itself.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys

from paceline.rewards.score.code.plain_data import decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypedDict

    class ProgramTask(TypedDict):
        """The header."""

        kind: str
        code: str
        lengths: list[int]
        output_bytes: int
        stop_at_first_failure: bool


HEADER_DIGITS = 12
PIECE = 1 << 16
SOURCE = "solution.py"
_TYPING_NAMES = re.compile(r"\b(?:List|Dict|Set|Tuple|Optional|Union|Any|Callable|Iterable|Deque|DefaultDict)\b")


def fingerprint(text: str) -> str:
    """The same for texts that differ in spaces at the ends of lines and empty lines at the end only."""
    import hashlib  # not every kind of test needs it, and each program waits for our imports

    lines = "\n".join(line.rstrip() for line in text.splitlines()).rstrip("\n")
    return hashlib.sha256(lines.encode("utf-8", "replace")).hexdigest()


# -- the process that asks --------------------------------------------------------------------------------------------


class Become(BaseException):
    """Raised in a forked process: leaves all of this behind, then does `role`, whose end is the interpreter's."""

    def __init__(self, role: Callable[[], None]) -> None:
        self.role = role


def start(role: Callable[[], None], out: int, *others: int) -> int:
    """Fork a process in a session of its own, without our input, output and `others`; its number."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    for descriptor in (nothing, out, *others):
        os.close(descriptor)
    raise Become(role)


def end(pid: int, wait: bool) -> int:
    """Wait for the end of a process, or kill it, and kill what it left; its exit code."""
    if wait:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # the number stays taken until its group is killed
    try:  # noqa: SIM105 - contextlib would be one more import
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def ended(code: int) -> dict[str, object]:
    return {"ended": f"exit code {code}", "timeout": code in (-signal.SIGXCPU, -signal.SIGKILL)}


def take(length: int) -> bytes:
    """So many bytes of standard input, and no more."""
    taken = b""
    while len(taken) < length and (piece := os.read(0, length - len(taken))):
        taken += piece
    return taken


def run_on_input(task: ProgramTask, text: str, out: int) -> dict[str, object]:
    """What the program prints when it reads this."""
    with open("stdin", "wb") as file:
        file.write(text.encode("utf-8", "surrogatepass"))
    given = os.open("stdin", os.O_RDONLY)
    os.unlink("stdin")
    printed_read, printed_write = os.pipe()
    pid = start(lambda: be_the_program(task["code"], given, printed_write), out, printed_read)
    os.close(given)
    os.close(printed_write)
    printed = bytearray()
    limit = task["output_bytes"]
    while len(printed) <= limit and (piece := os.read(printed_read, PIECE)):
        printed += piece
    os.close(printed_read)
    code = end(pid, wait=len(printed) <= limit)
    if len(printed) > limit or code != 0:
        return ended(code)
    return {"printed": fingerprint(printed.decode("utf-8", "replace"))}


class AnsweringProcess:
    """A process that answers questions: started at the first, and again if a question ended it."""

    def __init__(self, task: ProgramTask, out: int) -> None:
        self.task = task
        self.out = out
        self.pid = 0
        self.failure = ""

    def ask(self, number: int, question: str) -> str:
        if not self.pid and not self.failure:
            self.start()
        if self.failure:  # half a program is none
            return self.failure
        try:
            self.requests.write(f"{number} {question}\n".encode())
            self.requests.flush()
            return self.reply() or self.stop()
        except BrokenPipeError:
            return self.stop()

    def start(self) -> None:
        their_requests, requests = os.pipe()
        replies, their_replies = os.pipe()
        served = Served(self.task["code"], their_requests, their_replies)
        self.pid = start(served.loop, self.out, requests, replies)
        os.close(their_requests)
        os.close(their_replies)
        self.requests = os.fdopen(requests, "wb")
        self.replies = os.fdopen(replies, "rb")
        if not self.reply():
            self.failure = self.stop()

    def reply(self) -> str:
        line = self.replies.readline(self.task["output_bytes"])
        return line.decode("utf-8", "replace") if line.endswith(b"\n") else ""

    def stop(self) -> str:
        pid, self.pid = self.pid, 0
        for stream in (self.requests, self.replies):
            try:  # noqa: SIM105
                stream.close()
            except BrokenPipeError:
                pass
        return json.dumps(ended(end(pid, wait=True)))


def drive(task: ProgramTask, out: int) -> None:
    answering = AnsweringProcess(task, out)
    for number, length in enumerate(task["lengths"]):
        piece = take(length).decode()
        try:
            if task["kind"] == "stdin":
                reply = json.dumps(run_on_input(task, json.loads(piece), out))
            else:
                reply = answering.ask(number, piece)
        except OSError as error:  # the program has used up processes or disk
            reply = json.dumps({"ended": str(error)})
        line = memoryview((json.dumps({"number": number, "reply": reply}) + "\n").encode())
        while line:
            line = line[os.write(out, line) :]
        if task["stop_at_first_failure"] and '"ended"' in reply[:20]:
            break
    if answering.pid:
        answering.stop()


# -- the processes of the program -------------------------------------------------------------------------------------


def be_the_program(code: str, stdin: int, stdout: int) -> None:
    """The program as a script: its end is the interpreter's, which waits for threads and calls exit handlers."""
    for descriptor, target in ((stdin, 0), (stdout, 1)):
        os.dup2(descriptor, target)
        os.close(descriptor)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout)
    sys.argv = [os.path.abspath(SOURCE)]
    with open(SOURCE, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(code)
    sys.modules["program_side"] = sys.modules["__main__"]  # which must not be cleared while it is in use
    module = type(os)("__main__")
    module.__file__ = sys.argv[0]
    sys.modules["__main__"] = module
    exec(compile(code, sys.argv[0], "exec"), module.__dict__)


class Served:
    """Loads the program, then answers questions about it."""

    def __init__(self, code: str, requests: int, replies: int) -> None:
        self.code = code
        self.requests = requests
        self.replies = replies
        self.names: dict[str, object] = {}
        self.objects: dict[tuple[int, int], object] = {}
        self.answers: dict[int, object] = {}

    def loop(self) -> None:
        failure = None
        with os.fdopen(self.requests, "rb") as requests, os.fdopen(self.replies, "wb") as replies:
            try:
                self.load()
            except BaseException as error:
                failure = {"ended": f"loading failed: {type(error).__name__}: {str(error)[:1000]}"}
            line = b" \n"
            while line:
                replies.write(line)
                replies.flush()
                number, _, question = requests.readline().decode().partition(" ")
                line = (json.dumps(failure or self.reply(int(number), question)) + "\n").encode() if question else b""

    def reply(self, number: int, question: str) -> dict[str, object]:
        try:
            answer = self.answer(number, *json.loads(question))
        except BaseException as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            return {"raised": names, "message": str(error)[:1000]}
        self.answers[number] = answer["returned"]
        return answer

    def answer(
        self, number: int, target: object, name: str, args: object = None, named: Any = None, back: bool = False
    ) -> dict[str, object]:
        """Call the function `name`, or the method `name` of the object `target`; without `args` give its attribute.

        With `back`, the arguments as they are after the call go back with the answer.
        """
        subject = self.lookup(name) if target is None else self.find("object", target)
        if target is not None and name:
            subject = getattr(subject, name)
        if args is None:
            return {"returned": self.encoded(number, subject)}
        arguments = self.decoded(args)
        keywords = {key: self.decoded(item) for key, item in named.items()}
        answer = {"returned": self.encoded(number, subject(*arguments, **keywords))}
        return {**answer, "arguments": self.encoded(number, arguments)} if back else answer

    def load(self) -> None:
        module = type(os)("solution")
        sys.modules["solution"] = module
        self.names = module.__dict__
        if _TYPING_NAMES.search(self.code):  # tasks in the style of LeetCode take these names as given
            import typing

            self.names.update({name: getattr(typing, name) for name in typing.__all__})
        exec(compile(self.code, SOURCE, "exec"), self.names)

    def lookup(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        solution = self.names.get("Solution")
        if isinstance(solution, type) and hasattr(solution, name):
            return getattr(solution(), name)
        raise NameError(f"name {name!r} is not defined")

    def encoded(self, number: int, value: object) -> object:
        return encode(value, lambda item: self.refer(number, item))

    def refer(self, number: int, value: object) -> object:
        """An object stays here, under the number of the question that gave it first, and its place in the answer."""
        place = next((key for key, held in self.objects.items() if held is value), None)
        if place is None:
            place = (number, sum(key[0] == number for key in self.objects))
            self.objects[place] = value
        return {"type": "object", "value": place}

    def decoded(self, value: object) -> Any:
        return decode(value, self.find)

    def find(self, kind: str, held: Any) -> Any:
        """An object of an earlier answer, or a copy of the answer."""
        try:
            return self.decoded(self.answers[held]) if kind == "answer" else self.objects[tuple(held)]
        except KeyError:
            raise RuntimeError("an earlier question ended the program's process, and this object with it") from None


def main() -> None:
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    task = json.loads(take(int(take(HEADER_DIGITS))))
    gc.freeze()  # forked processes then leave this memory alone, and share it
    try:
        drive(task, os.dup(1))
        return
    except Become as become:
        role = become.role
    role()


if __name__ == "__main__":
    main()
