"""What happens when grading fails: stop, try again, or score 0 and count."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import DataError, RewardError
from paceline.rewards import RewardManager, Scorer, grading
from tests.unit.rewards.reward_batches import TOKENIZER, make_batch


class Flaky:
    """Fails for each response as often as its text says, then gives 1. Counts its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
        self.calls.append(solution_str)
        if self.calls.count(solution_str) <= int(solution_str):
            raise ConnectionError("service is down")
        return 1.0


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were asked for; nobody waits."""
    asked: list[float] = []
    monkeypatch.setattr(grading.time, "sleep", asked.append)
    return asked


def test_raise_stops_at_the_first_failure_and_names_it():
    manager = RewardManager(TOKENIZER, 0, compute_score=Flaky(), on_error="raise")
    message = r"1 of 2 responses; the first, of source 'my/data' with ground truth 'gold': ConnectionError.*is down"
    with pytest.raises(RewardError, match=message) as error:
        manager(make_batch(["0", "9"], ["gold"] * 2, "my/data"))
    assert isinstance(error.value.__cause__, ConnectionError)
    assert RewardManager(TOKENIZER, 0, compute_score=Flaky(), on_error="raise")(make_batch(["0"], [""])).sum() == 1


def test_raise_does_not_go_on_to_the_next_source():
    called = []
    scorers = {
        "first": Scorer(lambda solution_str, ground_truth, extra_info: 1 / 0),
        "second": Scorer(lambda solution_str, ground_truth, extra_info: called.append(solution_str)),
    }
    manager = RewardManager(TOKENIZER, 0, on_error="raise", scorers=scorers)
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        manager(make_batch(["a", "b"], ["", ""], ["first", "second"]))
    assert called == []


def test_retry_grades_failed_rows_again_with_growing_pauses(pauses: list[float]):
    function = Flaky()
    manager = RewardManager(TOKENIZER, 0, compute_score=function, on_error="retry", max_retries=3)
    result = manager(make_batch(["0", "1", "3"], [""] * 3), return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [1.0, 1.0, 1.0]
    assert function.calls == ["0", "1", "3", "1", "3", "3", "3"]
    assert result["reward_extra_info"]["retries"].tolist() == [0, 1, 3]
    assert result["metrics"]["reward/retries"] == 4
    assert result["metrics"]["reward/grader_errors"] == 0
    assert pauses == [0.5, 1.0, 2.0]


def test_what_still_fails_after_the_retries_scores_0_and_is_counted(pauses: list[float]):
    manager = RewardManager(TOKENIZER, 0, compute_score=Flaky(), on_error="retry", max_retries=2)
    result = manager(make_batch(["9", "8"], [""] * 2), return_dict=True)
    assert result["reward_tensor"].sum() == 0
    assert result["metrics"]["reward/grader_errors"] == 2
    assert result["metrics"]["reward/retries"] == 4
    assert len(pauses) == 2


def test_a_batch_function_is_given_the_whole_batch_again(pauses: list[float]):
    seen = []

    def ranks(data_sources, solution_strs, ground_truths, extra_infos):
        seen.append(list(solution_strs))
        if len(seen) == 1:
            raise ConnectionError("service is down")
        scores = [sorted(solution_strs).index(text) / 2 for text in solution_strs]
        return [scores[0], float("nan"), scores[2]] if len(seen) == 2 else scores

    manager = RewardManager(TOKENIZER, 0, compute_score=ranks, on_error="retry")
    rewards = manager(make_batch(["c", "a", "b"], [""] * 3))
    # Graded alone, the second response would be the best of one.
    assert rewards.sum(-1).tolist() == [1.0, 0.0, 0.5]
    assert seen == [["c", "a", "b"]] * 3


def test_rules_are_retried_too_but_not_data_that_can_not_be_graded(pauses: list[float]):
    calls = []

    def many(solutions, ground_truths, extra_infos):
        calls.append(list(solutions))
        if len(calls) == 1:
            return [1.0, RuntimeError("sandbox is busy"), DataError("no tests in the ground truth")]
        return [1.0] * len(solutions)

    manager = RewardManager(TOKENIZER, 0, on_error="retry", scorers={"mine": Scorer(many, many)})
    info = manager(make_batch(["a", "b", "c"], [""] * 3, "mine"), return_dict=True)["reward_extra_info"]
    assert calls == [["a", "b", "c"], ["b"]]
    assert info["score"].tolist() == [1.0, 1.0, 0.0]
    assert info["grader_error"].tolist() == [False, False, True]
    assert pauses == [0.5]


def test_zero_and_count_is_never_fatal():
    manager = RewardManager(TOKENIZER, 0, compute_score=Flaky(), on_error="zero_and_count")
    result = manager(make_batch(["9", "8"], [""] * 2), return_dict=True)
    assert result["metrics"]["reward/grader_errors"] == 2
    assert result["reward_tensor"].sum() == 0
    assert "reward/retries" not in result["metrics"]


def test_by_default_a_batch_that_fails_as_a_whole_is_fatal():
    manager = RewardManager(TOKENIZER, 0, compute_score=Flaky())
    assert manager(make_batch(["9", "0"], [""] * 2)).sum() == 1
    with pytest.raises(RewardError, match="Grading failed for all 2 responses"):
        RewardManager(TOKENIZER, 0, compute_score=Flaky())(make_batch(["9", "8"], [""] * 2))


def test_a_service_that_does_not_answer_in_time_is_a_failure_and_a_slow_comparison_is_not(pauses: list[float]):
    def too_slow(**kwargs):
        raise TimeoutError("no answer")

    with pytest.raises(RewardError, match="no answer"):
        RewardManager(TOKENIZER, 0, compute_score=too_slow, on_error="raise")(make_batch(["a"], [""]))
    result = RewardManager(TOKENIZER, 0, compute_score=too_slow, on_error="retry")(
        make_batch(["a"], [""]), return_dict=True
    )
    assert result["metrics"]["reward/grader_errors"] == result["metrics"]["reward/grader_timeouts"] == 1
    assert result["metrics"]["reward/retries"] == 3

    manager = RewardManager(TOKENIZER, 0, on_error="raise", scorers={"mine": Scorer(too_slow)})
    metrics = manager(make_batch(["a"], [""], "mine"), return_dict=True)["metrics"]
    assert (metrics["reward/grader_timeouts"], metrics["reward/grader_errors"]) == (1, 0)


def test_a_long_ground_truth_does_not_fill_the_message():
    manager = RewardManager(TOKENIZER, 0, compute_score=Flaky(), on_error="raise")
    with pytest.raises(RewardError) as error:
        manager(make_batch(["9"], ["x" * 100_000]))
    assert len(str(error.value)) < 300
