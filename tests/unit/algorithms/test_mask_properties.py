"""What every function of the layer owes its mask: padding, row order and what lies outside change nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from paceline.algorithms.advantages import get_adv_estimator
from paceline.algorithms.aggregation import LOSS_AGG_MODES, LossNormaliser, agg_loss
from paceline.algorithms.covariance_losses import choose_largest, covariances
from paceline.algorithms.masking import masked_mean, masked_sum, masked_whiten
from paceline.algorithms.policy_loss import get_policy_loss
from paceline.algorithms.rollout_correction import (
    Rejection,
    RolloutCorrection,
    importance_weights,
    kept_tokens,
    log_ratio_of,
    response_weights,
    rewards_on_kept,
)
from paceline.algorithms.value_loss import clipped_value_loss
from paceline.catalog import ESTIMATORS, LOSSES
from tests.unit.algorithms.algorithm_cases import QUICK, Batch, assert_equal, batches

Results = list[torch.Tensor]
EACH_FUNCTION = settings(QUICK, max_examples=12)  # an example runs every function
NORMALISER = LossNormaliser(num_tokens=11.0, num_sequences=4.0, length=6)


def _with_gradient(x: torch.Tensor, loss_of: Callable[[torch.Tensor], tuple[torch.Tensor, dict]]) -> Results:
    """Loss, metric sums, and the gradient of the loss by x."""
    x = x.clone().requires_grad_()
    loss, sums = loss_of(x)
    loss.backward()
    assert x.grad is not None
    return [loss.detach(), *sums.values(), x.grad]


def _aggregate(batch: Batch, mode: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda loss_mat: agg_loss(loss_mat, batch.mask, mode, NORMALISER)


def _policy(batch: Batch, loss_mode: str, agg_mode: str) -> Results:
    clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 2.0, "dro_beta": 0.5}
    chosen = batch["values"] > 0
    return _with_gradient(
        batch["log_prob"],
        lambda x: get_policy_loss(loss_mode)(
            batch["old_log_prob"],
            x,
            batch["advantages"],
            batch.mask,
            agg=_aggregate(batch, agg_mode),
            chosen=chosen,
            **clips,
        ),
    )


def _advantages(batch: Batch, estimator: str) -> Results:
    components = {name: torch.where(batch.mask.bool(), batch[name], 0.0).sum(dim=-1) for name in ("returns", "values")}
    return list(
        get_adv_estimator(estimator)(
            token_level_rewards=batch["rewards"],
            response_mask=batch.mask,
            values=batch["values"],
            index=batch.groups,
            reward_baselines=torch.tensor([ord(group) / 100 for group in batch.groups], dtype=torch.float64),
            reward_components=components,
            component_weights={"returns": 0.5},
            old_log_probs=-batch["old_log_prob"].abs(),
            sum_pi_squared=batch["old_values"].sigmoid(),
            rollout_is_weights=batch["ref_log_prob"].exp(),
            lam_critic=0.7,
            lam_length_alpha=0.4,
            gamma=0.9,
            lam=0.8,
        )
    )


def _value(batch: Batch, mode: str) -> Results:
    return _with_gradient(
        batch["values"],
        lambda x: clipped_value_loss(
            x, batch["old_values"], batch["returns"], batch.mask, agg=_aggregate(batch, mode), cliprange_value=0.5
        ),
    )


def _correct(batch: Batch, level: str, low: float | None) -> Results:
    """Weights, kept tokens and rewards of a batch, without a mean over all of it."""
    log_ratio = log_ratio_of(batch["log_prob"], batch["old_log_prob"], batch.mask)
    rejections = (Rejection.of_ratio("token_k1", 0.4, 3.0), Rejection("seq_mean_k3", 0.0, 1.5))
    kept = kept_tokens(log_ratio, batch.mask, rejections)
    return [
        importance_weights(log_ratio, batch.mask, RolloutCorrection(level=level, low=low)),
        kept,
        rewards_on_kept(batch["rewards"], batch.mask, kept),
        response_weights(batch["values"].abs(), batch.mask),
    ]


def _chosen(batch: Batch) -> Results:
    covariance = covariances(batch["log_prob"], batch["advantages"], batch.mask)
    return [covariance, choose_largest(covariance, batch.mask, share=0.3)]


# Each gives matrices (rows, width) and scalars. The scalars of ADDITIVE ones are sums over rows.
ADDITIVE: dict[str, Callable[[Batch], Results]] = {
    "masked_sum": lambda batch: [masked_sum(batch["values"], batch.mask)],
    **{
        f"policy loss {loss}, {mode}": lambda batch, loss=loss, mode=mode: _policy(batch, loss, mode)
        for loss in LOSSES.built_in
        for mode in LOSS_AGG_MODES
    },
    "token weights": lambda batch: _correct(batch, "token", None),
    "sequence weights": lambda batch: _correct(batch, "sequence", 0.5),
    **{f"value loss, {mode}": lambda batch, mode=mode: _value(batch, mode) for mode in LOSS_AGG_MODES},
}
FUNCTIONS: dict[str, Callable[[Batch], Results]] = {
    **ADDITIVE,
    "masked_mean": lambda batch: [masked_mean(batch["values"], batch.mask)],
    "tokens of high covariance": _chosen,
    "masked_whiten": lambda batch: [masked_whiten(batch["values"], batch.mask)],
    **{name: lambda batch, name=name: _advantages(batch, name) for name in ESTIMATORS.built_in},
}


def _compare(batch: Batch, changed: Batch, undo: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Every function gives the same for both batches, once `undo` has removed the change from a matrix."""
    for name, function in FUNCTIONS.items():
        note(name)
        for result, expected in zip(function(changed), function(batch), strict=True):
            assert_equal(undo(result) if result.ndim == 2 else result, expected)


