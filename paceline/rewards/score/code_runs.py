"""The runs in sandboxes that grade a program: its own, and those of the judge of its test code.

Each is a run of its own, in a jail of its own: what goes in and comes out is text. A program is run on all questions
that the judge asks; the judge, which gets the answers, then gives its verdicts, or has further questions.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from paceline.errors import DataError
from paceline.rewards.sandbox import Program, RunResult, Sandbox, judge_side, plain_data, program_side
from paceline.rewards.score.code_tests import CodeTests

__all__ = ["first_questions", "judge_run", "program_run", "read_verdicts", "split_judge_run"]

_MOST_KEPT = 4096

_lock = threading.Lock()
_kept: dict[str, list[Any] | DataError] = {}


def program_run(
    code: str, kind: str, pieces: Sequence[Any], *, output_bytes: int, stop_at_first_failure: bool
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


def judge_run(tests: CodeTests, runs: Sequence[tuple[list[Any], list[str]]]) -> Program:
    """The run of test code with what programs were asked and what they replied, one program after the other."""
    task = {"cases": tests.cases, "names": tests.names, "library": tests.library, "runs": runs}
    return Program(_script(judge_side.__file__), stdin=json.dumps(task))


def split_judge_run(run: RunResult, num_programs: int) -> list[RunResult] | None:
    """A result for each program, or None if the judge did not come to its end with all of them."""
    lines = run.stdout.splitlines()
    if num_programs == 1:
        return [run]
    return [replace(run, stdout=line) for line in lines] if run.ok and len(lines) == num_programs else None


def read_verdicts(run: RunResult) -> tuple[list[bool], list[Any]]:
    """The verdicts of a judge that came to its end, and its questions.

    Raises:
        DataError: a test can't be judged.
        RuntimeError: it failed.
    """
    if run.status != "ok":
        raise RuntimeError(f"The judge gave no verdict ({run.status}): {run.message or run.stderr[-500:]}")
    outcome = json.loads(run.stdout)
    if "unsupported" in outcome:
        raise DataError(f"A test can't be judged: {outcome['unsupported']}.")
    return outcome["verdicts"], outcome["questions"]


def first_questions(all_tests: Sequence[CodeTests], sandbox: Sandbox) -> list[list[Any] | Exception]:
    """What the test code of each asks before it has an answer; what went wrong in its place. Kept for the next time."""
    keys = [json.dumps([tests.cases, tests.names, tests.library]) for tests in all_tests]
    with _lock:
        found: dict[str, list[Any] | Exception] = {key: _kept[key] for key in keys if key in _kept}
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
