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
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.errors import ConfigError
from paceline.rewards.sandbox import SANDBOX_URL, Sandbox, sandbox_of
from paceline.rewards.score import Graded
from paceline.rewards.score.code.judge_runs import Trial, first_questions, matches, next_run, split_judge_run
from paceline.rewards.score.code.truths import read_tests

if TYPE_CHECKING:
    from paceline.config.reward import SandboxConfig

__all__ = [
    "SANDBOX_URL",
    "CodeGrader",
    "check_ground_truth",
    "compute_score",
    "compute_scores",
    "extract_program",
    "matches",
    "set_sandbox",
    "shared_sandbox",
]

Mode = Literal["fraction", "all"]

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([^\s`]*)")
_PYTHON = ("python", "python3", "py")
_LONGEST_PLAIN_PROGRAM = 20_000
_MOST_TOGETHER = 16
"""Programs that one judge takes."""

_given: Sandbox | None = None


def shared_sandbox() -> Sandbox:
    """The sandbox of this process: what `set_sandbox` was given, or by `PACELINE_SANDBOX_URL`, or a `LocalSandbox`."""
    return _given or sandbox_of(None)


def set_sandbox(sandbox: Sandbox | None) -> None:
    """Run programs there from now on. None: where the environment says."""
    global _given
    _given = sandbox


@dataclass(frozen=True)
class CodeGrader:
    """Grades programs, in the sandbox that a configuration asks for. It can be pickled: the sandbox is made in the
    process that uses it."""

    config: SandboxConfig

    def __call__(self, solution_str: str, ground_truth: object, extra_info: object = None) -> Graded:
        sandbox = sandbox_of(self.config)
        return compute_score(solution_str, ground_truth, extra_info, mode=self.config.mode, sandbox=sandbox)

    def many(
        self, solutions: Sequence[str], ground_truths: Sequence[object], extra_infos: Sequence[object]
    ) -> list[Graded | Exception]:
        sandbox = sandbox_of(self.config)
        return compute_scores(solutions, ground_truths, extra_infos, mode=self.config.mode, sandbox=sandbox)

    def check(self) -> None:
        """Raise if this machine can't isolate programs; warn if the service can't be reached now."""
        sandbox_of(self.config).check()


def compute_score(
    solution_str: str,
    ground_truth: object,
    extra_info: object = None,
    *,
    mode: Mode = "fraction",
    sandbox: Sandbox | None = None,
) -> Graded:
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
    ground_truths: Sequence[object],
    extra_infos: Sequence[object],
    *,
    mode: Mode = "fraction",
    sandbox: Sandbox | None = None,
) -> list[Graded | Exception]:
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
    results: list[Graded | Exception] = []
    trials: dict[int, Trial] = {}
    for row, (solution, ground_truth) in enumerate(zip(solutions, ground_truths, strict=True)):
        try:
            tests = read_tests(ground_truth)
            code = extract_program(solution)
        except Exception as error:  # one row's trouble stays its own
            results.append(error)
            continue
        if code is not None:
            trials[row] = Trial(code, tests, stop_at_first_failure=mode == "all")
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
            trials[row].questions = first  # before there is any answer
    while trials:
        groups = _groups(trials)
        runs = sandbox.run_many([next_run([trials[row] for row in group]) for group in groups])
        for group, run in zip(groups, runs, strict=True):
            for row, own in zip(group, split_judge_run(run, len(group)), strict=True):
                try:
                    passed = trials[row].take(own)
                except Exception as error:
                    results[row] = error
                else:
                    if passed is None:
                        continue
                    share = passed / len(trials[row].tests.cases)
                    score = float(share == 1) if mode == "all" else share
                    results[row] = _result(score, share=share, timeout=trials[row].timeout)
                del trials[row]
    return results


def _groups(trials: dict[int, Trial]) -> list[list[int]]:
    """Rows that one run serves: each has its own for its program; a judge takes those with the same test code."""
    together: dict[object, list[int]] = {}
    for row, trial in trials.items():
        together.setdefault(id(trial.tests) if trial.wants_judge and not trial.alone else ("row", row), []).append(row)
    return [
        rows[start : start + _MOST_TOGETHER]
        for rows in together.values()
        for start in range(0, len(rows), _MOST_TOGETHER)
    ]


def check_ground_truth(ground_truth: object) -> None:
    """Raise a `DataError` if a ground truth can't tell right programs from wrong ones. Runs nothing."""
    read_tests(ground_truth)


def _result(score: float, *, share: float = 0.0, extracted: bool = True, timeout: bool = False) -> Graded:
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
