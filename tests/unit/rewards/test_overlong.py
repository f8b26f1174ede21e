"""The penalty of long responses."""

from __future__ import annotations

import pytest
import torch

from paceline.rewards import Overlong, RewardManager, overlong_penalty
from tests.unit.rewards.reward_batches import TOKENIZER, make_batch


def test_the_penalty_grows_linearly_over_the_buffer():
    # DAPO's own numbers: at most 20480 tokens, a buffer of 4096, so 16384 are free.
    lengths = torch.tensor([0, 15000, 16384, 16385, 17408, 18000, 18432, 20480, 25000])
    expected = torch.tensor([0.0, 0.0, 0.0, -1 / 4096, -0.25, -0.394531, -0.5, -1.0, -1.0])
    assert torch.allclose(overlong_penalty(lengths, 20480, 4096, 1.0), expected)
    assert torch.allclose(overlong_penalty(lengths, 20480, 4096, 0.5), expected / 2)


def test_a_buffer_as_long_as_a_response_punishes_from_the_first_token():
    assert overlong_penalty(torch.tensor([0, 1, 4]), 4, 4, 2.0).tolist() == [0.0, -0.5, -2.0]


def test_a_manager_adds_it_to_scores_and_leaves_acc_alone():
    # With <eos>: 8, 10, 12 and 0 tokens; 8 are free, and 4 more cost 0.5.
    batch = make_batch(["#### 42", "a #### 42", "so, #### 41", ""], ["42"] * 4)
    manager = RewardManager(TOKENIZER, 0, overlong=Overlong(max_len=12, buffer_len=4, penalty_factor=0.5, log=True))
    result = manager(batch, return_dict=True)
    info, metrics = result["reward_extra_info"], result["metrics"]
    assert result["reward_tensor"].sum(-1).tolist() == info["score"].tolist() == [1.0, 0.75, -0.5, 0.0]
    assert result["reward_tensor"][2].nonzero().tolist() == [[11]]
    assert info["overlong_penalty"].tolist() == [0.0, -0.25, -0.5, 0.0]
    assert info["unshaped_score"].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert info["acc"].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert metrics["reward/overlong_rate"] == 0.5
    assert metrics["reward/overlong_penalty"] == pytest.approx(-0.75 / 4)


def test_it_is_reported_on_demand_only():
    batch = make_batch(["#### 42"], ["42"])
    quiet = RewardManager(TOKENIZER, 0, overlong=Overlong(max_len=10, buffer_len=4))(batch, return_dict=True)
    assert quiet["reward_extra_info"]["overlong_penalty"].tolist() == [-0.5]
    assert not [name for name in quiet["metrics"] if "overlong" in name]
    assert "overlong_penalty" not in RewardManager(TOKENIZER, 0)(batch, return_dict=True)["reward_extra_info"]
