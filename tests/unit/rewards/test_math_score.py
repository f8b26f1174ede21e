"""The MATH scorer: normalisation, mathematical equality, deadlines, processes that end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from paceline.rewards.score import math
from paceline.rewards.score.math_compare import compare, settle
from paceline.rewards.score.math_grader import MathGrader, shared_grader
from paceline.text import last_boxed

CORES = len(os.sched_getaffinity(0))
HOPELESS = [rf"9^{{9^{{9^{{{number}}}}}}}" for number in range(2, 2 + min(5 * CORES, 40))]


def boxed(answer: str) -> str:
    return rf"Therefore the answer is $\boxed{{{answer}}}$."


@pytest.fixture(scope="module", autouse=True)
def _end_processes():
    yield
    shared_grader().close()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{ x : x > 1 \right.}", r"\left\{ x : x > 1 \right."),
        (r"\fbox{3}", "3"),
        (r"$\boxed 5$ apples", "5"),
        (r"\boxed {6}", "6"),
        (r"\boxed{}", ""),
        (r"\boxed{\frac{1}{2}", None),
        ("5", None),
        ("", None),
    ],
)
def test_the_last_box_is_found(text, answer):
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{1}{2}", r"\dfrac12"),
        (r"\frac{1}{2}", "1/2"),
        (r"\frac{1}{2}", "0.5"),
        (r"\frac{3}{4}", r"\tfrac{3}4"),
        (r"\sqrt{3}", r"\sqrt3"),
        ("10000", "10,000"),
        ("10000", "10{,}000"),
        ("10000", r"10\,000"),
        ("42", "42.0"),
        ("42", "42."),
        ("42", r"\$42"),
        ("0.5", ".5"),
        ("5", "x = 5"),
        ("90", r"90^\circ"),
        ("12", r"12\text{ cm}^2"),
        ("12", r"12 \mathrm{cm}"),
        ("12", "12 dollars"),
        (r"10\%", "10"),
        (r"\text{(A)}", "A"),
        ("A", r"\text{(A)}"),
        (r"\text{A, B}", "A,B"),
        (r"\text{Even}", "even"),
        (r"(1, 2)", r"\left(1,2\right)"),
    ],
)
def test_classic_normalisation_settles_it_without_any_process(gold, answer):
    assert settle(compare(gold, answer), {}) is True


@pytest.mark.parametrize(
    ("gold", "answer"), [("42", "43"), (r"\frac{1}{2}", "2"), ("10000", "1000"), ("0.5", "-0.5"), ("1", "1.0001")]
)
def test_plain_numbers_that_differ_are_wrong_without_any_process(gold, answer):
    assert settle(compare(gold, answer), {}) is False


EQUAL = [
    ("1+x", "x+1"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"5\sqrt{2}", r"\sqrt{50}"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
    (r"\frac{1}{3}", "0.333333"),
    (r"1\frac{1}{2}", r"\frac{3}{2}"),
    (r"0.1\overline{6}", r"\frac{1}{6}"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("1,2", "2, 1"),
    (r"\pm 2", "2,-2"),
    (r"(-\infty,3]", r"\left(-\infty, 3\right]"),
    (r"x \le 3", r"(-\infty,3]"),
    (r"x \in [1,2]", "[1,2]"),
    (r"10\%", "0.1"),
    ("0.5", r"50\%"),
    ("12\\pi", r"12\pi\text{ square inches}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1 & 2\\3 & \frac{8}{2}\end{bmatrix}"),
    (r"\text{east}", "east"),
    ("2516_8", "2516_{8}"),
    ("y=2x+1", "2x+1"),
]
DIFFERENT = [
    ("1+x", "x-1"),
    ("x", "y"),
    ("[0,1)", "(0,1]"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "2,1"),
    ("2", "1,2"),
    (r"\{1,2\}", r"\{1,3\}"),
    ("10", r"0.1\%"),
    (r"0.\overline{3}", r"0.\overline{4}"),
    (r"0.\overline{3}", "0"),
    ("2516_8", "2516_7"),
    (r"\text{(A)}", "B"),
    (r"\text{Tuesday}", r"\text{Monday}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    ("5", "the answer is 5 or 6"),
    ("5", r"\frac{"),
    ("5", ""),
]


def test_mathematical_equality_is_found_and_difference_too():
    pairs = [(pair, 1.0) for pair in EQUAL] + [(pair, 0.0) for pair in DIFFERENT]
    golds, answers = zip(*(pair for pair, _ in pairs), strict=True)
    results = math.compute_scores([boxed(answer) for answer in answers], golds, [None] * len(pairs))
    mistakes = [
        (pair, result) for (pair, expected), result in zip(pairs, results, strict=True)
        if isinstance(result, Exception) or result["score"] != expected or result["timeout"]
    ]  # fmt: skip
    assert mistakes == []


def test_a_response_without_a_box_is_a_failed_extraction_not_a_wrong_answer():
    results = math.compute_scores(["x+1", r"\boxed{\frac{1}", boxed("7"), boxed("")], ["7"] * 4, [None] * 4)
    assert [result["extracted"] for result in results] == [False, False, True, False]
    assert [result["score"] for result in results] == [0.0, 0.0, 1.0, 0.0]


def test_one_answer_in_several_spellings_is_one_extracted_answer():
    # Settled as strings, as numbers, by mathematics, and not to be settled.
    answers = [boxed(r"\dfrac12"), boxed(r"\frac{1}{2}"), boxed("7"), boxed("x + 1"), boxed(""), "1/2"]
    golds = [r"\frac12", r"\frac12", "8", "1+x", "7", "7"]
    results = math.compute_scores(answers, golds, [None] * 6)
    assert [result["pred"] for result in results] == [r"\frac{1}{2}", r"\frac{1}{2}", "7", "x+1", "", ""]
    assert [result["score"] for result in results] == [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]


def test_the_ground_truth_may_be_a_whole_solution():
    assert math.compute_score(boxed("7"), r"We see that \boxed{7}.") == 1.0


def test_five_hopeless_pairs_per_core_cost_the_deadline_about_once_and_harm_no_other():
    shared_grader().grade([("1+x", "x+1")], deadline_seconds=20)  # the start is not part of what is measured
    fine = [(f"{number}+x", f"x+{number}") for number in range(20)]
    answers = [*HOPELESS, *(answer for _, answer in fine)]
    golds = ["3+x"] * len(HOPELESS) + [gold for gold, _ in fine]
    deadline = 4.0
    start = time.monotonic()
    results = math.compute_scores([boxed(answer) for answer in answers], golds, [None] * len(golds), deadline)
    elapsed = time.monotonic() - start
    assert [result["timeout"] for result in results] == [True] * len(HOPELESS) + [False] * 20
    assert [result["score"] for result in results] == [0.0] * len(HOPELESS) + [1.0] * 20
    assert elapsed < len(HOPELESS) / CORES * deadline  # what it would be in turn
    workers = psutil.Process(shared_grader()._process.pid).children()
    assert len(workers) <= CORES


def test_a_timeout_of_a_single_score_is_an_error_not_a_zero(monkeypatch):
    monkeypatch.setattr(shared_grader(), "grade", lambda pairs, deadline_seconds: [None] * len(pairs))
    with pytest.raises(TimeoutError, match="longer than"):
        math.compute_score(boxed("x+1"), "y")


def test_a_failure_of_the_grader_is_an_error_not_a_zero(monkeypatch):
    monkeypatch.setattr(shared_grader(), "grade", lambda pairs, deadline_seconds: ["RecursionError: deep"] * len(pairs))
    with pytest.raises(ArithmeticError, match="RecursionError: deep"):
        math.compute_score(boxed("x+1"), "y")


def test_a_killed_worker_is_an_error_of_its_pair_only_and_a_killed_server_is_replaced():
    grader = MathGrader()
    try:
        assert grader.grade([("1+x", "x+1")], 20) == [True]
        server = psutil.Process(grader._process.pid)

        def kill_the_busy_worker() -> None:
            while True:
                busy = [worker for worker in server.children() if worker.cpu_times().user > 0.3]
                if busy:
                    busy[0].kill()
                    return
                time.sleep(0.05)

        killer = threading.Thread(target=kill_the_busy_worker)
        killer.start()
        verdicts = grader.grade([("1", HOPELESS[0]), ("2+x", "x+2")], 30)
        killer.join()
        assert verdicts == ["the grading process ended with exit code -9", True]
        server.kill()
        server.wait(10)
        assert grader.grade([("1+x", "x+1")], 20) == [True]
    finally:
        grader.close()


def test_equal_pairs_are_graded_once(monkeypatch):
    grader = MathGrader()
    asked = []
    monkeypatch.setattr(grader, "_ask", lambda pairs, deadline_seconds: asked.append(pairs) or [True] * len(pairs))
    assert grader.grade([("a", "b"), ("c", "d"), ("a", "b")], 1) == [True, True, True]
    assert asked == [[("a", "b"), ("c", "d")]]


# A script without a __main__ guard, as users write them.
SCRIPT = r"""
import sys, time
from paceline.rewards.score import math
from paceline.rewards.score.math_grader import shared_grader
print(math.compute_score(r"\boxed{x+1}", "1+x"), shared_grader()._process.pid, flush=True)
if sys.argv[1] == "hang":
    math.compute_score(r"\boxed{9^{9^{9^9}}}", "1+x")
"""


@pytest.mark.parametrize("end", ["exits", "hang"])
def test_no_process_is_left_behind_even_after_a_kill_in_the_middle(end):
    script = subprocess.Popen([sys.executable, "-c", SCRIPT, end], stdout=subprocess.PIPE, text=True)
    score, pid = script.stdout.readline().split()
    assert score == "1.0"
    server = psutil.Process(int(pid)) if psutil.pid_exists(int(pid)) else None
    workers = server.children() if server and end == "hang" else []
    if end == "hang":
        assert workers
        time.sleep(0.5)
        workers = server.children()
        script.send_signal(signal.SIGKILL)
    script.wait(30)
    script.stdout.close()
    _, alive = psutil.wait_procs([*workers, *([server] if server else [])], timeout=20)
    assert alive == []
