"""Programs that want a score without solving the task, and right ones of all styles beside them, in one batch."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from paceline.rewards.sandbox import LocalSandbox, SandboxLimits
from paceline.rewards.score import code
from tests.unit.rewards.code_cheats import CHEATS, USUAL
from tests.unit.rewards.code_right import RIGHT, unindented
from tests.unit.rewards.judge_cheats import JUDGE_CHEATS

pytestmark = pytest.mark.usefixtures("isolation")

ALL = {**CHEATS, **JUDGE_CHEATS}
LIMITS = SandboxLimits(cpu_seconds=1, wall_seconds=4.0, memory_bytes=192 << 20)


def block(source: str) -> str:
    return f"Here it is:\n```python\n{textwrap.dedent(source)}\n```\nThat is all."


@pytest.fixture(scope="module")
def graded() -> dict[tuple[str, int], Any]:
    """Results by name and number, of one batch in which a right program follows every second cheat."""
    rows: dict[tuple[str, int], tuple[str, Any]] = {}
    right = list(RIGHT.items())
    for place, (name, cheat) in enumerate(ALL.items()):
        source, tests = cheat if isinstance(cheat, tuple) else (cheat, USUAL)
        for number, test in enumerate(tests):
            rows[name, number] = (source, test)
        if place % 2 == 0:
            beside, row = right[place // 2 % len(right)]
            rows[f"right {beside}", place] = unindented(row)
    results = code.compute_scores(
        [block(source) for source, _ in rows.values()], [test for _, test in rows.values()], [None] * len(rows),
        sandbox=LocalSandbox(LIMITS),
    )  # fmt: skip
    return dict(zip(rows, results, strict=True))


def test_there_are_many_cheats():
    assert len(ALL) >= 40
    assert len(ALL) >= 2 * len(RIGHT)


@pytest.mark.parametrize("name", ALL)
def test_no_cheat_scores_and_each_is_a_failure_of_its_own(graded, name):
    found = {key[1]: result for key, result in graded.items() if key[0] == name}
    assert found
    for number, result in found.items():
        assert isinstance(result, dict), (number, result)
        assert (result["score"], result["acc"], result["extracted"]) == (0.0, 0.0, True), number


@pytest.mark.parametrize("name", RIGHT)
def test_right_programs_score_beside_them(graded, name):
    found = {key[1]: result for key, result in graded.items() if key[0] == f"right {name}"}
    assert found
    for number, result in found.items():
        assert isinstance(result, dict), (number, result)
        assert result["score"] == 1.0, number
