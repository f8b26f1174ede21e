"""Ground truths of code: which are refused before a run, and whose names the tests mean."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import DataError
from paceline.rewards import RewardManager
from paceline.rewards.score import code
from paceline.rewards.score.code.truths import read_tests


@pytest.mark.parametrize(
    ("ground_truth", "message"),
    [
        ({}, "no inputs and no outputs"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [], "outputs": []}, "0 inputs and 0 outputs"),
        ({"inputs": ["1"], "outputs": [None]}, r"NoneType as outputs\[0\]"),
        ({"inputs": ["1", None], "outputs": ["1", "2"]}, r"NoneType as inputs\[1\]"),
        ({"inputs": ["1"], "outputs": [["1", None]]}, r"NoneType as outputs\[0\]"),
        ([{"input": "1", "output": "1"}, {"input": "2"}], r"NoneType as outputs\[1\]"),
        ({"inputs": ["1"], "outputs": [{"a": 1}]}, r"dict as outputs\[0\]"),
        ({"inputs": [b"1"], "outputs": ["1"]}, "bytes as inputs"),
        ({"fn_name": "f", "inputs": [1], "outputs": [1]}, "must be lists of arguments"),
        ({"fn_name": "f", "inputs": [[b"1"]], "outputs": [1]}, "what JSON can hold"),
        ("assert f(1 ==", "no Python"),
        ({"asserts": ["assert f("]}, "no Python"),
        ({"asserts": [" "]}, "none in it"),
        (7, "must be a dict with tests"),
        # Nothing that can fail.
        ("x = 1", "no assertion that can fail"),
        ("f(1) == 2", "no assertion that can fail"),
        ("assert True", "no assertion that can fail"),
        ("assert 1 == 1, f(1)", "no assertion that can fail"),
        ("assert (f(1) == 2, 'two')", "no assertion that can fail"),
        ("def check(candidate):\n    assert candidate(1) == 2", "no assertion that can fail"),
        ("class T:\n    def test(self):\n        assert f(1) == 2", "no assertion that can fail"),
        (["import math", "x = 1"], "no assertion that can fail"),
        # Names that nobody defines.
        ("assert np.allclose(f(1), [1])", "use 'np'"),
        ("assert f(1) == pd.Series([1])", "use 'pd'"),
        ("assert f(3) == gcd(3, 6)", "use 'gcd'"),
        ("assert close(f(1), 0.333)", "judge each other, 'close', 'f'"),
        ("r = f(1)\nassert close(r, 0.333)", "judge each other, 'close', 'f'"),
        ("assert f(1) == reference(1)", "judge each other, 'f', 'reference'"),
        ("def check(candidate):\n    assert close(candidate(1), 2)\ncheck(f)", "judge each other"),
        ("for x in range(3):\n    y = f(x)\n    assert ok(y + 1)", "judge each other"),
        ("from helpers import *\nassert f(1) == 1", r"import \* from helpers"),
        ({"asserts": "assert f(1) == g(1)", "fn_name": "f"}, "use 'g'"),
        ({"asserts": "assert g(1) == 1", "fn_name": "f"}, "use 'g'"),
        ({"asserts": "import math\nassert math.pi > 3", "fn_name": "f"}, "no name of the program"),
        ("import math\nassert math.pi > 3", "no name of the program"),
        ("assert eval(f('1 + 1')) == 2", "use 'eval', which could run an answer"),
        ("import pickle\nassert pickle.loads(f(1)) == 2", "use 'pickle', which could run an answer"),
        ("from subprocess import run\nassert run(f(1)) == 2", "use 'subprocess', which could run an answer"),
        ("try:\n    f(1)\n    assert False\nexcept OwnError:\n    pass", "catch 'OwnError'"),
    ],
)
def test_tests_that_are_none_are_the_datas_fault(ground_truth, message):
    with pytest.raises(DataError, match=message):
        code.check_ground_truth(ground_truth)
    with pytest.raises(DataError, match=message):
        code.compute_score("```python\npass\n```", ground_truth)


@pytest.mark.parametrize(
    ("tests", "names", "library"),
    [
        ("assert f(1) == 2", ["f"], {}),
        ("assert math.isclose(f(1), 2)", ["f"], {"math": "math"}),
        ("assert Counter(f('ab')) == Counter('ab')", ["f"], {"Counter": "collections"}),
        ("assert isclose(f(1), 2)", ["f"], {"isclose": "math"}),
        ("assert collections.Counter(f('a')) == {'a': 1}", ["f"], {"collections": "collections"}),
        ("import numpy as np\nassert np.sum(f(1)) == 1", ["f"], {}),
        ("from math import *\nassert f(1) == sqrt(2)", ["f"], {}),
        ("def close(a, b): return abs(a - b) < 1e-6\nassert close(f(1), 2)", ["f"], {}),
        # The only name there is must be the program's, whatever it is called.
        ("assert gcd(4, 6) == 2", ["gcd"], {}),
        ("assert Counter('a') == {'a': 1}", ["Counter"], {}),
        ("assert copy([1]) == [1]", ["copy"], {}),
        # Several of the program's.
        ("assert f(1) == 2\nassert g(1) == 3", ["f", "g"], {}),
        ("assert longest([Pair(1, 2)]) == 1", ["Pair", "longest"], {}),
        ("assert Solution().f(1) == 2", ["Solution"], {}),
        ({"asserts": "assert decode(encode('a')) == 'a'", "fn_name": ["encode", "decode"]}, ["decode", "encode"], {}),
        ({"asserts": "assert f(gcd(2, 4)) == 2", "fn_name": ["f", "gcd"]}, ["f", "gcd"], {}),
        ({"asserts": "def check(c):\n    assert c(1) == 2\ncheck(f)", "fn_name": "f"}, ["f"], {}),
    ],
)
def test_names_belong_to_the_program_or_the_library(tests, names, library):
    found = read_tests(tests)
    assert (found.names, found.library) == (names, library)


def test_pieces_that_can_not_fail_are_no_tests_of_their_own():
    assert read_tests(["import math", "assert f(1) == math.pi", "x = 2", "assert f(x) == 2", "y = 1"]).cases == [
        "import math\nassert f(1) == math.pi\n",
        "x = 2\nassert f(x) == 2\ny = 1\n",
    ]
    whole = "def check(candidate):\n    assert candidate(1) == 2\n\ncheck(f)\n"
    assert read_tests(whole).cases == [whole]


def test_bad_ground_truths_of_a_dataset_are_listed_before_the_run():
    truths: list[Any] = ["assert f(1) == 2", "x = 1", "42", {"inputs": ["1"], "outputs": [None]}]
    sources = ["apps", "apps", "openai/gsm8k", "taco"]
    labels = [{"style": "rule", "ground_truth": True}] * 4
    manager = RewardManager(SimpleNamespace(), 0)
    with pytest.raises(DataError) as raised:
        manager.check_truths(sources, labels, truths.__getitem__)
    text = str(raised.value)
    assert "2 of 4 rows" in text
    assert "row 1 (data_source='apps'): The ground truth of code has no assertion that can fail" in text
    assert "row 3 (data_source='taco')" in text
    RewardManager(SimpleNamespace(), 0, lambda **kwargs: 0.0).check_truths(sources, labels, truths.__getitem__)
