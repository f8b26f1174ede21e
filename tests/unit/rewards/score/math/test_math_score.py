"""The MATH scorer: normalisation, mathematical equality, deadlines, processes that end."""

from __future__ import annotations

import os
import threading
import time

import psutil
import pytest

from paceline.rewards.score import math
from paceline.rewards.score.math import MathGrader, shared_grader

CORES = len(os.sched_getaffinity(0))
HOPELESS = [rf"9^{{9^{{9^{{{number}}}}}}}" for number in range(2, 2 + min(5 * CORES, 40))]


def boxed(answer: str) -> str:
    return rf"Therefore the answer is $\boxed{{{answer}}}$."


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
    deadline = 2.0
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
