"""Runs the test code of a ground truth and says which tests passed. No line of the program under test runs here.

Runs inside a jail of its own, as a script behind `plain_data.py`; imports nothing but the standard library. It reads
JSON from standard input, and writes a line of JSON to standard output for each of `runs`:

    {"cases", "names", "library", "runs": [[asked, replies], ...]}  ->  {"verdicts", "questions"} or {"unsupported"}

A name of the program stands for questions: what would a call of it return? `asked` and `replies` are those of one
run of the program, which is over. While its questions are those, in that order, a test gets the answers: plain data,
or a handle that can be asked further. A question beyond them gets none. The test goes on as far as it can without the
answer, to find what else it would ask; the next run of the program answers all of it. `verdicts` are those of the tests
before the first question without an answer. So with nothing asked yet, the questions depend on the tests alone.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import os
import sys

from paceline.rewards.score.code.plain_data import MalformedError, decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypedDict

    class JudgeTask(TypedDict):
        """What standard input holds."""

        cases: list[str]
        names: list[str]
        library: dict[str, str]
        runs: list[tuple[list[object], list[str]]]


NOT_TO_RAISE = (AssertionError, StopIteration, StopAsyncIteration)
"""Python takes these for a verdict, or for the end of a loop."""
LOUD = [
    f"__{name}__"
    for name in (
        "eq", "ne", "lt", "le", "gt", "ge", "bool", "hash", "contains", "add", "radd", "sub", "rsub", "mul", "rmul",
        "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow", "rpow", "and", "rand", "or", "ror", "xor",
        "rxor", "lshift", "rshift", "matmul", "neg", "pos", "abs", "invert", "int", "float", "complex", "index",
        "round", "bytes", "format", "enter", "exit", "reversed", "delitem", "delattr",
    )
]  # fmt: skip
"""What Python asks a value for in comparisons, conditions and arithmetic: never the program's to answer."""
ASKED = ["__len__", "__str__", "__repr__", "__iter__", "__getitem__", "__setitem__"]
"""What an object of the program may be asked for, since the answer is plain data."""


class UnsupportedError(BaseException):
    """The test needs more than plain data to cross: it can't be judged."""

    reasons: list[str] = []  # noqa: RUF012 - for all of them: test code may catch everything

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reasons.append(reason)


class PendingError(BaseException):
    """The test needs an answer that is not there yet."""


class EndedError(BaseException):
    """The program's process ended instead of answering, or gave no answer that can be read."""


# -- what stands for things of the program ----------------------------------------------------------------------------


class Unknown:
    """An answer that is not there yet. It can be passed on, and no more."""

    _number: int

    def __init__(self, number: int) -> None:
        object.__setattr__(self, "_number", number)


def _wait(*args: object, **named: object) -> object:
    raise PendingError


for _name in [*LOUD, *ASKED, "__call__", "__getattr__", "__setattr__"]:
    setattr(Unknown, _name, _wait)


