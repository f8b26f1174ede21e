"""RewardManager: where scores go, what is counted, what never becomes a silent zero."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from paceline.errors import DataError, RewardError
from paceline.rewards import RewardManager
from tests.unit.rewards.reward_batches import RESPONSE_LENGTH, TOKENIZER, make_batch


def test_the_score_is_at_the_last_response_token_and_zero_elsewhere():
    responses = ["#### 42", "so: #### 42", "#### 41"]
    rewards = RewardManager(TOKENIZER, 0)(make_batch(responses, ["42"] * 3))
    assert rewards.shape == (3, RESPONSE_LENGTH)
    assert rewards.dtype == torch.float32
    expected = torch.zeros(3, RESPONSE_LENGTH)
    expected[0, len(responses[0])] = 1.0  # the place of <eos>
    expected[1, len(responses[1])] = 1.0
    assert torch.equal(rewards, expected)


def test_a_response_that_fills_its_length_is_rewarded_at_the_last_place():
    response = "#### 42" + "." * (RESPONSE_LENGTH - 8)
    rewards = RewardManager(TOKENIZER, 0)(make_batch([response], ["42"]))
    assert rewards[0].nonzero().tolist() == [[RESPONSE_LENGTH - 1]]


def test_the_prompt_is_not_graded():
    result = RewardManager(TOKENIZER, 0)(make_batch(["no idea"], ["42"], prompt="say #### 42"), return_dict=True)
    assert result["reward_tensor"].sum() == 0
    assert result["metrics"]["reward/extraction_failed"] == 1


def test_an_empty_response_gets_no_reward_anywhere_and_is_counted():
    def always_one(data_source, solution_str, ground_truth, extra_info):
        return {"score": 1.0, "acc": 1.0}

    manager = RewardManager(TOKENIZER, 0, compute_score=always_one)
    result = manager(make_batch(["", "x"], ["42", "42"]), return_dict=True)
    assert result["reward_tensor"][0].tolist() == [0.0] * RESPONSE_LENGTH
    assert result["reward_tensor"][1].sum() == 1.0
    assert result["reward_extra_info"]["empty"].tolist() == [True, False]
    assert result["metrics"]["reward/empty_responses"] == 1
    assert result["metrics"]["reward/extraction_failed"] == 0
    assert result["metrics"]["reward/openai/gsm8k/acc"] == 0.5


def test_wrong_answers_failed_extraction_and_scores_are_reported_apart():
    batch = make_batch(
        ["#### 42", "#### 1", "forty-two", r"\boxed{7}", "x"],
        ["42", "42", "42", "7", "7"],
        ["openai/gsm8k"] * 3 + ["lighteval/MATH"] * 2,
    )
    result = RewardManager(TOKENIZER, 0)(batch, return_dict=True)
    info, metrics = result["reward_extra_info"], result["metrics"]
    assert info["score"].tolist() == info["acc"].tolist() == [1, 0, 0, 1, 0]
    assert info["extracted"].tolist() == [True, True, False, True, False]
    assert metrics["reward/extraction_failed"] == 2
    assert metrics["reward/extraction_failed_rate"] == pytest.approx(0.4)
    assert metrics["reward/openai/gsm8k/score"] == pytest.approx(1 / 3)
    assert metrics["reward/lighteval/MATH/acc"] == 0.5
    assert (
        metrics["reward/grader_errors"] == metrics["reward/grader_timeouts"] == metrics["reward/empty_responses"] == 0
    )


def test_timeouts_and_grader_errors_are_counted_and_never_silent(monkeypatch, caplog):
    from paceline.rewards.score.math import shared_grader

    monkeypatch.setattr(shared_grader(), "grade", lambda pairs, deadline_seconds: [None, "TypeError: broken", True])
    batch = make_batch([r"\boxed{a+b}", r"\boxed{b+c}", r"\boxed{c+d}"], ["x", "y", "z"], "lighteval/MATH")
    with caplog.at_level(logging.ERROR):
        result = RewardManager(TOKENIZER, 0)(batch, return_dict=True)
    info, metrics = result["reward_extra_info"], result["metrics"]
    assert info["timeout"].tolist() == [True, False, False]
    assert info["grader_error"].tolist() == [False, True, False]
    assert info["score"].tolist() == [0, 0, 1]
    assert metrics["reward/grader_timeouts"] == metrics["reward/grader_errors"] == 1
    assert metrics["reward/extraction_failed"] == 0
    assert "Grading failed for 1 of 3" in caplog.text
    assert "TypeError: broken" in caplog.text


def test_an_exception_in_a_custom_function_does_not_end_the_run_and_shows_its_traceback(caplog):
    def picky(data_source, solution_str, ground_truth, extra_info):
        if solution_str == "bad":
            raise RuntimeError("service is down")
        return 0.5

    with caplog.at_level(logging.ERROR):
        result = RewardManager(TOKENIZER, 0, compute_score=picky)(make_batch(["ok", "bad"], ["", ""]), return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [0.5, 0.0]
    assert result["reward_extra_info"]["grader_error"].tolist() == [False, True]
    assert "service is down" in caplog.text
    assert "in picky" in caplog.text


@pytest.mark.parametrize("value", [None, "high", float("nan"), float("inf"), {"reward": 1.0}])
def test_a_result_that_is_no_score_is_a_grader_error(value):
    manager = RewardManager(TOKENIZER, 0, compute_score=lambda **kw: value if kw["solution_str"] == "x" else 1.0)
    result = manager(make_batch(["x", "z"], ["y", "y"]), return_dict=True)
    assert result["metrics"]["reward/grader_errors"] == 1
    assert result["reward_tensor"].sum() == 1


def test_a_function_that_fails_on_every_response_is_an_error():
    manager = RewardManager(TOKENIZER, 0, compute_score=lambda **kwargs: None)
    with pytest.raises(RewardError, match=r"all 2 responses.*returned None as a score"):
        manager(make_batch(["x", "z"], ["y", "y"]))


def test_a_custom_function_is_given_source_text_truth_and_extra_info():
    calls = []

    def spy(data_source, solution_str, ground_truth, extra_info):
        calls.append((data_source, solution_str, ground_truth, extra_info))
        return 0.0

    batch = make_batch(["a", "b"], ["1", "2"], "my/data", extra_info=[{"index": 0}, {"index": 1}])
    RewardManager(TOKENIZER, 0, compute_score=spy)(batch)
    assert calls == [("my/data", "a", "1", {"index": 0}), ("my/data", "b", "2", {"index": 1})]


def test_a_custom_function_needs_neither_source_nor_truth():
    batch = make_batch(["abc"], [None], sources=None)
    del batch.non_tensor_batch["reward_model"]
    manager = RewardManager(TOKENIZER, 0, compute_score=lambda **kwargs: len(kwargs["solution_str"]))
    assert manager(batch).sum() == 3


def test_extra_fields_of_a_custom_function_become_columns():
    def detailed(data_source, solution_str, ground_truth, extra_info):
        if solution_str == "plain":
            return 1.0
        return {"score": 0.5, "length": len(solution_str), "note": "long"}

    manager = RewardManager(TOKENIZER, 0, compute_score=detailed)
    info = manager(make_batch(["plain", "other"], ["", ""]), return_dict=True)["reward_extra_info"]
    assert info["score"].tolist() == [1.0, 0.5]
    assert np.isnan(info["length"][0])
    assert info["length"][1] == 5
    assert info["note"].tolist() == [None, "long"]
    assert all(column.shape == (2,) for column in info.values())


def test_num_examine_examples_of_each_source_go_to_the_log(caplog):
    batch = make_batch(["#### 1", "#### 2", r"\boxed{3}"], ["1", "1", "3"], ["gsm8k", "gsm8k", "MATH"])
    with caplog.at_level(logging.INFO):
        RewardManager(TOKENIZER, 0)(batch)
        assert caplog.text == ""
        RewardManager(TOKENIZER, 1)(batch)
    examples = [record.getMessage() for record in caplog.records]
    assert len(examples) == 2
    assert "[prompt] q #### 42\n[response] #### 1\n[ground truth] 1\n[score] 1" in examples[0]
    assert "Example of MATH" in examples[1]


def test_a_batch_without_sources_says_what_to_set():
    with pytest.raises(DataError, match=r"1 of 1 rows have no 'data_source'.*reward_fn_key"):
        RewardManager(TOKENIZER, 0)(make_batch(["x"], ["1"], sources=None))
    batch = make_batch(["#### 1"], ["1"], sources=None, scorer=["gsm8k"])
    assert RewardManager(TOKENIZER, 0, reward_fn_key="scorer")(batch).sum() == 1


def test_the_batch_is_left_as_it_was():
    batch = make_batch(["#### 42", ""], ["42", "42"])
    before = {key: value.clone() for key, value in batch.batch.items()}
    RewardManager(TOKENIZER, 1)(batch, return_dict=True)
    assert set(batch.batch.keys()) == set(before)
    assert all(torch.equal(batch.batch[key], before[key]) for key in before)


def test_examples_are_seen_where_logging_is_not_set_up(monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    RewardManager(TOKENIZER, num_examine=2)(make_batch(["#### 42", "#### 1", "#### 2"], ["42"] * 3))
    shown = capsys.readouterr().err
    assert shown.count("Example of openai/gsm8k") == 2
    assert "[response] #### 42\n[ground truth] 42\n[score] 1" in shown
