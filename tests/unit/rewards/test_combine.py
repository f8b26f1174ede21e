"""Rule and model together: weights by source."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.config import SourceWeights
from paceline.errors import RewardError
from paceline.rewards import Overlong, RewardManager, combine_scores, reward_metrics, uses_model
from tests.unit.rewards.reward_batches import RESPONSE_LENGTH, TOKENIZER, make_batch

WEIGHTS = {"a": {"rule": 0.5, "model": 2.0}, "b": SourceWeights(rule=1.0, model=0.0), "default": {"model": 0.25}}


def test_scores_are_added_by_the_weights_of_their_source():
    rule = torch.tensor([[0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    model = torch.tensor([[0.0, 3.0], [0.0, 3.0], [4.0, 0.0], [0.0, -2.0], [0.5, 5.0]])
    combined = combine_scores(
        rule, np.array([True, True, True, False, False]), model, ["a", "b", "other", "chat", "a"], WEIGHTS
    )
    expected = [
        [0.0, 0.5 * 1 + 2 * 3],  # named
        [0.0, 1.0],  # the model has no weight
        [1.0 + 0.25 * 4, 0.0],  # default
        [0.0, -2.0],  # no rule, not named: the model alone, and default has no part
        [2 * 0.5, 2 * 5.0],  # no rule, named: the model with its weight
    ]
    assert torch.allclose(combined, torch.tensor(expected))


def test_without_weights_rules_count_alone_and_the_model_scores_what_has_no_rule():
    combined = combine_scores(
        torch.tensor([[1.0], [0.0]]), [True, False], torch.tensor([[7.0], [7.0]]), ["a", None], {}
    )
    assert combined.tolist() == [[1.0], [7.0]]
    assert not uses_model("a", True, {})
    assert uses_model("a", False, {})
    assert uses_model("a", True, WEIGHTS)
    assert not uses_model("b", False, WEIGHTS)
    assert uses_model(None, True, WEIGHTS)


def test_an_empty_response_has_no_score_of_the_model():
    batch = make_batch(["", "x"], [None, None], None)
    batch.batch["rm_scores"] = torch.zeros(2, RESPONSE_LENGTH)
    batch.batch["rm_scores"][1, 0] = 3.0
    result = RewardManager(TOKENIZER, 0, weights={})(batch, return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [0.0, 3.0]
    assert np.isnan(result["reward_extra_info"]["model_score"]).tolist() == [True, False]
    assert result["metrics"]["reward/empty_responses"] == 1
    assert result["metrics"]["reward/unknown/model_score"] == 3.0


def test_inputs_are_left_as_they_were():
    rule, model = torch.ones(2, 3), torch.full((2, 3), 2.0)
    combine_scores(rule, [True, False], model, ["a", "a"], WEIGHTS)
    assert torch.equal(rule, torch.ones(2, 3))
    assert torch.equal(model, torch.full((2, 3), 2.0))


def test_the_overlong_penalty_is_not_weighed():
    rule, penalty = torch.tensor([[0.0, 1.0 - 0.4], [0.0, -0.4]]), torch.tensor([[0.0, -0.4], [0.0, -0.4]])
    combined = combine_scores(
        rule, [True, False], torch.tensor([[0.0, 3.0]] * 2), ["a", "chat"], WEIGHTS, penalty=penalty
    )
    assert torch.allclose(combined, torch.tensor([[0.0, 0.5 * 1 + 2 * 3 - 0.4], [0.0, 3 - 0.4]]))


def test_a_score_that_is_not_finite_is_an_error_where_it_counts():
    model = torch.tensor([[float("nan")], [1.0]])
    assert combine_scores(torch.ones(2, 1), [True, True], model, ["b", "b"], WEIGHTS).tolist() == [[1.0], [1.0]]
    with pytest.raises(
        RewardError, match=r"1 of 2 responses a score that is not finite; the first is row 0, of source 'a'"
    ):
        combine_scores(torch.ones(2, 1), [True, True], model, ["a", "b"], WEIGHTS)


def test_a_manager_adds_the_model_s_scores_of_a_batch():
    batch = make_batch(["#### 42", "#### 41", "hello"], ["42", "42", None], ["gsm8k", "gsm8k", "Dahoas/full-hh-rlhf"])
    scores = torch.zeros(3, RESPONSE_LENGTH)
    scores[0, 7], scores[1, 7], scores[2, 5] = 2.0, 3.0, -1.5  # the place of <eos>
    batch.batch["rm_scores"] = scores
    result = RewardManager(TOKENIZER, 0, weights={"gsm8k": {"rule": 1.0, "model": 0.5}})(batch, return_dict=True)
    expected = torch.zeros(3, RESPONSE_LENGTH)
    expected[0, 7], expected[1, 7], expected[2, 5] = 2.0, 1.5, -1.5
    assert torch.equal(result["reward_tensor"], expected)
    info, metrics = result["reward_extra_info"], result["metrics"]
    assert info["score"].tolist() == [2.0, 1.5, -1.5]
    assert info["model_score"].tolist() == [2.0, 3.0, -1.5]
    assert info["has_rule"].tolist() == [True, True, False]
    assert metrics["reward/gsm8k/acc"] == 0.5
    assert metrics["reward/gsm8k/model_score"] == 2.5
    assert metrics["reward/Dahoas/full-hh-rlhf/score"] == -1.5
    assert metrics["reward/extraction_failed"] == 0


def test_a_manager_adds_the_penalty_to_rule_and_model_alike():
    batch = make_batch(["#### 42", "hello"], ["42", None], ["gsm8k", "Dahoas/full-hh-rlhf"])
    batch.batch["rm_scores"] = torch.zeros(2, RESPONSE_LENGTH)
    batch.batch["rm_scores"][:, 0] = 2.0
    manager = RewardManager(
        TOKENIZER, 0, weights={"gsm8k": {"rule": 0.5, "model": 0.0}}, overlong=Overlong(max_len=8, buffer_len=4)
    )
    # 8 and 6 tokens with <eos>: penalties of 1 and of 2 / 4.
    assert torch.allclose(manager(batch).sum(-1), torch.tensor([0.5 * 1 - 1.0, 2.0 - 0.5]))


def test_a_row_without_a_rule_waits_for_the_model_s_score():
    batch = make_batch(["#### 42", "hello"], ["42", None], ["gsm8k", "Dahoas/full-hh-rlhf"])
    result = RewardManager(TOKENIZER, 0, weights={})(batch, return_dict=True)
    info = result["reward_extra_info"]
    assert info["score"].tolist() == [1.0, 0.0]
    assert info["has_rule"].tolist() == [True, False]
    assert info["grader_error"].tolist() == [False, False]
    assert np.isnan(info["acc"][1])
    assert "reward/Dahoas/full-hh-rlhf/score" not in result["metrics"]
    assert result["metrics"]["reward/extraction_failed"] == 0


def test_metrics_can_be_computed_over_the_rows_of_all_processes():
    first = RewardManager(TOKENIZER, 0)(make_batch(["#### 42", "", "no"], ["42"] * 3, "gsm8k"), return_dict=True)
    second = RewardManager(TOKENIZER, 0)(make_batch(["#### 1"], ["42"], "gsm8k"), return_dict=True)
    infos = [first["reward_extra_info"], second["reward_extra_info"]]
    joined = {key: np.concatenate([info[key] for info in infos]) for key in infos[0]}
    whole = RewardManager(TOKENIZER, 0)(
        make_batch(["#### 42", "", "no", "#### 1"], ["42"] * 4, "gsm8k"), return_dict=True
    )
    assert reward_metrics(["gsm8k"] * 4, joined) == whole["metrics"]
    # A function of another kind may say nothing but scores.
    assert reward_metrics([None, None], {"score": np.array([1.0, 0.0])})["reward/unknown/score"] == 0.5