class Handle:
    """An object of the program. It can be asked for attributes and results of calls; it has no truth and no equal.

    What a class is called for is taken for an object before there is an answer (`number` says of which question).
    """

    _questions: Questions
    _place: list[int]
    _made_by: str
    _number: int | None

    def __init__(self, questions: Questions, place: list[int], made_by: str = "", number: int | None = None) -> None:
        for name, value in (("_questions", questions), ("_place", place), ("_made_by", made_by), ("_number", number)):
            object.__setattr__(self, name, value)

    def __call__(self, *args: object, **named: object) -> object:
        return self._questions.ask(self._place, "", args, named)

    def __getattr__(self, name: str) -> object:
        self._questions.driven.add(self._made_by)
        return Callee(self._questions, self._place, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._questions.ask(self._place, "__setattr__", (name, value), {})


def _refuse(handle: Handle, *args: object) -> object:
    if handle._made_by and (handle._made_by in handle._questions.driven or Handle in map(type, args)):
        raise UnsupportedError(
            f"it compares an object of the program's class {handle._made_by}, or takes its truth; compare attributes "
            "or results of methods, which are plain data"
        )
    if handle._number is not None:
        raise PendingError
    raise AssertionError("the program gave an object where plain data is wanted")


def _asking(name: str, kind: Callable[[Any], object] | None) -> Callable[..., object]:
    def ask(handle: Handle, *args: object) -> object:
        handle._questions.driven.add(handle._made_by)
        answer = handle._questions.ask(handle._place, name, args, {})
        if kind is not None and isinstance(answer, Unknown):
            raise PendingError
        return answer if kind is None else kind(answer)

    return ask


for _name in LOUD:
    if _name != "__contains__":  # Python then looks through the items, which are plain data
        setattr(Handle, _name, _refuse)
for _name, _kind in zip(ASKED, (int, str, str, iter, None, None), strict=True):
    setattr(Handle, _name, _asking(_name, _kind))


class Callee:
    """A function or variable of the program, or a method of one of its objects. A variable has to hold plain data."""

    def __init__(self, questions: Questions, place: list[int] | None, name: str) -> None:
        self.questions, self.place, self.name = questions, place, name

    def __call__(self, *args: object, **named: object) -> object:
        return self.questions.ask(self.place, self.name, args, named)

    def __getattr__(self, name: str) -> object:
        raise UnsupportedError(f"it takes .{name} of the program's {self.name}, which is not plain data")

    def value(self) -> Any:
        value = self.questions.ask(self.place, self.name)
        if isinstance(value, Unknown):
            raise PendingError
        if isinstance(value, Handle):
            raise AssertionError(f"the program's {self.name} is not plain data")
        return value


def _of_value(name: str) -> Callable[..., object]:
    def ask(callee: Callee, *args: object) -> object:
        value = callee.value()
        if name in ("__bool__", "__iter__"):  # which not every type has by this name
            return bool(value) if name == "__bool__" else iter(value)
        method = getattr(value, name, None)
        return NotImplemented if method is None else method(*args)

    return ask


for _name in [*LOUD, *ASKED]:
    setattr(Callee, _name, _of_value(_name))


# -- questions and answers --------------------------------------------------------------------------------------------


class Questions:
    """All that the tests ask of the program, and the answers of its last run as far as they fit."""

    def __init__(self, asked: list[object], replies: list[Any]) -> None:
        self.asked = asked
        self.replies = replies
        self.made: list[object] = []
        self.driven: set[str] = set()
        """Classes whose objects were asked for something."""
        self.pending = False
        self.changes = False
        """The program may have changed an argument."""
        self.num_ended = 0

    def ask(
        self,
        place: list[int] | None,
        name: str,
        args: tuple[object, ...] | None = None,
        named: dict[str, object] | None = None,
        back: bool = False,
    ) -> object:
        number = len(self.made)
        question: list[object] = [place, name]
        if args is not None:
            values = {key: encode(value, _reference) for key, value in (named or {}).items()}
            question += [[encode(value, _reference) for value in args], values, back]
        self.made.append(question)
        self.changes = self.changes or back
        fits = number < len(self.asked) and json.dumps(self.filled(self.asked[number])) == json.dumps(question)
        self.pending = self.pending or not fits
        made_by = name if place is None and name[:1].isupper() else ""
        if self.pending:
            return Handle(self, [number, 0], made_by, number) if made_by else Unknown(number)
        answer = self.replies[number]
        if isinstance(answer, dict) and "raised" in answer:
            raise self.counted(_error(answer))
        try:
            if back:
                for mine, theirs in zip(args or (), self.value(answer["arguments"]), strict=True):
                    _copy_back(mine, theirs)
            return self.value(answer["returned"], made_by)
        except (MalformedError, KeyError, TypeError, ValueError):
            raise self.counted(EndedError()) from None

    def counted(self, error: BaseException) -> BaseException:
        self.num_ended += isinstance(error, EndedError)
        return error

    def value(self, encoded: object, made_by: str = "") -> Any:
        def find(kind: str, held: object) -> object:
            if kind == "object" and type(held) is list and [type(item) for item in held] == [int, int]:
                return Handle(self, held, made_by)
            raise MalformedError(kind)

        return decode(encoded, find)

    def filled(self, question: Any) -> object:
        """The question with earlier answers in the places that were left open for them."""
        if isinstance(question, list):
            return [self.filled(item) for item in question]
        if isinstance(question, dict) and question.get("type") == "answer":
            reply = self.replies[question["value"]]
            return reply.get("returned") if isinstance(reply, dict) else None
        return {key: self.filled(item) for key, item in question.items()} if isinstance(question, dict) else question


def _reference(value: Any) -> object:
    if type(value) in (Unknown, Handle):
        return (
            {"type": "object", "value": value._place}
            if value._number is None
            else {"type": "answer", "value": value._number}
        )
    what = f"the program's {value.name}" if type(value) is Callee else f"a {type(value).__name__}"
    raise UnsupportedError(f"it passes {what} to the program; only plain data can be passed")


def _error(answer: dict[str, object]) -> BaseException:
    """What the program raised, as the first of its classes that is built in."""
    for name in answer["raised"] if isinstance(answer["raised"], list) else ():
        kind = getattr(builtins, name, None) if isinstance(name, str) else None
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return RuntimeError(name) if issubclass(kind, NOT_TO_RAISE) else kind(answer.get("message"))
            except TypeError:  # such as UnicodeDecodeError, which wants more
                return RuntimeError(name)
    return EndedError()


def _copy_back(mine: object, theirs: object) -> None:
    if isinstance(mine, list) and isinstance(theirs, list):
        mine[:] = theirs
    elif isinstance(mine, dict | set) and isinstance(theirs, dict | set):
        mine.clear()
        mine.update(theirs)


# -- test code --------------------------------------------------------------------------------------------------------


class Rewritten(ast.NodeTransformer):
    """Test code in which failing assertions ask us, calls that are statements say so, attributes are asked for.

    A call whose result is used leaves its arguments alone: the program could change what its result is compared with.
    """

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        self.generic_visit(node)
        excuse = ast.parse("__excuse__()").body
        handler = ast.ExceptHandler(type=ast.Name(id="__failures__", ctx=ast.Load()), name=None, body=excuse)
        return ast.Try(body=[node], handlers=[handler], orelse=[], finalbody=[])

    def visit_Try(self, node: ast.Try) -> ast.AST:
        """A handler that does nothing would let every program pass."""
        silent = [handler for handler in node.handlers if all(map(_does_nothing, handler.body))]
        self.generic_visit(node)
        for handler in silent:
            handler.body = [*ast.parse("__silenced__()").body, *handler.body]
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.value, ast.Call):
            call = node.value
            call.args, call.func = [call.func, *call.args], ast.Name(id="__statement__", ctx=ast.Load())
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Attribute):
            node.func.value = self.visit(node.func.value)
        else:
            node.func = self.visit(node.func)
        node.args = [self.visit(item) for item in node.args]
        node.keywords = [self.visit(item) for item in node.keywords]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load):
            return node
        name = ast.Name(id="__attribute__", ctx=ast.Load())
        return ast.Call(func=name, args=[node.value, ast.Constant(node.attr)], keywords=[])


