"""Names in test code are the program's or the library's, and what could judge itself is refused."""

from __future__ import annotations

import ast

import pytest

from paceline.errors import DataError
from paceline.rewards.score.code.name_owners import name_owners


@pytest.mark.parametrize(
    ("code", "fn_names", "program", "library"),
    [
        ("assert f(1) == 2", [], ["f"], {}),
        ("assert Counter(f(1)) == Counter()", [], ["f"], {"Counter": "collections"}),
        ("assert Counter(1).most() == 2", [], ["Counter"], {}),  # the only one, so it is the program's
        ("assert math.isclose(area(1), math.pi)", [], ["area"], {"math": "math"}),
        ("from math import *\nassert f(pi) == 0", [], ["f"], {}),
        ("def helper(x):\n    return f(x)\nassert helper(1) == 2", [], ["f"], {}),
        ("assert Solution().run(deque()) == f(1)", ["f"], ["Solution", "f"], {"deque": "collections"}),
    ],
)
def test_a_name_has_one_owner(code: str, fn_names: list[str], program: list[str], library: dict[str, str]) -> None:
    assert name_owners(code, ast.parse(code), fn_names) == (program, library)


@pytest.mark.parametrize(
    ("code", "fn_names", "message"),
    [
        ("assert eval(f(1)) == 2", [], "use 'eval', which could run an answer"),
        ("import pickle\nassert f(1) == 2", [], "use 'pickle', which could run an answer"),
        ("assert f(1) == g(1)", ["f"], "use 'g', which they neither define nor import"),
        ("assert 1 == 2", [], "use no name of the program"),
        ("try:\n    f(1)\nexcept Own:\n    assert f(2)", [], "catch 'Own', a class of the program"),
        ("assert f(1) == g(2)", [], "lets functions judge each other, 'f', 'g'"),
        ("from numpy import *\nassert f(1) == 2", [], r"import \* from numpy"),
    ],
)
def test_what_can_not_be_told_apart_is_refused(code: str, fn_names: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        name_owners(code, ast.parse(code), fn_names)
