"""The driver's own computations: requests, KL in the reward, dealing of mini-batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.algorithms.kl import AdaptiveKLController, FixedKLController
from paceline.config import ActorConfig
from paceline.protocol import DataProto
from paceline.trainer.ppo.phases import (
    apply_kl_penalty,
    compute_advantage,
    deal_mini_batches,
    make_requests,
    rollout_mismatch,
)
from paceline.workers.losses import MiniBatch, actor_loss


def collated(rows: int) -> dict:
    return {
        "input_ids": torch.arange(rows * 3).reshape(rows, 3),
        "attention_mask": torch.ones(rows, 3, dtype=torch.long),
        "position_ids": torch.arange(3).repeat(rows, 1),
        "data_source": np.array(["s"] * rows, dtype=object),
    }


def numbered(rows: int, width: int = 4) -> DataProto:
    """Row i holds the number i and has i % width + 1 response tokens."""
    lengths = torch.arange(rows) % width + 1
    return DataProto.from_dict(
        tensors={
            "number": torch.arange(rows),
            "response_mask": (torch.arange(width)[None] < lengths[:, None]).long(),
            "attention_mask": (torch.arange(width)[None] < lengths[:, None]).long(),
        }
    )


def test_requests_repeat_each_prompt_n_times_in_a_row_and_share_its_uid() -> None:
    requests, labels = make_requests(collated(2), n=3, seed=1, purpose="training", step=5)
    assert requests.batch["input_ids"][:, 0].tolist() == [0, 0, 0, 3, 3, 3]
    uid = labels.non_tensor_batch["uid"].tolist()
    assert uid[0] == uid[1] == uid[2] != uid[3]
    assert "input_ids" not in (labels.batch.keys() if labels.batch is not None else [])


def test_seeds_differ_between_responses_steps_and_purposes_and_repeat_for_equal_arguments() -> None:
    def seeds(**changes):
        arguments = {"n": 2, "seed": 1, "purpose": "training", "step": 5} | changes
        return make_requests(collated(4), **arguments)[0].batch["seeds"].tolist()

    assert len(set(seeds())) == 8
    assert seeds() == seeds()
    assert not set(seeds()) & (set(seeds(step=6)) | set(seeds(purpose="validation")) | set(seeds(seed=2)))
    assert min(seeds()) >= 0


def test_kl_penalty_is_subtracted_per_token_and_moves_the_adaptive_coefficient() -> None:
    data = DataProto.from_dict(
        tensors={
            "response_mask": torch.tensor([[1, 1, 0]]),
            "old_log_probs": torch.tensor([[-1.0, -2.0, 0.0]]),
            "ref_log_prob": torch.tensor([[-1.5, -1.0, 0.0]]),
            "token_level_scores": torch.tensor([[0.0, 1.0, 0.0]]),
        }
    )
    rewarded, metrics = apply_kl_penalty(data, FixedKLController(0.1))
    # KL (k1) is 0.5 and -1.0; the mean over two tokens is -0.25.
    torch.testing.assert_close(rewarded.batch["token_level_rewards"], torch.tensor([[-0.05, 1.1, 0.0]]))
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(-0.25)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1

    controller = AdaptiveKLController(0.1, target_kl=0.1, horizon=10)
    apply_kl_penalty(data, controller)
    # error = clip(-0.25 / 0.1 - 1, -0.2, 0.2) = -0.2; factor 1 - 0.2 * 1 / 10.
    assert controller.value == pytest.approx(0.1 * 0.98)


def test_an_empty_response_counts_neither_in_the_kl_nor_in_how_far_the_coefficient_moves() -> None:
    def data(rows: int) -> DataProto:
        mask = torch.tensor([[1, 1], [1, 0], [0, 0]])[:rows]
        columns = {"old_log_probs": torch.zeros(3, 2), "ref_log_prob": torch.full((3, 2), -0.4)}
        columns["token_level_scores"] = torch.zeros(3, 2)
        return DataProto.from_dict(
            tensors={name: column[:rows] for name, column in columns.items()} | {"response_mask": mask}
        )

    values = []
    for rows in (2, 3):
        controller = AdaptiveKLController(0.1, target_kl=0.1, horizon=10)
        _, metrics = apply_kl_penalty(data(rows), controller)
        assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.4)
        values.append(controller.value)
    assert values == [pytest.approx(0.1 * (1 + 0.2 * 2 / 10))] * 2


def test_grpo_advantages_use_the_uid_groups() -> None:
    data = DataProto.from_dict(
        tensors={
            "response_mask": torch.ones(4, 2, dtype=torch.long),
            "token_level_rewards": torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 5.0], [0.0, 5.0]]),
        },
        non_tensors={"uid": np.array(["a", "a", "b", "b"], dtype=object)},
    )
    result = compute_advantage(data, "grpo", norm_adv_by_std_in_grpo=False)
    assert result.batch["advantages"].tolist() == [[-1, -1], [1, 1], [0, 0], [0, 0]]


def test_remax_advantages_use_the_baselines() -> None:
    data = DataProto.from_dict(
        tensors={
            "response_mask": torch.tensor([[1, 1], [1, 0]]),
            "token_level_rewards": torch.tensor([[0.0, 1.0], [3.0, 0.0]]),
            "reward_baselines": torch.tensor([0.5, 4.0]),
        }
    )
    assert compute_advantage(data, "remax").batch["advantages"].tolist() == [[0.5, 0.5], [-1.0, 0.0]]


def test_dealing_gives_each_shard_its_part_of_every_mini_batch() -> None:
    dealt = deal_mini_batches(numbered(6), rows_per_mini_batch=4, num_shards=2)
    assert dealt.batch["number"].tolist() == [0, 1, 4, 2, 3, 5]
    # rows have 1 2 3 4 | 1 2 tokens
    assert dealt.meta_info["mini_batches"] == [
        {"rows_per_shard": 2, "num_tokens": 10, "num_sequences": 4},
        {"rows_per_shard": 1, "num_tokens": 3, "num_sequences": 2},
    ]
    assert dealt.meta_info["passes"] == 1


@pytest.mark.parametrize("num_shards", [1, 2, 3])  # three shards take two rows of padding
@pytest.mark.parametrize(
    ("mode", "loss"),
    [
        ("token-mean", -11 / 6),
        ("seq-mean-token-sum", -11 / 3),
        ("seq-mean-token-mean", -(1 + 3 + 2) / 3),
        ("seq-mean-token-sum-norm", -11 / (3 * 3)),
    ],
)
def test_an_empty_response_is_no_sequence_of_the_mini_batch(mode: str, loss: float, num_shards: int) -> None:
    """Responses of 2, 0, 1 and 3 tokens; the surrogate of an unchanged policy is the negative advantage."""
    lengths, advantages = torch.tensor([2, 0, 1, 3]), torch.tensor([1.0, 50.0, 3.0, 2.0])
    mask = (torch.arange(3) < lengths[:, None]).long()
    data = DataProto.from_dict(
        tensors={
            "attention_mask": mask,
            "response_mask": mask,
            "advantages": advantages[:, None].expand(4, 3).clone(),
            "old_log_probs": torch.zeros(4, 3),
        }
    )
    dealt = deal_mini_batches(data, rows_per_mini_batch=4, num_shards=num_shards)
    [counts] = dealt.meta_info["mini_batches"]
    assert (counts["num_tokens"], counts["num_sequences"]) == (6, 3)
    loss_fn = actor_loss(ActorConfig(loss_agg_mode=mode), MiniBatch(**counts))
    shares = []
    for shard in dealt.chunk(num_shards):
        output = {"log_probs": torch.zeros(len(shard), 3), "entropy": torch.zeros(len(shard), 3)}
        shares.append(loss_fn(output, shard.batch)[0].item())
    assert sum(shares) == pytest.approx(loss)


def test_a_mini_batch_of_empty_responses_has_loss_and_metrics_of_zero() -> None:
    mask = torch.zeros(2, 3, dtype=torch.long)
    columns = {"advantages": torch.ones(2, 3), "old_log_probs": torch.zeros(2, 3)}
    data = DataProto.from_dict(tensors={"attention_mask": mask, "response_mask": mask, **columns})
    dealt = deal_mini_batches(data, rows_per_mini_batch=2, num_shards=1)
    [counts] = dealt.meta_info["mini_batches"]
    output = {"log_probs": torch.ones(2, 3), "entropy": torch.ones(2, 3)}
    loss, metrics = actor_loss(ActorConfig(), MiniBatch(**counts))(output, dealt.batch)
    assert [loss.item(), *(value.item() for value in metrics.values())] == [0.0] * (1 + len(metrics))
    assert rollout_mismatch(data.union(DataProto.from_dict(tensors={"rollout_log_probs": torch.zeros(2, 3)}))) == {}


def test_the_measured_kl_is_a_mean_over_responses_with_tokens() -> None:
    """Two responses with a KL of 1 and 3 a token, and one without tokens."""
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    data = DataProto.from_dict(
        tensors={
            "response_mask": mask,
            "token_level_scores": torch.zeros(3, 2),
            "old_log_probs": torch.tensor([[1.0, 1.0], [3.0, 0.0], [9.0, 9.0]]),
            "ref_log_prob": torch.zeros(3, 2),
        }
    )
    _, metrics = apply_kl_penalty(data, FixedKLController(0.1))
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(2.0)


def test_dealing_leaves_its_input_alone() -> None:
    data = numbered(5)
    before = data.batch["response_mask"].clone()
    deal_mini_batches(data, rows_per_mini_batch=5, num_shards=2)
    deal_mini_batches(data, rows_per_mini_batch=5, num_shards=1)
    assert torch.equal(data.batch["response_mask"], before)
    assert data.meta_info == {}


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 20),
    mini=st.integers(1, 20),
    shards=st.integers(1, 5),
    epochs=st.integers(1, 3),
    shuffle=st.booleans(),
    balance=st.booleans(),
)
def test_every_row_is_dealt_once_per_epoch_to_the_same_mini_batch_for_any_number_of_shards(
    rows: int, mini: int, shards: int, epochs: int, shuffle: bool, balance: bool
) -> None:
    def membership(num_shards: int) -> list[list[int]]:
        """Rows of each mini-batch, read back as the workers read them."""
        dealt = deal_mini_batches(
            numbered(rows),
            rows_per_mini_batch=mini,
            num_shards=num_shards,
            epochs=epochs,
            shuffle_seed=[3, 1] if shuffle else None,
            balance=balance,
        )
        found = []
        for shard in dealt.chunk(num_shards):
            start = 0
            for place, counts in enumerate(dealt.meta_info["mini_batches"]):
                part = shard[start : start + counts["rows_per_shard"]]
                start += counts["rows_per_shard"]
                real = part.batch["response_mask"].sum(-1) > 0
                found += [[]] if place == len(found) else []
                found[place] += part.batch["number"][real].tolist()
            assert start == len(shard)
        for members, counts in zip(found, dealt.meta_info["mini_batches"], strict=True):
            assert len(members) == counts["num_sequences"]
            assert sum(member % 4 + 1 for member in members) == counts["num_tokens"]
        return [sorted(members) for members in found] * dealt.meta_info["passes"]

    dealt_rows = membership(shards)
    assert sorted(row for members in dealt_rows for row in members) == sorted([*range(rows)] * epochs)
    assert dealt_rows == membership(1)


def test_the_mismatch_of_rollout_and_trainer_counts_response_tokens_only() -> None:
    data = DataProto.from_dict(
        {
            "old_log_probs": torch.tensor([[0.5, 0.2, 0.9]]).log(),
            "rollout_log_probs": torch.tensor([[0.4, 0.2, 0.1]]).log(),
            "response_mask": torch.tensor([[1, 1, 0]]),
        }
    )
    found = rollout_mismatch(data)
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(0.05)
    assert found["training/rollout_probs_diff_max"] == pytest.approx(0.1)