def _does_nothing(node: ast.stmt) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    is_print = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "print"
    return isinstance(node, ast.Pass | ast.Continue | ast.Break) or isinstance(value, ast.Constant) or is_print


def statement(function: Any, /, *args: object, **named: object) -> object:
    if type(function) is Callee:
        return function.questions.ask(function.place, function.name, args, named, back=True)
    return function(*args, **named)


def attribute(value: Any, name: str) -> object:
    if type(value) is not Handle:
        return getattr(value, name)
    value._questions.driven.add(value._made_by)
    return value._questions.ask(value._place, name)


class Tests:
    """Runs pieces of test code, one after the other in one namespace."""

    def __init__(self, questions: Questions, program: list[str], library: dict[str, str]) -> None:
        self.questions = questions
        self.names: dict[str, object] = {
            "__name__": "test",
            "__excuse__": self.excuse,
            "__silenced__": self.silenced,
            "__failures__": (Exception, PendingError, EndedError),
            "__statement__": statement,
            "__attribute__": attribute,
            **{name: Callee(questions, None, name) for name in program},
        }
        for name, module in library.items():
            found = importlib.import_module(module)
            self.names[name] = found if name == module else getattr(found, name)
        self.num_silenced = 0
        self.known = dict(self.names)
        """Names as they were before the first question."""

    def excuse(self) -> None:
        """Of an assertion that failed, perhaps only for want of an answer."""
        if not self.questions.pending:
            raise

    def silenced(self) -> None:
        """Where test code catches something and goes on: it may be an assertion that failed."""
        self.num_silenced += isinstance(sys.exc_info()[1], AssertionError)

    def passes(self, code: str) -> bool:
        """Whether the piece of code comes to its end. Raises an UnsupportedError if the program has no part in that."""
        num_asked, num_lost = len(self.questions.made), self.questions.num_ended + self.num_silenced
        tree = ast.parse(code)
        loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id not in vars(builtins)}
        failure: BaseException | None = None
        try:
            exec(compile(ast.fix_missing_locations(Rewritten().visit(tree)), "test", "exec"), self.names)
        except BaseException as error:
            failure = error
        if UnsupportedError.reasons:
            raise UnsupportedError(UnsupportedError.reasons[0])
        if not self.questions.made:
            if failure is not None:
                raise UnsupportedError(f"it fails before it calls the program: {failure!r}")
            self.known.update(self.names)
        asks_nothing = len(self.questions.made) == num_asked and not self.questions.changes
        if asks_nothing and all(map(self.is_known, loaded)):
            raise UnsupportedError("it asks nothing of the program")
        return failure is None and self.questions.num_ended + self.num_silenced == num_lost

    def is_known(self, name: str) -> bool:
        """Whether the program can have had no part in what a name stands for, if it stands for anything here."""
        if name not in self.names:
            return True
        value = self.names[name]
        return isinstance(value, type(os)) or (name in self.known and self.known[name] is value)


def judge(task: JudgeTask, asked: list[object], replies: list[object]) -> dict[str, object]:
    questions = Questions(asked, replies)
    UnsupportedError.reasons.clear()
    if any("random" in case for case in task["cases"]):  # else the tests would ask something else each time
        importlib.import_module("random").seed(0)
    tests = Tests(questions, task["names"], task["library"])
    verdicts: list[bool] = []
    for number, case in enumerate(task["cases"]):
        try:
            passed = tests.passes(case)
        except UnsupportedError as error:
            return {"unsupported": f"test {number + 1}, {case.strip()[:200]!r}: {error}"}
        if not questions.pending:
            verdicts.append(passed)
    return {"verdicts": verdicts, "questions": questions.made}


def _read(reply: str) -> object:
    try:
        return json.loads(reply)
    except (ValueError, RecursionError):
        return None


def main() -> None:
    if sys.flags.hash_randomization:  # else sets of strings, and so the questions, would have another order each time
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    out = os.dup(1)
    task = json.load(sys.stdin)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    runs = [(asked, [_read(reply) for reply in replies]) for asked, replies in task["runs"]]
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    with os.fdopen(out, "w") as file:
        for asked, replies in runs:
            file.write(json.dumps(judge(task, asked, replies)) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
