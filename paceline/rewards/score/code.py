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
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from paceline.errors import ConfigError, DataError
from paceline.rewards.sandbox import LocalSandbox, Program, RemoteSandbox, RunResult, Sandbox, case_runner

__all__ = ["SANDBOX_URL", "compute_score", "compute_scores", "extract_program", "set_sandbox", "shared_sandbox"]

Mode = Literal["fraction", "all"]
Kind = Literal["stdin", "call", "assert"]

SANDBOX_URL = "PACELINE_SANDBOX_URL"
"""The environment variable that names a remote sandbox; without it, programs run in jails on this machine."""

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([^\s`]*)")
_PYTHON = ("python", "python3", "py")
_LONGEST_PLAIN_PROGRAM = 20_000
_LEAST_PRINTED_BYTES = 1 << 20
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
            tests = _read_tests(ground_truth)
        except DataError as error:
            results.append(error)
            continue
        code = extract_program(solution)
        if code is not None:
            trials[row] = _Trial(code, tests, stop_at_first_failure=mode == "all")
        results.append(_result(0.0, extracted=False))
    if trials:
        sandbox = sandbox or shared_sandbox()
        runs = sandbox.run_many([trial.program() for trial in trials.values()])
        for (row, trial), run in zip(trials.items(), runs, strict=True):
            try:
                passed, timeout = trial.judge(run)
            except (DataError, RuntimeError) as error:
                results[row] = error
                continue
            share = passed / len(trial.tests.cases)
            results[row] = _result(float(share == 1) if mode == "all" else share, share=share, timeout=timeout)
    return results


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


@dataclass(frozen=True)
class _Tests:
    kind: Kind
    cases: list[Any]
    expected: list[Any]
    """As many as cases; nothing for assertions, which hold it themselves."""
    fn_name: str | None = None


def _read_tests(ground_truth: Any) -> _Tests:
    value = _plain(ground_truth)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = {"asserts": value}
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        value = {"inputs": [item.get("input") for item in value], "outputs": [item.get("output") for item in value]}
    elif isinstance(value, list):
        value = {"asserts": value}
    if not isinstance(value, dict):
        raise DataError(f"The ground truth of code must be a dict with tests, or its JSON, not {str(value)[:80]!r}.")
    if value.get("asserts"):
        return _read_asserts(value["asserts"])
    inputs = value.get("inputs", value.get("input"))
    outputs = value.get("outputs", value.get("output"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise DataError(
            f"The ground truth of code has {_count(inputs)} inputs and {_count(outputs)} outputs (keys: "
            f"{', '.join(map(str, value)) or 'none'}). Give `inputs` and `outputs`, lists of one length, or `asserts`."
        )
    fn_name = value.get("fn_name")
    if not fn_name:
        return _Tests("stdin", [_text(item) for item in inputs], [_text(item) for item in outputs])
    if not all(isinstance(arguments, list) for arguments in inputs):
        raise DataError(f"`inputs` of fn_name={fn_name!r} must be lists of arguments, such as [[1, 2], [3, 4]].")
    return _Tests("call", inputs, outputs, fn_name=str(fn_name))


def _read_asserts(asserts: Any) -> _Tests:
    """A string is cut at its assertions, each with the lines before it; a list is taken as it is."""
    if isinstance(asserts, str):
        try:
            body = ast.parse(asserts).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise DataError(f"The assertions of the ground truth are no Python: {error}.") from None
        lines = asserts.splitlines(keepends=True)
        ends = [node.end_lineno or 0 for node in body if isinstance(node, ast.Assert)]
        ends = sorted(set(ends))
        if not ends or ends[-1] < (body[-1].end_lineno or 0):
            ends = [*ends[:-1], len(lines)] if ends else [len(lines)]
        cases = ["".join(lines[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    else:
        cases = [str(item) for item in asserts] if isinstance(asserts, list) else []
    cases = [case for case in cases if case.strip()]
    if not cases:
        raise DataError("The ground truth of code has `asserts`, but none in it. Give a string or a list of strings.")
    for case in cases:
        try:
            ast.parse(case)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise DataError(f"An assertion of the ground truth is no Python: {error}: {case[:200]!r}.") from None
    return _Tests("assert", cases, [])


def _plain(value: Any) -> Any:
    """Lists for numpy arrays, which is how parquet columns arrive."""
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _count(values: Any) -> int | str:
    return len(values) if isinstance(values, list) else "no"


class _Trial:
    """One program and its tests."""

    def __init__(self, code: str, tests: _Tests, stop_at_first_failure: bool) -> None:
        self.code = code
        self.tests = tests
        self.stop_at_first_failure = stop_at_first_failure
        self.nonce = secrets.token_hex(16)

    def program(self) -> Program:
        expected_bytes = max((4 * len(text) for text in self.tests.expected), default=0) if self._prints else 0
        task = {
            "code": self.code,
            "kind": self.tests.kind,
            "cases": self.tests.cases,
            "fn_name": self.tests.fn_name,
            "output_bytes": max(_LEAST_PRINTED_BYTES, 2 * expected_bytes),
            "stop_at_first_failure": self.stop_at_first_failure,
            "nonce": self.nonce,
        }
        return Program(_runner_source(), stdin=json.dumps(task))

    def judge(self, run: RunResult) -> tuple[int, bool]:
        """How many tests passed, and whether time ran out."""
        if run.status == "sandbox_error":
            raise RuntimeError(f"The sandbox failed: {run.message or run.stderr[-500:]}")
        passed: set[int] = set()
        timeout = run.status == "timeout"
        done = False
        for line in run.stdout.splitlines():
            outcome = _outcome(line)
            if outcome is None or outcome.get("nonce") != self.nonce:
                continue
            done = done or bool(outcome.get("done"))
            if "unsupported" in outcome:
                raise DataError(f"A test can't be judged: {outcome['unsupported']}.")
            timeout = timeout or bool(outcome.get("timeout"))
            if "case" in outcome and self._is_right(outcome):
                passed.add(outcome["case"])
        if not done and (run.status == "ok" or (run.status == "error" and (run.exit_code or 0) > 0)):
            # A program can end the judging process, by a signal, but not make it fail.
            raise RuntimeError(f"The sandbox gave no verdict: {run.stderr[-500:] or run.stdout[-500:]!r}")
        return len(passed), timeout

    @property
    def _prints(self) -> bool:
        return self.tests.kind == "stdin"

    def _is_right(self, outcome: dict[str, Any]) -> bool:
        if self.tests.kind == "assert":
            return outcome.get("passed") is True
        expected = self.tests.expected[outcome["case"]]
        if self._prints:
            return outcome.get("printed") == case_runner.fingerprint(expected)
        if "returned" not in outcome:
            return False
        # APPS and TACO write each result in a list of its own.
        wrapped = all(isinstance(value, list) and len(value) == 1 for value in self.tests.expected)
        returned = outcome["returned"]
        return _matches(returned, expected) or (wrapped and _matches(returned, expected[0]))


def _outcome(line: str) -> dict[str, Any] | None:
    try:
        outcome = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return outcome if isinstance(outcome, dict) else None


def _matches(returned: Any, expected: Any) -> bool:
    """Whether a result, in the form of `case_runner.encode`, equals an expected value, which was JSON.

    Tuples equal lists, and floats need be equal but for rounding. Goes no deeper than what is expected and hashes
    nothing but strings: whoever made the result may mean harm.
    """
    kind = None
    if isinstance(returned, dict):
        kind, returned = returned.get("type", "none"), returned.get("value")
    if isinstance(expected, list):
        if kind not in (None, "tuple") or not isinstance(returned, list) or len(returned) != len(expected):
            return False
        return all(_matches(*pair) for pair in zip(returned, expected, strict=True))
    if isinstance(expected, dict):
        if kind != "dict" or not isinstance(returned, list) or len(returned) != len(expected):
            return False
        pairs = {str(pair[0]): pair[1] for pair in returned if isinstance(pair, list) and len(pair) == 2}
        return pairs.keys() == expected.keys() and all(_matches(pairs[key], expected[key]) for key in expected)
    if kind == "int":
        return isinstance(expected, int) and returned == hex(expected)
    if kind is not None:
        return False
    if isinstance(expected, float) or (isinstance(returned, float) and isinstance(expected, int)):
        return isinstance(returned, int | float) and math.isclose(returned, expected, **_CLOSE)
    return isinstance(returned, str | int | None) and returned == expected


@cache
def _runner_source() -> str:
    return Path(case_runner.__file__).read_text(encoding="utf-8")
