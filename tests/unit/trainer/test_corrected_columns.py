"""What the driver makes of samples of another distribution: columns, advantages, mini-batches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from paceline.algorithms.rollout_correction import NO_CORRECTION, Rejection, RolloutCorrection
from paceline.config import PolicyLossConfig
from paceline.config.load import load_config
from paceline.protocol import DataProto
from paceline.trainer.ppo.computed_columns import compute_advantage
from paceline.trainer.ppo.corrected_columns import correct_rollout, correction_of, high_covariance
from paceline.trainer.ppo.dealing import deal_mini_batches


def asked(cap: float = -1, **section: Any) -> RolloutCorrection:
    return correction_of(
        load_config(
            {
                "algorithm": {"rollout_correction": section},
                "actor_rollout_ref": {"actor": {"tis_imp_ratio_cap": cap}},
            }
        )
    )


def test_by_default_nothing_is_corrected() -> None:
    assert asked() == NO_CORRECTION
    assert not asked().is_on


def test_a_cap_of_the_actor_is_token_weights_of_the_decoupled_kind() -> None:
    assert asked(cap=3.0) == RolloutCorrection("token", None, 3.0)
    assert asked(cap=3.0) == asked(rollout_is="token", rollout_is_threshold=3.0)
    assert asked(cap=3.0, rollout_is="token", rollout_is_threshold="3.0") == asked(cap=3.0)


def test_thresholds_become_bounds() -> None:
    found = asked(
        rollout_is="sequence",
        rollout_is_threshold="0.5_4.0",
        rollout_is_batch_normalize=True,
        rollout_rs="token_k1,seq_max_k2",
        rollout_rs_threshold="0.6_1.6,2.5",
    )
    assert (found.level, found.low, found.high, found.normalise) == ("sequence", 0.5, 4.0, True)
    ratio, largest = found.rejections
    assert (ratio.low, ratio.high) == pytest.approx((-math.log(1.6), -math.log(0.6)))
    assert largest == Rejection("seq_max_k2", 0.0, 2.5)
    assert asked(rollout_rs=["token_k1"], rollout_rs_threshold=2).rejections[0].high == pytest.approx(math.log(2))


def a_group(**changes: torch.Tensor) -> DataProto:
    """Three responses to one prompt with scores 100, 1 and 0. The first is far from what the rollout thought of it."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]])
    old = torch.full((3, 3), -1.0) * mask
    rewards = torch.tensor([[0.0, 0.0, 100.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    columns = {
        "response_mask": mask,
        "old_log_probs": old,
        "rollout_log_probs": torch.tensor([[-3.0, -3.0, -3.0], [-1.0, -1.0, 0.0], [-1.0, -1.0, -1.0]]),
        "token_level_scores": rewards,
        "token_level_rewards": rewards,
    }
    uid = np.array(["a"] * 3, dtype=object)
    return DataProto.from_dict(tensors=columns | changes, non_tensors={"uid": uid})


REJECT_ROWS = RolloutCorrection(rejections=(Rejection.of_ratio("seq_mean_k1", 0.5, 2.0),))
REJECT_TOKENS = RolloutCorrection(rejections=(Rejection.of_ratio("token_k1", 0.5, 2.0),))


def test_a_rejected_response_leaves_the_baseline_of_its_group() -> None:
    data, metrics = correct_rollout(a_group(), REJECT_ROWS)
    advantages = compute_advantage(data, "grpo", norm_adv_by_std_in_grpo=False).batch["advantages"]
    # Of the scores 1 and 0 alone; with 100 among them the second response would have got -32.67.
    assert advantages.tolist() == [[0.0, 0.0, 0.0], [0.5, 0.5, 0.0], [-0.5, -0.5, -0.5]]
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_a_response_that_loses_its_last_token_keeps_its_reward(estimator: str) -> None:
    rollout = torch.tensor([[-1.0, -1.0, -3.0], [-1.0, -1.0, 0.0], [-1.0, -1.0, -1.0]])
    data, _ = correct_rollout(a_group(rollout_log_probs=rollout), REJECT_TOKENS)
    assert data.batch["loss_mask"].tolist() == [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    assert data.batch["token_level_rewards"].tolist()[0] == [0.0, 100.0, 0.0]
    advantages = compute_advantage(data, estimator).batch["advantages"]
    assert advantages[0, 0] > advantages[1, 0] >= advantages[2, 0]
    assert advantages[0, 2] == 0
    # The scores that the run reports stay where they were.
    assert data.batch["token_level_scores"].tolist()[0] == [0.0, 0.0, 100.0]


@pytest.mark.parametrize("estimator", ["gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_where_everything_is_rejected_advantages_are_0(estimator: str) -> None:
    data, metrics = correct_rollout(
        a_group(values=torch.ones(3, 3)), RolloutCorrection(rejections=(Rejection("token_k2", -2.0, -1.0),))
    )
    assert data.batch["loss_mask"].sum() == 0
    assert metrics["rollout_corr/rollout_rs_all_masked"] == 1.0
    advantaged = compute_advantage(data, estimator).batch
    assert advantaged["advantages"].tolist() == advantaged["returns"].tolist() == [[0.0] * 3] * 3


def test_weights_are_a_column_and_nothing_is_added_without_both_log_probs() -> None:
    data, metrics = correct_rollout(a_group(), RolloutCorrection("token", None, 2.0))
    assert data.batch["rollout_is_weights"].tolist() == [[2.0, 2.0, 2.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
    assert "loss_mask" not in data.batch
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(11 / 8)
    alone = a_group().select(batch_keys=["response_mask", "rollout_log_probs"])
    assert correct_rollout(alone, NO_CORRECTION) == (alone, {})


def test_inputs_are_left_as_they_were() -> None:
    data = a_group()
    before = data.batch["token_level_rewards"].clone()
    correct_rollout(data, REJECT_TOKENS)
    assert torch.equal(data.batch["token_level_rewards"], before)
    assert "loss_mask" not in data.batch


def many_responses() -> DataProto:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 7, (24,), generator=generator)
    mask = (torch.arange(6) < lengths[:, None]).long()
    return DataProto.from_dict(
        tensors={
            "number": torch.arange(24),
            "attention_mask": mask,
            "response_mask": mask,
            "old_log_probs": torch.randn(24, 6, generator=generator) * mask,
            "advantages": torch.randn(24, 6, generator=generator) * mask,
        }
    )


@pytest.mark.parametrize("loss_mode", ["clip_cov", "kl_cov"])
@pytest.mark.parametrize("shuffle_seed", [None, [5]])
def test_the_choice_of_tokens_does_not_depend_on_devices_or_balancing(
    loss_mode: str, shuffle_seed: list[int] | None
) -> None:
    policy_loss = PolicyLossConfig(loss_mode, clip_cov_ratio=0.2, clip_cov_lb=-1.0, kl_cov_ratio=0.2)

    def chosen(num_shards: int, balance: bool) -> dict[tuple[int, int], list[bool]]:
        dealt = deal_mini_batches(
            many_responses(),
            rows_per_mini_batch=10,
            num_shards=num_shards,
            shuffle_seed=shuffle_seed,
            epochs=2,
            balance=balance,
            columns_of=lambda rows, number: (
                high_covariance(rows, policy_loss, [1, 7, number]) | {"mini_batch": torch.full((len(rows),), number)}
            ),
        )
        real = dealt.batch[dealt.batch["response_mask"].any(dim=-1)]
        return {(int(row["mini_batch"]), int(row["number"])): row["high_covariance"].tolist() for row in real.unbind(0)}

    expected = chosen(1, False)
    assert sum(map(sum, expected.values())) > 5
    for num_shards, balance in ((1, True), (2, False), (3, True), (7, True)):
        assert chosen(num_shards, balance) == expected


def test_rejected_tokens_are_not_chosen_and_another_seed_draws_others() -> None:
    data = many_responses()
    policy_loss = PolicyLossConfig("clip_cov", clip_cov_ratio=0.3, clip_cov_lb=-9.0, clip_cov_ub=9.0)

    def draw(seed: int) -> torch.Tensor:
        return high_covariance(data, policy_loss, [1, seed, 0])["high_covariance"]

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    data.batch["loss_mask"] = data.batch["response_mask"] * (torch.arange(24) % 2)[:, None]
    assert not (draw(1) & (data.batch["loss_mask"] == 0)).any()
