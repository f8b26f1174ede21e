"""The runs in sandboxes that grade a program: its own, and those of the judge of its test code.

Each is a run of its own, in a jail of its own: what goes in and comes out is text. A program is run on all questions
that the judge asks; the judge, which gets the answers, then gives its verdicts, or has further questions.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from paceline.errors import DataError
from paceline.rewards.sandbox import Program, RunResult, Sandbox
from paceline.rewards.score.code import judge_side, plain_data, program_side
from paceline.rewards.score.code.truths import CodeTests

__all__ = ["Trial", "first_questions", "matches", "next_run", "split_judge_run"]

_MOST_KEPT = 4096
_LEAST_PRINTED_BYTES = 1 << 20
_MOST_ROUNDS = 20
"""A test whose calls depend on earlier results takes a run of the program for each step, but no more."""
_CLOSE = {"rel_tol": 1e-9, "abs_tol": 1e-12}

_lock = threading.Lock()
_kept: dict[str, list[object] | DataError] = {}


def program_run(
    code: str, kind: str, pieces: Sequence[object], *, output_bytes: int, stop_at_first_failure: bool
) -> Program:
    """The run of a program on texts to read, or on questions."""
    texts = [json.dumps(piece) for piece in pieces]
    header = json.dumps(
        {
            "kind": kind,
            "code": code,
            "lengths": [len(text) for text in texts],
            "output_bytes": output_bytes,
            "stop_at_first_failure": stop_at_first_failure,
        }
    )
    length = f"{len(header):0{program_side.HEADER_DIGITS}d}"
    return Program(_script(program_side.__file__), stdin="".join([length, header, *texts]))


def judge_run(tests: CodeTests, runs: Sequence[tuple[Sequence[object], list[str]]]) -> Program:
    """The run of test code with what programs were asked and what they replied, one program after the other."""
    task = {"cases": tests.cases, "names": tests.names, "library": tests.library, "runs": runs}
    return Program(_script(judge_side.__file__), stdin=json.dumps(task))


def split_judge_run(run: RunResult, num_programs: int) -> Sequence[RunResult | None]:
    """A result for each program; Nones if the judge did not come to its end with all of them."""
    if num_programs == 1:
        return [run]
    lines = run.stdout.splitlines()
    if not run.ok or len(lines) != num_programs:
        return [None] * num_programs
    return [replace(run, stdout=line) for line in lines]


def read_verdicts(run: RunResult) -> tuple[list[bool], list[object]]:
    """The verdicts of a judge that came to its end, and its questions.

    Raises:
        DataError: a test can't be judged.
        RuntimeError: it failed.
    """
    if run.status != "ok":
        raise RuntimeError(f"The judge gave no verdict ({run.status}): {run.message or run.stderr[-500:]}")
    if not run.stdout:
        raise DataError("A test can't be judged: it ends the process that judges.")
    outcome = json.loads(run.stdout)
    if "unsupported" in outcome:
        raise DataError(f"A test can't be judged: {outcome['unsupported']}.")
    return outcome["verdicts"], outcome["questions"]


def first_questions(all_tests: Sequence[CodeTests], sandbox: Sandbox) -> list[list[object] | Exception]:
    """What the test code of each asks before it has an answer; what went wrong in its place. Kept for the next time."""
    keys = [json.dumps([tests.cases, tests.names, tests.library]) for tests in all_tests]
    with _lock:
        found: dict[str, list[object] | Exception] = {key: _kept[key] for key in keys if key in _kept}
    runs = {key: judge_run(tests, [([], [])]) for key, tests in zip(keys, all_tests, strict=True) if key not in found}
    for key, run in zip(runs, sandbox.run_many(list(runs.values())) if runs else [], strict=True):
        try:
            found[key] = read_verdicts(run)[1]
        except Exception as error:
            found[key] = error
    with _lock:
        for key in runs:
            result = found[key]
            if isinstance(result, list | DataError):
                _kept[key] = result
        while len(_kept) > _MOST_KEPT:
            del _kept[next(iter(_kept))]
    return [found[key] for key in keys]


@cache
def _script(file: str) -> str:
    """One script of `plain_data` and a side: inside, there is no package to import from."""
    lines = [
        line for path in (plain_data.__file__, file) for line in Path(path).read_text(encoding="utf-8").splitlines()
    ]
    own = [line for line in lines if not line.startswith(("from __future__ ", "from paceline."))]
    return "\n".join(["from __future__ import annotations", *own])


def next_run(trials: Sequence[Trial]) -> Program:
    """What comes next for trials: the run of one's own program, or of a judge for all of them."""
    if trials[0].wants_judge:
        return judge_run(trials[0].tests, [(trial.questions, trial.replies or []) for trial in trials])
    [trial] = trials
    return trial.program()