@EACH_FUNCTION
@given(batch=batches())
def test_outside_the_mask_results_and_gradients_are_zero(batch) -> None:
    for name, function in FUNCTIONS.items():
        note(name)
        for result in function(batch):
            assert result.ndim == 0 or (result[batch.mask == 0] == 0).all()


@EACH_FUNCTION
@given(batch=batches())
def test_nan_and_infinity_outside_the_mask_change_nothing(batch) -> None:
    for name, function in FUNCTIONS.items():
        note(name)
        for result, expected in zip(function(batch.with_garbage()), function(batch), strict=True):
            assert result.isfinite().all()
            assert torch.equal(result, expected)


@EACH_FUNCTION
@given(batch=batches(), random=st.randoms())
def test_row_order_only_orders_the_result(batch, random) -> None:
    order = list(range(len(batch.mask)))
    random.shuffle(order)
    back = [order.index(row) for row in range(len(order))]
    _compare(batch, batch.rows(order), undo=lambda matrix: matrix[back])


@EACH_FUNCTION
@given(batch=batches(), width=st.integers(1, 4))
def test_right_padding_changes_nothing(batch, width) -> None:
    _compare(batch, batch.padded_right(width), undo=lambda matrix: matrix[:, :-width])


@EACH_FUNCTION
@given(batch=batches())
def test_a_row_of_padding_changes_nothing(batch) -> None:
    _compare(batch, batch.with_padding_row(), undo=lambda matrix: matrix[:-1])


@EACH_FUNCTION
@given(batch=batches(min_rows=2), data=st.data())
def test_micro_batches_add_up_to_the_whole(batch, data) -> None:
    cut = data.draw(st.integers(1, len(batch.mask) - 1))
    parts = batch.rows(list(range(cut))), batch.rows(list(range(cut, len(batch.mask))))
    for name, function in ADDITIVE.items():
        note(name)
        for first, second, expected in zip(*map(function, parts), function(batch), strict=True):
            assert_equal(torch.cat([first, second]) if expected.ndim == 2 else first + second, expected)
