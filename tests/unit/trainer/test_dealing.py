"""Dealing rows to devices and optimizer steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import ActorConfig
from paceline.protocol import DataProto
from paceline.trainer.ppo.dealing import deal_mini_batches
from paceline.workers.losses import MiniBatch, actor_loss


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
        ("token-sum", -11),
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


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(1, 12),
    rows_per_mini_batch=st.integers(1, 12),
    num_shards=st.integers(1, 4),
    seed=st.sampled_from([None, 3]),
    balance=st.booleans(),
)
def test_columns_of_a_mini_batch_do_not_depend_on_how_it_is_dealt(
    num_rows: int, rows_per_mini_batch: int, num_shards: int, seed: int | None, balance: bool
) -> None:
    """Each row's place in its mini-batch, in the order of the batch, and the mini-batch's number."""

    def columns_of(rows: DataProto, number: int) -> dict[str, torch.Tensor]:
        assert rows.batch["number"].tolist() == sorted(rows.batch["number"].tolist())
        return {"place": torch.arange(len(rows)), "mini_batch": torch.full((len(rows),), number)}

    def dealt(shards: int, balanced: bool) -> dict[tuple[int, int], int]:
        data = deal_mini_batches(
            numbered(num_rows),
            rows_per_mini_batch=rows_per_mini_batch,
            num_shards=shards,
            epochs=2,
            shuffle_seed=None if seed is None else [seed],
            balance=balanced,
            columns_of=columns_of,
        )
        real = data.batch[data.batch["response_mask"].any(dim=-1)]
        return {(int(row["mini_batch"]), int(row["number"])): int(row["place"]) for row in real.unbind(0)}

    assert dealt(num_shards, balance) == dealt(1, False)
