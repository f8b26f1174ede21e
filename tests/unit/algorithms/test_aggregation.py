from __future__ import annotations

import pytest
import torch
from hypothesis import given

from paceline.algorithms.aggregation import LOSS_AGG_MODES, LossNormaliser, agg_loss
from paceline.errors import ConfigError
from tests.unit.algorithms.algorithm_cases import QUICK, Batch, assert_equal, batches, normaliser_of, tensor


def _slow_aggregate(batch: Batch, mode: str) -> float:
    """The aggregate of a whole batch, sequence by sequence."""
    sequences = []
    for losses, bits in zip(batch["values"].tolist(), batch.mask.tolist(), strict=True):
        tokens = [loss for loss, bit in zip(losses, bits, strict=True) if bit]
        if tokens:
            sequences.append(tokens)
    if not sequences:
        return 0.0
    if mode == "token-mean":
        tokens = [loss for sequence in sequences for loss in sequence]
        return sum(tokens) / len(tokens)
    if mode == "token-sum":
        return sum(loss for sequence in sequences for loss in sequence)
    of_sequence = {
        "seq-mean-token-sum": lambda tokens: sum(tokens),
        "seq-mean-token-mean": lambda tokens: sum(tokens) / len(tokens),
        "seq-mean-token-sum-norm": lambda tokens: sum(tokens) / batch.mask.shape[1],
    }[mode]
    return sum(of_sequence(tokens) for tokens in sequences) / len(sequences)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@QUICK
@given(batch=batches())
def test_a_whole_batch_aggregates_as_the_slow_version(mode, batch) -> None:
    loss = agg_loss(batch["values"], batch.mask, mode, normaliser_of(batch.mask))
    assert_equal(loss, _slow_aggregate(batch, mode))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@QUICK
@given(batch=batches())
def test_shares_of_single_rows_add_up_to_the_aggregate(mode, batch) -> None:
    normaliser = normaliser_of(batch.mask)
    rows = [batch.rows([row]) for row in range(len(batch.mask))]
    shares = [agg_loss(row["values"], row.mask, mode, normaliser) for row in rows]
    assert_equal(torch.stack(shares).sum(), _slow_aggregate(batch, mode))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # Valid losses: [1, 2, 3], [10] and a row of padding; 4 tokens, 2 sequences, width 4.
        ("token-mean", 4.0),  # (1 + 2 + 3 + 10) / 4
        ("token-sum", 16.0),  # 1 + 2 + 3 + 10
        ("seq-mean-token-sum", 8.0),  # (6 + 10) / 2
        ("seq-mean-token-mean", 6.0),  # (2 + 10) / 2
        ("seq-mean-token-sum-norm", 2.0),  # (6 + 10) / (2 * 4)
    ],
)
def test_hand_computed_numbers(mode, expected) -> None:
    losses = tensor([[1, 2, 3, 99], [10, 99, 99, 99], [99, 99, 99, 99]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    normaliser = LossNormaliser(num_tokens=4.0, num_sequences=2.0, length=4)
    assert agg_loss(losses, mask, mode, normaliser).item() == expected


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_a_mini_batch_without_valid_tokens_has_loss_and_gradient_zero(mode) -> None:
    losses, mask = torch.ones(2, 3, requires_grad=True), torch.zeros(2, 3)
    loss = agg_loss(losses, mask, mode, normaliser_of(mask))
    loss.backward()
    assert loss.item() == 0.0
    assert losses.grad is not None
    assert losses.grad.tolist() == [[0.0] * 3] * 2


def test_an_unknown_mode_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"'token_mean'.*did you mean token-mean\?"):
        agg_loss(torch.zeros(1, 1), torch.ones(1, 1), "token_mean", LossNormaliser(1.0, 1.0, 1))
