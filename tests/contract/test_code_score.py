"""The scorer of code: what counts as the program, how tests are judged, and what does not fool it."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import ConfigError, DataError
from paceline.protocol import DataProto
from paceline.rewards import RewardManager, known_sources
from paceline.rewards.sandbox import LocalSandbox, Program, RunResult, SandboxLimits
from paceline.rewards.score import code
from tests.unit.rewards.code_cheats import SEARCH, SECRET, USUAL

needs_sandbox = pytest.mark.usefixtures("isolation")
LIMITS = SandboxLimits(cpu_seconds=1, wall_seconds=3.0, memory_bytes=192 << 20)


@pytest.fixture(scope="module")
def sandbox() -> LocalSandbox:
    return LocalSandbox(LIMITS)


def block(source: str) -> str:
    return f"Here it is:\n```python\n{textwrap.dedent(source)}\n```\nThat is all."


def score(source: str, ground_truth: Any, **kwargs: Any) -> dict[str, Any]:
    return code.compute_score(block(source), ground_truth, **kwargs)


# -- the program ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\na = 1\n```", "a = 1\n"),
        ("```python\na = 1\n```\nor\n```py\nb = 2\n```", "b = 2\n"),
        ("```Python3\na = 1\n```\nprints\n```\n1\n```", "a = 1\n"),
        ("```python\na = 1\n```\n```bash\nls\n```", "a = 1\n"),
        ("```\na = 1\n```", "a = 1\n"),
        ("~~~python\na = '```'\n~~~", "a = '```'\n"),
        ("````python\na = '''\n```\n'''\n````", "a = '''\n```\n'''\n"),
        ("1. So:\n   ```python\n   a = 1\n   ```", "   a = 1\n"),
        ("cut off:\n```python\na = 1\nb =", "a = 1\nb ="),
        ("```python\na = 1\n```\n```python\n\n```", "a = 1\n"),
        ("def f(x):\n    return x\n", "def f(x):\n    return x\n"),
        ("print(int(input()) + 1)", "print(int(input()) + 1)"),
        ("```bash\nls\n```", None),
        ("I do not know.", None),
        ("Sorry", None),
        ("42", None),
        ("", None),
        ("\0", None),
        ("-" * 100_000 + "1", None),
        ("not " * 4_000 + "1", None),
    ],
)
def test_the_last_python_block_is_the_program(text, program):
    assert code.extract_program(text) == program


def test_extraction_is_linear_in_the_text():
    assert code.extract_program("".join(f"{'`' * length} x\n" for length in range(3, 2_000))) is None


# -- tests ------------------------------------------------------------------------------------------------------------

ADD = "a, b = map(int, input().split())\nprint(a + b)"
ADD_TESTS = {"inputs": ["1 2\n", "3 4", "-5 5\n", "10 20\n"], "outputs": ["3\n", "7", "0\n\n", "30  \n"]}


@needs_sandbox
@pytest.mark.parametrize(
    ("source", "passed"),
    [
        (ADD, 1.0),
        ("a, b = map(int, input().split())\nprint(a + b, end='   \\n\\n')", 1.0),
        ("a, b = map(int, input().split())\nprint(abs(a) + b)", 0.75),
        ("a, b = map(int, input().split())\nassert a > 0\nprint(a + b)", 0.75),
        ("a, b = map(int, input().split())\nprint(a + b)\nraise SystemExit(1)", 0.0),
        ("import threading\nthreading.Thread(target=lambda: print(sum(map(int, input().split())))).start()", 1.0),
        (
            "import sys\nif __name__ == '__main__':\n    print(sum(map(int, sys.stdin.buffer.read().split())))\nexit()",
            1.0,
        ),
        ("import os\nos.write(1, str(sum(map(int, open(0).read().split()))).encode())", 1.0),
        ("def (", 0.0),
        ("pass", 0.0),
    ],
)
def test_printed_answers_are_compared_line_by_line(sandbox, source, passed):
    assert score(source, ADD_TESTS, sandbox=sandbox)["score"] == passed


@needs_sandbox
@pytest.mark.parametrize("limit", [-9, 0])
def test_by_the_mode_all_a_program_passes_all_tests_or_none(sandbox, limit):
    source = f"a, b = map(int, input().split())\nassert a > {limit}\nprint(a + b)"
    whole = score(source, ADD_TESTS, sandbox=sandbox, mode="all")
    assert whole["score"] == whole["acc"] == float(limit == -9)


@needs_sandbox
@pytest.mark.parametrize(
    ("tests", "passed"),
    [
        ({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1, 2], [2, 4]]}, 1.0),
        ({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1, 2], [2, 5]]}, 0.5),
        ({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[[1, 2]], [[2, 4]]]}, 1.0),
        ({"fn_name": "g", "inputs": [[{"k": [1]}]], "outputs": [{"k": [1], "n": 0.3}]}, 1.0),
        ({"fn_name": "g", "inputs": [[{"k": [1]}]], "outputs": [{"k": [1]}]}, 0.0),
        ({"fn_name": "big", "inputs": [[100]], "outputs": [10**100]}, 1.0),
        ({"fn_name": "big", "inputs": [[100], [2]], "outputs": [10**100 + 1, 100]}, 0.5),
        ({"fn_name": "nothing", "inputs": [[]], "outputs": [None]}, 1.0),
        ({"fn_name": "objects", "inputs": [[]], "outputs": [[]]}, 0.0),
        ({"fn_name": "absent", "inputs": [[]], "outputs": [None]}, 0.0),
        ({"fn_name": "constant", "inputs": [[]], "outputs": [7]}, 0.0),
    ],
)
def test_functions_are_called_and_results_compared(sandbox, tests, passed):
    source = """
        constant = 7
        def f(x):
            return (x, 2 * x)
        def g(d):
            return {**d, "n": 0.1 + 0.2}
        def big(x):
            return 10 ** x
        def nothing():
            pass
        def objects():
            return object()
    """
    assert score(source, tests, sandbox=sandbox)["score"] == passed


@needs_sandbox
def test_methods_of_solution_are_found_with_the_names_of_typing(sandbox):
    source = """
        class Solution:
            def twoSum(self, nums: List[int], target: int) -> Optional[List[int]]:
                seen = {}
                for i, n in enumerate(nums):
                    if target - n in seen:
                        return [seen[target - n], i]
                    seen[n] = i
    """
    tests = {"fn_name": "twoSum", "inputs": [[[2, 7, 11], 9], [[3, 3], 6]], "outputs": [[0, 1], [0, 1]]}
    assert score(source, tests, sandbox=sandbox)["score"] == 1.0


@needs_sandbox
@pytest.mark.parametrize(
    ("source", "asserts", "passed"),
    [
        ("def f(x): return x + 1", ["assert f(1) == 2", "assert f(2) == 4", "assert f(-1) == 0"], 2 / 3),
        ("def f(x): return x + 1", "assert f(1) == 2\nassert f(2) == 3, 'three'\n", 1.0),
        (
            "def f(x): return x / 3",
            "import math\nassert math.isclose(f(1), 1 / 3)\nassert abs(f(2) - 0.667) < 1e-2",
            1.0,
        ),
        ("import math\ndef f(x): return x", "assert f(math.pi) == math.pi", 1.0),
        ("def f(x): x.sort()", "a = [3, 1, 2]\nf(a)\nassert a == [1, 2, 3]", 1.0),
        ("def f(d): d['k'] = {1, 2}", "a = {}\nf(a)\nassert a == {'k': {1, 2}}", 1.0),
        ("def f(n):\n    for i in range(n): yield i * i", "assert list(f(3)) == [0, 1, 4]", 1.0),
        (
            "def f(x):\n    if x < 0: raise ValueError(x)",
            "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass",
            1.0,
        ),
        ("def f(x): pass", "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass", 0.0),
        # What fails, fails also where the test catches it and does nothing; not where it then asserts something else.
        ("def f(x): return 3", "try:\n    assert f(1) == 2\nexcept AssertionError: pass", 0.0),
        ("def f(x): return 2", "try:\n    assert f(1) == 2\nexcept AssertionError: pass", 1.0),
        ("def f(x): pass", "try:\n    f(-1)\n    assert False\nexcept:\n    print('fine')", 0.0),
        ("def f(x): raise ValueError", "try:\n    f(-1)\n    assert False\nexcept:\n    print('fine')", 1.0),
        ("def f(x): return 3", "try:\n    assert f(1) == 2\nexcept AssertionError:\n    assert f(1) == 3", 1.0),
        ("def f(x): pass", ["y = f(1)\nassert f(2) is None", "assert y is None"], 1.0),
        ("def f(*a, k=0): return a, k", "assert f(1, 'é', k={'b': (1,)}) == ((1, 'é'), {'b': (1,)})", 1.0),
        ("def f(): return {(1, 2): b'x', 3: 1j, None: {1}}", "assert f() == {(1, 2): b'x', 3: 1j, None: {1}}", 1.0),
        # HumanEval's form, and MBPP's with a loop.
        (
            "def f(x): return x",
            "def check(candidate):\n    assert candidate(1) == 1\n    assert candidate(2) == 2\ncheck(f)",
            1.0,
        ),
        (
            "def f(x): return 1",
            "def check(candidate):\n    assert candidate(1) == 1\n    assert candidate(2) == 2\ncheck(f)",
            0.0,
        ),
        ("def f(x): return x", "for i in range(5):\n    assert f(i) == i", 1.0),
        # Objects of the program's own.
        (
            "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
            "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)",
            "s = Stack()\ns.push(1)\ns.push(2)\nassert s.pop() == 2\nassert len(s) == 1\n"
            "assert s.items == [1]\ntry:\n    s.pop(); s.pop()\n    assert False\nexcept IndexError: pass",
            1.0,
        ),
        (
            "class P:\n    def __init__(self, x): self.x = x\n    def __str__(self): return f'P({self.x})'\n"
            "def twice(p): return P(2 * p.x)",
            "assert twice(P(2)).x == 4\nassert str(twice(P(3))) == 'P(6)'",
            1.0,
        ),
    ],
)
def test_assertions_run_one_by_one(sandbox, source, asserts, passed):
    assert score(source, asserts, sandbox=sandbox)["score"] == pytest.approx(passed)


@needs_sandbox
@pytest.mark.parametrize(
    "ground_truth",
    [
        {
            "inputs": np.array(["1 2", "3 4"], dtype=object),
            "outputs": np.array(["3", "7"], dtype=object),
            "asserts": None,
        },
        {"input": ["1 2", "3 4"], "output": ["3", "7"]},
        [{"input": "1 2", "output": "3"}, {"input": "3 4", "output": "7"}],
        {"inputs": [["1 2"], ["3 4"]], "outputs": [["3"], ["7"]], "fn_name": None},
        json.dumps({"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}),
    ],
)
def test_the_forms_in_which_datasets_keep_tests(sandbox, ground_truth):
    assert score(ADD, ground_truth, sandbox=sandbox)["score"] == 1.0


@needs_sandbox
@pytest.mark.parametrize(
    "ground_truth",
    [
        {"asserts": ["assert f(1) == 2", "assert f(2) == 4"]},
        {"asserts": "assert f(1) == 2\nassert f(2) == 4"},
        json.dumps({"fn_name": "f", "inputs": [[1], [2]], "outputs": [2, 4]}),
    ],
)
def test_the_forms_in_which_datasets_keep_tests_of_functions(sandbox, ground_truth):
    assert score("def f(x): return x + 1", ground_truth, sandbox=sandbox)["score"] == 0.5


@needs_sandbox
@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("assert f(lambda x: x) == 1", "passes a function to the program"),
        ("assert f(f) == 1", "passes the program's f to the program"),
        ("assert f.cache == {}", "use 'f', which they neither define nor import"),
        ("assert Point.zero().x == 0", "takes .zero of the program's Point"),
        ("assert Point(1) == Point(1)", "compares an object of the program's class Point"),
        ("p = Point(1)\np.move()\nassert p", "compares an object of the program's class Point"),
        ("assert isinstance(f(1), Point)", "takes .__bases__ of the program's Point|uses the program's Point"),
        ("import numpy as np\nassert np.allclose(f(1), [1])", "fails before it calls the program: ModuleNotFound"),
        (["assert f(1) == 1", "import math\nassert math.pi > 3"], "test 2.*asks nothing of the program"),
        ("for x in []:\n    assert f(x) == 1", "asks nothing of the program"),
        ("assert all(f(x) == 1 for x in [])", "asks nothing of the program"),
        ("import os\nos._exit(0)\nassert f(1) == 2", "ends the process that judges"),
        ("x = 1\nassert x == 1\nassert f(1) == 1", "test 1.*asks nothing of the program"),
    ],
)
def test_a_test_that_can_not_be_judged_is_an_error_not_a_zero(sandbox, test, message):
    with pytest.raises(DataError, match=message):
        score("class Point: pass\ndef f(k): return 1", test, sandbox=sandbox)


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("x = 2", 1.0),
        ("x = 3", 0.0),
        ("def x(): return 2", 0.0),
        ("class Equal:\n    def __eq__(self, other): return True\nx = Equal()", 0.0),
        ("class Int(int):\n    def __eq__(self, other): return True\nx = Int(3)", 0.0),
    ],
)
def test_a_variable_of_the_program_is_judged_by_the_plain_data_that_it_holds(sandbox, program, expected):
    assert score(program, "assert x == 2", sandbox=sandbox)["score"] == expected
    assert score(f"{program}\ny = [x]", "assert 2 in y and len(y) == 1", sandbox=sandbox)["score"] == expected


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="mode='most'"):
        code.compute_scores([], [], [], mode="most")


# -- what programs can find and change ---------------------------------------------------------------------------------


@needs_sandbox
def test_the_search_for_the_answer_would_find_one(sandbox):
    given = {"fn_name": "f", "inputs": [[{"hidden": ["x" + SECRET]}]], "outputs": [SECRET]}
    assert score(SEARCH, given, sandbox=sandbox)["score"] == 1.0
    assert score(SEARCH, {"inputs": [SECRET], "outputs": [SECRET]}, sandbox=sandbox)["score"] == 1.0
    # And it comes to its end where there is none.
    nothing = {"fn_name": "f", "inputs": [[1]], "outputs": ["nothing"]}
    assert score(SEARCH, nothing, sandbox=sandbox)["score"] == 1.0
    assert score(SEARCH, {"inputs": ["1"], "outputs": ["nothing"]}, sandbox=sandbox)["score"] == 1.0


@needs_sandbox
def test_names_of_the_tests_are_not_the_programs_to_change(sandbox):
    source = "expected = [1, 2]\nmath = None\nlen = lambda x: 2\ndef f(): return [1, 2]"
    tests = "import math\nexpected = [3]\nassert f() == expected\nassert f()[0] < math.pi\nassert len(f()[:1]) == 1"
    assert score(source, tests, sandbox=sandbox)["score"] == pytest.approx(2 / 3)


@needs_sandbox
def test_earlier_passes_count_when_a_later_test_ends_the_program(sandbox):
    source = "import os\ndef f(x):\n    if x == 2: os._exit(0)\n    if x == 4: os.kill(-1, 9)\n    return x"
    tests = {"fn_name": "f", "inputs": [[1], [2], [3], [4], [5]], "outputs": [1, 2, 3, 4, 5]}
    assert score(source, tests, sandbox=sandbox)["tests_passed"] == pytest.approx(2 / 5)


@needs_sandbox
def test_the_program_is_not_given_what_is_expected():
    """Held for the text of everything that enters the sandbox, but assertions."""
    seen: list[Program] = []

    class Recorder:
        def run_many(self, programs: list[Program]) -> list[RunResult]:
            seen.extend(programs)
            return [RunResult("timeout")] * len(programs)

    code.compute_scores(
        [block("pass")] * 2, USUAL[1:], [None] * 2, sandbox=Recorder()  # type: ignore[arg-type]
    )  # fmt: skip
    assert len(seen) == 2
    assert not any(SECRET in program.code + program.stdin for program in seen)


@needs_sandbox
def test_answers_that_stop_the_judge_leave_those_judged_with_them(sandbox):
    """Four programs with one ground truth are judged in one run, unless it does not come to its end."""
    tests = ["def slow(n):\n    while n: pass\n    return True\nassert slow(f(1) - 1)", "assert f(2) == 2"]
    sources = ["def f(x): return x", "def f(x): return 7", "def f(x): return x", "def f(x): return 1"]
    results = code.compute_scores([block(source) for source in sources], [tests] * 4, [None] * 4, sandbox=sandbox)
    assert [result["score"] for result in results] == [1.0, 0.0, 1.0, 0.5]
    assert [result["timeout"] for result in results] == [False, True, False, False]


# -- what goes wrong --------------------------------------------------------------------------------------------------


@needs_sandbox
@pytest.mark.parametrize(
    "source",
    ["def f(x):\n    while x: pass\n    return x", "import time\ndef f(x):\n    time.sleep(600 * x)\n    return x"],
    ids=["loop", "sleep"],
)
def test_time_that_runs_out_is_reported_and_earlier_passes_count(sandbox, source):
    tests = {"fn_name": "f", "inputs": [[0], [1]], "outputs": [0, 1]}
    result = score(source, tests, sandbox=sandbox)
    assert (result["score"], result["acc"], result["timeout"]) == (0.5, 0.0, True)


@needs_sandbox
def test_an_endless_loop_on_one_input_does_not_cost_the_others():
    sandbox = LocalSandbox(replace(LIMITS, wall_seconds=20))  # it is its CPU time that ends the loop
    result = score("x = int(input())\nwhile x == 1: pass\nprint(x)",
                   {"inputs": ["0", "1", "2"], "outputs": ["0", "1", "2"]}, sandbox=sandbox)  # fmt: skip
    assert (result["tests_passed"], result["timeout"]) == (pytest.approx(2 / 3), True)


@needs_sandbox
def test_large_answers_are_compared_and_endless_ones_cut(sandbox):
    tests = {"inputs": [str(1 << 20)] * 3, "outputs": ["é" * (1 << 20)] * 3}
    assert score("print('é' * int(input()))", tests, sandbox=sandbox)["score"] == 1.0
    assert score("while True: print('é' * 1000)", tests, sandbox=sandbox)["score"] == 0.0


def test_a_failing_sandbox_is_an_error_not_a_zero():
    class Failing:
        def __init__(self, result: RunResult) -> None:
            self.result = result

        def run_many(self, programs: list[Program]) -> list[RunResult]:
            return [self.result] * len(programs)

    for result, message in (
        (RunResult("sandbox_error", message="out of reach"), "out of reach"),
        (RunResult("ok", stdout="something else"), "no answer"),
        (RunResult("error", stderr="Traceback: a fault of ours", exit_code=1), "a fault of ours"),
    ):
        with pytest.raises(RuntimeError, match=message):
            score(ADD, ADD_TESTS, sandbox=Failing(result))


def test_no_program_is_counted_as_such_and_nothing_is_run():
    [result] = code.compute_scores(["I give up."], [ADD_TESTS], [None], sandbox=SimpleNamespace())  # type: ignore
    assert result == {"score": 0.0, "acc": 0.0, "extracted": False, "timeout": False, "tests_passed": 0.0}


@needs_sandbox
def test_many_responses_are_scored_together_each_with_its_own_result(sandbox):
    sources = [ADD, "while True: pass", "print(0)", "import os\nos.kill(-1, 9)"] * 3
    solutions = [*map(block, sources), "no program", block(ADD)]
    truths = [*[ADD_TESTS] * len(sources), ADD_TESTS, {"inputs": []}]
    results = code.compute_scores(solutions, truths, [None] * len(solutions), sandbox=sandbox)
    assert [result["score"] for result in results[:-2]] == [1.0, 0.0, 0.25, 0.0] * 3
    assert results[-2]["extracted"] is False
    assert isinstance(results[-1], DataError)


# -- with the manager -------------------------------------------------------------------------------------------------


@needs_sandbox
def test_the_reward_manager_scores_code_beside_other_sources():
    solutions = [block(ADD), "#### 42", block("print(1)"), "nothing"]
    tokens = [[ord(letter) for letter in solution] for solution in solutions]
    length = max(map(len, tokens))
    responses = torch.tensor([row + [0] * (length - len(row)) for row in tokens])
    prompts = torch.ones(len(solutions), 2, dtype=torch.long)
    truths = [ADD_TESTS, "42", ADD_TESTS, ADD_TESTS]
    data = DataProto.from_dict(
        {
            "prompts": prompts,
            "responses": responses,
            "attention_mask": torch.cat([torch.ones_like(prompts), (responses > 0).long()], dim=1),
        },
        {
            "data_source": np.array(["apps", "openai/gsm8k", "taco", "codecontests"], dtype=object),
            "reward_model": np.array([{"ground_truth": truth} for truth in truths], dtype=object),
        },
    )
    tokenizer = SimpleNamespace(
        batch_decode=lambda rows, **_: ["".join(map(chr, row)) for row in rows],
        decode=lambda row, **_: "".join(map(chr, row)),
    )
    result = RewardManager(tokenizer, num_examine=1)(data, return_dict=True)
    assert result["reward_extra_info"]["score"].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert result["reward_extra_info"]["extracted"].tolist() == [True, True, True, False]
    assert result["metrics"]["reward/grader_errors"] == 0
    assert result["metrics"]["reward/apps/acc"] == 1.0


def test_code_sources_are_known():
    assert {"codecontests", "apps", "codeforces", "taco", "paceline/code"} <= set(known_sources())


def test_the_sandbox_is_chosen_by_the_environment(monkeypatch):
    monkeypatch.setenv(code.SANDBOX_URL, "http://sandbox:8080")
    code.set_sandbox(None)
    try:
        assert code.shared_sandbox().url == "http://sandbox:8080/run_code"  # type: ignore[attr-defined]
        monkeypatch.delenv(code.SANDBOX_URL)
        code.set_sandbox(None)
        assert isinstance(code.shared_sandbox(), LocalSandbox)
        assert code.shared_sandbox() is code.shared_sandbox()
    finally:
        code.set_sandbox(None)
