r"""Code: how many of its tests does a program pass?

The program is the last Python block of a response. It runs in a sandbox (`paceline.rewards.sandbox`), against tests in
the ground truth, a dict or its JSON:

- `{"inputs": ["1 2\n"], "outputs": ["3\n"]}`: read from standard input, compared with standard output, but for spaces
  at the ends of lines and empty lines at the end;
- `{"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}`: arguments and result of a function, or of a method of
  `class Solution`;
- `{"asserts": ["assert add(1, 2) == 3"]}`, or the assertions as one string.

The program can't see what is expected of it: see docs/sandbox.md.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import threading
from collections.abc import Sequence
from typing import Any, Literal

from paceline.errors import ConfigError
from paceline.rewards.sandbox import LocalSandbox, Program, RemoteSandbox, RunResult, Sandbox
from paceline.rewards.sandbox.program_side import fingerprint
from paceline.rewards.score.code_runs import first_questions, judge_run, program_run, read_verdicts, split_judge_run
from paceline.rewards.score.code_tests import CodeTests, read_tests

__all__ = [
    "SANDBOX_URL",
    "check_ground_truth",
    "compute_score",
    "compute_scores",
    "extract_program",
    "matches",
    "set_sandbox",
    "shared_sandbox",
]

Mode = Literal["fraction", "all"]

SANDBOX_URL = "PACELINE_SANDBOX_URL"
"""The environment variable that names a remote sandbox; without it, programs run in jails on this machine."""

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([^\s`]*)")
_PYTHON = ("python", "python3", "py")
_LONGEST_PLAIN_PROGRAM = 20_000
_LEAST_PRINTED_BYTES = 1 << 20
_MOST_ROUNDS = 20
"""A test whose calls depend on earlier results takes a run of the program for each step, but no more."""
_MOST_TOGETHER = 16
"""Programs that one judge takes."""
_CLOSE = {"rel_tol": 1e-9, "abs_tol": 1e-12}

_lock = threading.Lock()
_shared: Sandbox | None = None


def shared_sandbox() -> Sandbox:
    """The sandbox of this process: what `set_sandbox` was given, or by `PACELINE_SANDBOX_URL`, or a `LocalSandbox`."""
    global _shared
    with _lock:
        if _shared is None:
            url = os.environ.get(SANDBOX_URL)
            _shared = RemoteSandbox(url) if url else LocalSandbox()
        return _shared


def set_sandbox(sandbox: Sandbox | None) -> None:
    """Run programs there from now on. None: choose anew at the next use."""
    global _shared
    with _lock:
        _shared = sandbox


def compute_score(
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    mode: Mode = "fraction",
    sandbox: Sandbox | None = None,
) -> dict[str, Any]:
    """The score of one response, and what `compute_scores` gives besides.

    Raises:
        DataError: the ground truth holds no tests, or tests that can't be judged.
        RuntimeError: the sandbox failed.
    """
    [result] = compute_scores([solution_str], [ground_truth], [extra_info], mode=mode, sandbox=sandbox)
    if isinstance(result, Exception):
        raise result
    return result


def compute_scores(
    solutions: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Any],
    *,
    mode: Mode = "fraction",
    sandbox: Sandbox | None = None,
) -> list[dict[str, Any] | Exception]:
    """Scores of many responses, side by side.

    Args:
        mode: `fraction`: the score is passed / all tests. `all`: 1 if all pass, else 0.

    Returns:
        For each response `score`, `acc` (1 if all tests passed), `extracted` (a program was found), `timeout` (it
        was killed at a limit of time), `tests_passed` (the share). An exception in the list is a failure of the
        sandbox or of the tests, not of the program.
    """
    if mode not in ("fraction", "all"):
        raise ConfigError(f"mode={mode!r}; choose fraction or all.")
    results: list[dict[str, Any] | Exception] = []
    trials: dict[int, _Trial] = {}
    for row, (solution, ground_truth) in enumerate(zip(solutions, ground_truths, strict=True)):
        try:
            tests = read_tests(ground_truth)
            code = extract_program(solution)
        except Exception as error:  # one row's trouble stays its own
            results.append(error)
            continue
        if code is not None:
            trials[row] = _Trial(code, tests, stop_at_first_failure=mode == "all")
        results.append(_result(0.0, extracted=False))
    sandbox = sandbox or (shared_sandbox() if trials else None)
    if sandbox is None:
        return results
    with_test_code = {row: trial.tests for row, trial in trials.items() if trial.tests.kind == "assert"}
    for row, first in zip(with_test_code, first_questions(list(with_test_code.values()), sandbox), strict=True):
        if isinstance(first, Exception):
            results[row] = first
            del trials[row]
        else:
            trials[row].ask_first(first)
    while trials:
        groups = _groups(trials)
        runs = sandbox.run_many([_next_run([trials[row] for row in group]) for group in groups])
        for group, run in zip(groups, runs, strict=True):
            for row, own in zip(group, split_judge_run(run, len(group)) or [None] * len(group), strict=True):
                try:
                    passed = trials[row].take(own)
                except Exception as error:
                    results[row] = error
                else:
                    if passed is None:
                        continue
                    results[row] = trials[row].result(passed, mode)
                del trials[row]
    return results


def _groups(trials: dict[int, _Trial]) -> list[list[int]]:
    """Rows that one run serves: each has its own for its program; a judge takes those with the same test code."""
    together: dict[Any, list[int]] = {}
    for row, trial in trials.items():
        together.setdefault(id(trial.tests) if trial.wants_judge and not trial.alone else ("row", row), []).append(row)
    return [
        rows[start : start + _MOST_TOGETHER]
        for rows in together.values()
        for start in range(0, len(rows), _MOST_TOGETHER)
    ]


def _next_run(trials: Sequence[_Trial]) -> Program:
    if trials[0].wants_judge:
        return judge_run(trials[0].tests, [(trial.questions, trial.replies or []) for trial in trials])
    [trial] = trials
    return trial.program()


def check_ground_truth(ground_truth: Any) -> None:
    """Raise a `DataError` if a ground truth can't tell right programs from wrong ones. Runs nothing."""
    read_tests(ground_truth)


