"""Plain data: how it crosses, and that nothing odd in it does harm."""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import DataError
from paceline.rewards.sandbox import RunResult
from paceline.rewards.score import code
from paceline.rewards.score.code import plain_data
from paceline.rewards.score.code.judge_runs import Trial


def crossed(value: Any) -> Any:
    def refer(held: Any) -> Any:
        raise AssertionError(held)

    return plain_data.decode(json.loads(json.dumps(plain_data.encode(value, refer))), refer)  # type: ignore[arg-type]


def test_plain_data_survives_the_crossing():
    values = [None, True, 0, -1, 1.5, "é\ud800", [1, [2]], (1, (2,)), {1, 2}, frozenset({3}), {(1,): {"a": []}}, b"\0",
              1j, 10**5000, -(10**40), {}, [], "", range(1, 9, 2), deque([1]), Fraction(1, 3),
              Decimal("0.10")]  # fmt: skip
    for value in values:
        assert crossed(value) == value
        assert type(crossed(value)) is type(value)
    assert list(crossed(iter([1, 2]))) == list(crossed({1: 0, 2: 0}.keys())) == [1, 2]
    endless = crossed(itertools.count())
    assert list(itertools.islice(endless, 100)) == list(range(100))
    with pytest.raises(OverflowError):
        list(endless)


MALFORMED = [
    {"type": "dict", "value": [[1]]}, {"type": "dict", "value": 3}, {"type": "int", "value": "0xq"}, {"type": []},
    {"type": "object", "value": 0}, {}, {"type": "dict", "value": [[{"type": "object", "value": 1}, 2]]},
    {"type": "set", "value": [[]]}, {"type": "tuple", "value": None}, {"type": "Decimal", "value": []},
    {"type": "range", "value": [1, 2, 0]}, {"type": "module", "value": "os"}, {"type": "Fraction", "value": "1/0"},
    {"type": "deque", "value": [], "more": 1}, {"type": "int", "value": 3},
]  # fmt: skip


@pytest.mark.parametrize("returned", [*MALFORMED, {"type": "set", "value": [1]}, [[[]]]])
def test_malformed_results_are_wrong_not_fatal(returned):
    for expected in ([1], {"1": 2}, 3, 3.0, "x", None, [[1]]):
        assert code.matches(returned, expected) is False


@pytest.mark.parametrize("encoded", MALFORMED)
def test_nothing_but_plain_data_is_decoded(encoded):
    def find(kind: str, held: Any) -> Any:
        raise plain_data.MalformedError(kind)

    with pytest.raises(plain_data.MalformedError):
        plain_data.decode(encoded, find)
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(plain_data.MalformedError, match="deep"):
        plain_data.decode(deep, find)


ODD = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.integers(min_value=10**308, max_value=10**320)
    | st.text(st.characters()) | st.binary() | st.complex_numbers() | st.sampled_from([-0.0, "\ud800", 10**400]),
    lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)  # fmt: skip
JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.just(10**400) | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(ODD, JSON_LIKE)
def test_comparing_never_raises(value, expected):
    returned = json.loads(json.dumps(plain_data.encode(value, lambda held: {"type": "object", "value": [0, 0]})))
    assert code.matches(returned, expected) in (True, False)
    assert code.matches(expected, expected) in (True, False)
    reply = json.dumps({"returned": returned})
    trial = Trial("", code.read_tests({"fn_name": "f", "inputs": [[]], "outputs": [expected]}), False)
    line = json.dumps({"number": 0, "reply": reply})
    assert trial.take(RunResult("ok", stdout=line)) in (0, 1)


@pytest.mark.usefixtures("isolation")
def test_odd_results_and_truths_stay_with_their_row():
    """Each is beside a right program, which scores 1."""
    deep: Any = []
    for _ in range(3000):
        deep = [deep]
    sources = ["def f(): return float('inf')", "def f(): return 1.0 * 10**300",
               "def f():\n    x = []\n    x.append(x)\n    return x",
               "def f():\n    x = []\n    for _ in range(5000): x = [x]\n    return x", "def f(): return '\\ud800'",
               "def f(): return float('nan')", "def f(): return {(): []}", "def f(): return 1"]  # fmt: skip
    truths = [math.factorial(200), 10**300, [], 0.5, "\ud800", float("nan"), {"()": []}, deep]
    rows = [{"fn_name": "f", "inputs": [[]], "outputs": [truth]} for truth in truths]
    right = {"fn_name": "f", "inputs": [[1]], "outputs": [1]}
    rows += [{"inputs": [b"x"], "outputs": ["x"]}, {"fn_name": "f", "inputs": [[b"x"]], "outputs": [1]}, right]
    sources += ["pass", "pass", "def f(x): return x"]
    results = code.compute_scores([f"```python\n{source}\n```" for source in sources], rows, [None] * len(rows))
    scores = [type(result) if isinstance(result, Exception) else result["score"] for result in results]
    assert scores == [0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, DataError, DataError, DataError, 1.0]