class Trial:
    """A program, its tests, and the runs that lead to a verdict: of the program, and of a judge of its test code."""

    def __init__(self, code: str, tests: CodeTests, stop_at_first_failure: bool) -> None:
        self.code = code
        self.tests = tests
        self.stop_at_first_failure = stop_at_first_failure and tests.kind != "assert"
        self.timeout = False
        self.questions = tests.cases
        self.replies: list[str] | None = None
        self.num_rounds = 0
        self.alone = False
        """Is not judged together with others."""
        self.judged_twice = False

    @property
    def wants_judge(self) -> bool:
        return self.replies is not None

    def program(self) -> Program:
        texts = map(str, self.tests.expected) if self.tests.kind == "stdin" else ()
        longest = max((4 * len(text) for text in texts), default=0)
        return program_run(
            self.code,
            "stdin" if self.tests.kind == "stdin" else "calls",
            self.questions,
            output_bytes=max(_LEAST_PRINTED_BYTES, 2 * longest),
            stop_at_first_failure=self.stop_at_first_failure,
        )

    def take(self, run: RunResult | None) -> int | None:
        """How many tests passed, or None if another run has to follow. Without a result, that is one of its own."""
        if run is None:
            self.alone = True
            return None
        if run.status == "sandbox_error":
            raise RuntimeError(f"The sandbox failed: {run.message or run.stderr[-500:]}")
        if self.wants_judge:
            return self._take_verdicts(run)
        self.timeout = self.timeout or run.status == "timeout"
        replies = _replies(run.stdout, len(self.questions))
        stopped = self.stop_at_first_failure and any("ended" in _read(reply) for reply in replies)
        if (
            not all(replies)
            and not stopped
            and (run.status == "ok" or (run.status == "error" and (run.exit_code or 0) > 0))
        ):
            # A program can end the process that runs it, by a signal, but not make it fail.
            raise RuntimeError(f"The sandbox gave no answer: {run.stderr[-500:] or run.stdout[-500:]!r}")
        if self.tests.kind == "assert":
            self.replies = replies
            self.timeout = self.timeout or any(_read(reply).get("timeout") is True for reply in replies)
            return None
        passed = 0
        for reply, expected in zip(map(_read, replies), self.tests.expected, strict=True):
            self.timeout = self.timeout or reply.get("timeout") is True
            passed += self._is_right(reply, expected)
        return passed

    def _take_verdicts(self, run: RunResult) -> int | None:
        self.num_rounds += 1
        if run.status == "timeout" and not self.judged_twice:  # perhaps the machine was busy
            self.judged_twice = True
            return None
        if run.status in ("timeout", "memory", "output"):  # without answers the tests came to their end: these did it
            self.timeout = self.timeout or run.status == "timeout"
            return 0
        verdicts, questions = read_verdicts(run)
        if len(verdicts) == len(self.tests.cases):
            return sum(verdicts)
        if self.num_rounds == _MOST_ROUNDS:
            self.timeout = True
            return sum(verdicts)
        self.questions, self.replies = questions, None
        return None

    def _is_right(self, reply: dict[str, object], expected: object) -> bool:
        if self.tests.kind == "stdin":
            return reply.get("printed") == program_side.fingerprint(str(expected))
        if "returned" not in reply:
            return False
        # APPS and TACO write each result in a list of its own.
        wrapped = all(isinstance(value, list) and len(value) == 1 for value in self.tests.expected)
        returned = reply["returned"]
        if wrapped and isinstance(expected, list) and matches(returned, expected[0]):
            return True
        return matches(returned, expected)


def _replies(stdout: str, count: int) -> list[str]:
    """What the program's side wrote, or would have us believe it did, by number; nothing for what is missing."""
    replies = [""] * count
    for line in stdout.split("\n"):
        outcome = _read(line)
        number, reply = outcome.get("number"), outcome.get("reply")
        if type(number) is int and 0 <= number < count and isinstance(reply, str):
            replies[number] = replies[number] or reply
    return replies


def _read(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def matches(returned: object, expected: object) -> bool:
    """Whether a result, in the form of `plain_data.encode`, equals an expected value, which was JSON.

    Tuples equal lists, and floats need be equal but for rounding. Goes no deeper than what is expected and hashes
    nothing but strings: whoever made the result may mean harm.
    """
    kind = None
    if isinstance(returned, dict):
        kind, returned = returned.get("type", "none"), returned.get("value")
    if isinstance(expected, list):
        if kind not in (None, "tuple", "iterator") or not isinstance(returned, list) or len(returned) != len(expected):
            return False
        return all(matches(*pair) for pair in zip(returned, expected, strict=True))
    if isinstance(expected, dict):
        if kind != "dict" or not isinstance(returned, list) or len(returned) != len(expected):
            return False
        pairs = {str(pair[0]): pair[1] for pair in returned if isinstance(pair, list) and len(pair) == 2}
        return pairs.keys() == expected.keys() and all(matches(pairs[key], expected[key]) for key in expected)
    if kind == "int":
        return isinstance(expected, int) and returned == hex(expected)
    if kind is not None or isinstance(returned, list):
        return False
    if isinstance(expected, float) or (isinstance(returned, float) and isinstance(expected, int)):
        return isinstance(returned, int | float) and _is_close(returned, expected)
    return isinstance(returned, str | int | None) and returned == expected


def _is_close(one: float, other: float) -> bool:
    try:
        return math.isclose(one, other, **_CLOSE)
    except OverflowError:  # an integer that no float can hold
        return one == other