def _result(score: float, *, share: float = 0.0, extracted: bool = True, timeout: bool = False) -> dict[str, Any]:
    return {
        "score": score,
        "acc": float(share == 1),
        "extracted": extracted,
        "timeout": timeout,
        "tests_passed": share,
    }


def extract_program(text: str) -> str | None:
    """The last Python block, else the last block without a language, else the whole text if it is a program.

    >>> extract_program("First:\\n```python\\nprint(1)\\n```\\nBetter:\\n```python\\nprint(2)\\n```\\nDone.")
    'print(2)\\n'
    """
    blocks = _blocks(text)
    for wanted in (_PYTHON, ("",)):
        found = [code for language, code in blocks if language in wanted and code.strip()]
        if found:
            return found[-1]
    if blocks or len(text) > _LONGEST_PLAIN_PROGRAM:
        return None
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    # A lone word or number is valid Python too, and no program.
    return text if any(not isinstance(node, ast.Expr) or _has_call(node) for node in tree.body) else None


def _blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of all fenced blocks; the last may lack its end."""
    blocks: list[tuple[str, list[str]]] = []
    fence = ""
    for line in text.splitlines(keepends=True):
        mark = _FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
            blocks.append((mark[2].lower(), []))
        elif mark and mark[1].startswith(fence) and not line[mark.end(1) :].strip():
            fence = ""
        elif fence:
            blocks[-1][1].append(line)
    return [(language, "".join(lines)) for language, lines in blocks]


def _has_call(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Call) for inner in ast.walk(node))


class _Trial:
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

    def ask_first(self, questions: list[Any]) -> None:
        """Begin with what test code asks before it has any answer."""
        self.questions = questions

    @property
    def wants_judge(self) -> bool:
        return self.replies is not None

    def program(self) -> Program:
        longest = max((4 * len(text) for text in self.tests.expected), default=0) if self.tests.kind == "stdin" else 0
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

    def result(self, num_passed: int, mode: Mode) -> dict[str, Any]:
        share = num_passed / len(self.tests.cases)
        return _result(float(share == 1) if mode == "all" else share, share=share, timeout=self.timeout)

    def _is_right(self, reply: dict[str, Any], expected: Any) -> bool:
        if self.tests.kind == "stdin":
            return reply.get("printed") == fingerprint(expected)
        if "returned" not in reply:
            return False
        # APPS and TACO write each result in a list of its own.
        wrapped = all(isinstance(value, list) and len(value) == 1 for value in self.tests.expected)
        returned = reply["returned"]
        return matches(returned, expected) or (wrapped and matches(returned, expected[0]))


def _replies(stdout: str, count: int) -> list[str]:
    """What the program's side wrote, or would have us believe it did, by number; nothing for what is missing."""
    replies = [""] * count
    for line in stdout.split("\n"):
        outcome = _read(line)
        number, reply = outcome.get("number"), outcome.get("reply")
        if type(number) is int and 0 <= number < count and isinstance(reply, str):
            replies[number] = replies[number] or reply
    return replies


def _read(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def matches(returned: Any, expected: Any) -> bool:
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
