"""A response against the others to the same prompt."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.algorithms.advantages_by_group import (
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_advantage,
    compute_rloo_outcome_advantage,
)
from paceline.algorithms.masking import masked_whiten
from tests.unit.algorithms.algorithm_cases import QUICK, Batch, assert_equal, batches, tensor

GroupEstimator = Callable[[torch.Tensor, torch.Tensor, list[str] | np.ndarray], tuple[torch.Tensor, torch.Tensor]]


def _by_keywords(function: Callable[..., tuple[torch.Tensor, torch.Tensor]], **settings: object) -> GroupEstimator:
    return lambda rewards, mask, index: function(
        token_level_rewards=rewards, response_mask=mask, index=index, **settings
    )


def _gdpo_of_one(rewards, mask, index) -> tuple[torch.Tensor, torch.Tensor]:
    """The score is the only component."""
    scores = torch.where(mask.bool(), rewards, 0.0).sum(dim=-1)
    return compute_gdpo_outcome_advantage(
        token_level_rewards=rewards, response_mask=mask, index=index, reward_components={"score": scores}
    )


ESTIMATORS: dict[str, GroupEstimator] = {
    "grpo": compute_grpo_outcome_advantage,
    "dr. grpo": lambda rewards, mask, index: compute_grpo_outcome_advantage(
        rewards, mask, index, norm_adv_by_std_in_grpo=False
    ),
    "rloo": _by_keywords(compute_rloo_outcome_advantage),
    "reinforce++ with baseline": _by_keywords(compute_reinforce_plus_plus_baseline_advantage),
    "pass@k": _by_keywords(compute_grpo_passk_outcome_advantage),
    "pass@k without std": _by_keywords(compute_grpo_passk_outcome_advantage, norm_by_std=False),
    "opo": _by_keywords(compute_opo_outcome_advantage),
    "gpg": _by_keywords(compute_gpg_outcome_advantage),
    "gdpo": _gdpo_of_one,
}
each_estimator = pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)


def _scores(batch: Batch) -> dict[int, float]:
    """The score of each row that is a response."""
    scores = {}
    for row, bits in enumerate(batch.mask.tolist()):
        if any(bits):
            scores[row] = sum(reward for reward, bit in zip(batch["rewards"][row].tolist(), bits, strict=True) if bit)
    return scores


def _slow(batch: Batch, advantage_of: Callable[[float, list[float]], float]) -> list[list[float]]:
    """`advantage_of(score, scores of the other responses of the group)` at every valid token."""
    scores = _scores(batch)
    advantages = [[0.0] * batch.mask.shape[1] for _ in batch.mask]
    for row, score in scores.items():
        others = [scores[other] for other in scores if other != row and batch.groups[other] == batch.groups[row]]
        advantages[row] = [advantage_of(score, others) if bit else 0.0 for bit in batch.mask[row].tolist()]
    return advantages


def _slow_grpo(score: float, others: list[float]) -> float:
    std = statistics.stdev([score, *others]) if others else 0.0
    return (score - statistics.mean([score, *others])) / (std + 1e-6)


def _minus_group_mean(score: float, others: list[float]) -> float:
    return score - statistics.mean([score, *others])


def _minus_mean_of_others(score: float, others: list[float]) -> float:
    return score - statistics.mean(others) if others else 0.0


def _lead(score: float, others: list[float]) -> float:
    return max(0.0, score - max(others)) if others else 0.0


def _lead_by_std(score: float, others: list[float]) -> float:
    return _lead(score, others) / (statistics.stdev([score, *others]) + 1e-6) if others else 0.0


@pytest.mark.parametrize(
    ("name", "slow"),
    [
        ("grpo", _slow_grpo),
        ("dr. grpo", _minus_group_mean),
        ("rloo", _minus_mean_of_others),
        ("pass@k", _lead_by_std),
        ("pass@k without std", _lead),
    ],
)
@QUICK
@given(batch=batches())
def test_the_advantages_equal_the_slow_version_over_every_group(name, slow, batch) -> None:
    advantages, returns = ESTIMATORS[name](batch["rewards"], batch.mask, batch.groups)
    assert_equal(advantages, _slow(batch, slow))
    assert torch.equal(returns, advantages)


@QUICK
@given(batch=batches())
def test_reinforce_plus_plus_with_baseline_whitens_the_centred_scores_of_all_tokens(batch) -> None:
    advantages, returns = ESTIMATORS["reinforce++ with baseline"](batch["rewards"], batch.mask, batch.groups)
    centred = _slow(batch, _minus_group_mean)
    tokens = [centred[row][t] for row, t in batch.mask.nonzero().tolist()]
    std = statistics.stdev(tokens) if len(tokens) > 1 else 0.0
    expected = torch.zeros_like(batch["rewards"])
    for row, t in batch.mask.nonzero().tolist():
        expected[row, t] = (centred[row][t] - statistics.mean(tokens)) / (std**2 + 1e-8) ** 0.5
    torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=1e-7)
    assert torch.equal(returns, advantages)


@QUICK
@given(batch=batches())
def test_opo_weighs_the_scores_of_a_group_by_length(batch) -> None:
    scores = _scores(batch)
    expected = torch.zeros_like(batch["rewards"])
    for row, t in batch.mask.nonzero().tolist():
        group = [other for other in scores if batch.groups[other] == batch.groups[row]]
        lengths = {other: batch.mask[other].sum().item() for other in group}
        baseline = sum(lengths[other] * scores[other] for other in group) / sum(lengths.values())
        expected[row, t] = scores[row] - baseline
    assert_equal(ESTIMATORS["opo"](batch["rewards"], batch.mask, batch.groups)[0], expected)


@QUICK
@given(batch=batches())
def test_gpg_scales_by_the_share_of_responses_in_groups_that_differ(batch) -> None:
    scores = _scores(batch)
    differ = [
        row
        for row, score in scores.items()
        if any(scores[other] != score for other in scores if batch.groups[other] == batch.groups[row])
    ]
    alpha = len(scores) / max(1, len(differ))
    centred = torch.tensor(_slow(batch, _minus_group_mean), dtype=torch.float64).view(batch.mask.shape)
    assert_equal(ESTIMATORS["gpg"](batch["rewards"], batch.mask, batch.groups)[0], alpha * centred)


@QUICK
@given(batch=batches(), weights=st.tuples(st.floats(-2, 2), st.floats(-2, 2)), by_std=st.booleans())
def test_gdpo_whitens_the_weighted_sum_of_components_that_are_normalised_in_their_groups(
    batch, weights, by_std
) -> None:
    responses = list(_scores(batch))
    components = {name: batch[name][:, 0] for name in ("values", "returns")}
    total = dict.fromkeys(responses, 0.0)
    for (_, component), weight in zip(components.items(), weights, strict=True):
        for row in responses:
            group = [component[other].item() for other in responses if batch.groups[other] == batch.groups[row]]
            std = statistics.stdev(group) if len(group) > 1 else 0.0
            centred = component[row].item() - statistics.mean(group)
            total[row] += weight * (centred / (std + 1e-6) if by_std else centred)
    advantages, returns = compute_gdpo_outcome_advantage(
        token_level_rewards=batch["rewards"],
        response_mask=batch.mask,
        index=batch.groups,
        reward_components=components,
        component_weights=dict(zip(components, weights, strict=True)),
        norm_by_std=by_std,
    )
    expected = torch.zeros_like(batch["rewards"])
    for row, t in batch.mask.nonzero().tolist():
        expected[row, t] = total[row]
    torch.testing.assert_close(advantages, masked_whiten(expected, batch.mask), rtol=1e-6, atol=1e-6)
    assert torch.equal(returns, advantages)


# One group with the scores 1, 0.25 and 0 of responses of 3, 2 and 2 tokens, one with a hole. Mean 0.416667,
# deviation sqrt((0.340278 + 0.027778 + 0.173611) / 2) = 0.520416.
ONE_GROUP_REWARDS = tensor([[0.0, 0.0, 1.0], [0.0, 9.0, 0.25], [0.0, 0.0, 9.0]])
ONE_GROUP_MASK = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 0]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [1.12090, -0.32026, -0.80064]),
        ("dr. grpo", [0.58333, -0.16667, -0.41667]),
        ("rloo", [0.875, -0.25, -0.625]),
        ("pass@k", [1.44115, 0.0, 0.0]),  # 0.75 / 0.520416
        ("pass@k without std", [0.75, 0.0, 0.0]),
        ("opo", [0.5, -0.25, -0.5]),  # baseline (3 * 1 + 2 * 0.25 + 0) / 7 = 0.5
        ("gpg", [0.58333, -0.16667, -0.41667]),  # all three are of a group that differs: alpha 3 / 3
    ],
)
def test_hand_computed_with_a_hole_and_rewards_outside_of_the_mask(name, expected) -> None:
    advantages, _ = ESTIMATORS[name](ONE_GROUP_REWARDS, ONE_GROUP_MASK, ["a"] * 3)
    of_rows = torch.tensor(expected)[:, None] * ONE_GROUP_MASK
    torch.testing.assert_close(advantages, of_rows, rtol=0, atol=1e-5)


def test_gdpo_hand_computed() -> None:
    # z of acc: deviation 0.57735, (1.15470, -0.57735, -0.57735); of fmt: (0.57735, 0.57735, -1.15470). With the
    # weights 1 and 0.5: (1.44337, -0.28868, -1.15470), on 3, 2 and 2 tokens: mean 0.206196, variance 1.464281.
    advantages, _ = compute_gdpo_outcome_advantage(
        token_level_rewards=ONE_GROUP_REWARDS,
        response_mask=ONE_GROUP_MASK,
        index=["a"] * 3,
        reward_components={"acc": tensor([1.0, 0.0, 0.0]), "fmt": tensor([1.0, 1.0, 0.0])},
        component_weights={"acc": 1.0, "fmt": 0.5},
    )
    expected = torch.tensor([1.02240, -0.40896, -1.12464])[:, None] * ONE_GROUP_MASK
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-5)


def test_gpg_hand_computed_with_a_group_that_teaches_nothing() -> None:
    # Four responses, two of them in a group that differs: alpha 2. Rows of padding count nowhere.
    rewards = tensor([[1.0], [0.0], [1.0], [1.0], [5.0]])
    mask = torch.tensor([[1], [1], [1], [1], [0]])
    advantages, _ = ESTIMATORS["gpg"](rewards, mask, ["a", "a", "b", "b", "a"])
    assert advantages.tolist() == [[1.0], [-1.0], [0.0], [0.0], [0.0]]


def test_pass_at_k_gives_nothing_to_a_tie_for_the_best() -> None:
    rewards = tensor([[1.0], [1.0], [0.0]])
    assert ESTIMATORS["pass@k"](rewards, torch.ones(3, 1), ["a"] * 3)[0].tolist() == [[0.0]] * 3


def test_gdpo_tells_responses_apart_whose_totals_are_equal() -> None:
    components = {"acc": tensor([1.0, 0.0]), "fmt": tensor([0.0, 1.0])}
    columns = {"token_level_rewards": torch.ones(2, 1), "response_mask": torch.ones(2, 1), "index": ["a", "a"]}
    advantages, _ = compute_gdpo_outcome_advantage(
        **columns, reward_components=components, component_weights={"acc": 1.0, "fmt": 0.5}
    )
    torch.testing.assert_close(advantages, tensor([[0.707107], [-0.707107]]), rtol=1e-5, atol=0)


# Group a has the scores 0, 2, 4: mean 2, std sqrt((4 + 0 + 4) / 2) = 2. Group b has one response and no baseline.
REWARDS = tensor([[0.0, 0.0], [0.5, 1.5], [5.0, 0.0], [4.0, 9.0]])
MASK = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 0]])
INDEX = np.array(["a", "a", "b", "a"], dtype=object)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [[-1.0, -1.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]),
        ("dr. grpo", [[-2.0, -2.0], [0.0, 0.0], [0.0, 0.0], [2.0, 0.0]]),
        # 0 - (2 + 4) / 2;  2 - (0 + 4) / 2;  none;  4 - (0 + 2) / 2
        ("rloo", [[-3.0, -3.0], [0.0, 0.0], [0.0, 0.0], [3.0, 0.0]]),
        ("pass@k", [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]]),  # (4 - 2) / 2
        # Baseline (2 * 0 + 2 * 2 + 1 * 4) / 5 = 1.6.
        ("opo", [[-1.6, -1.6], [0.4, 0.4], [0.0, 0.0], [2.4, 0.0]]),
        # Three of four responses are in a group that differs: alpha 4/3.
        ("gpg", [[-2.666667, -2.666667], [0.0, 0.0], [0.0, 0.0], [2.666667, 0.0]]),
        # Tokens -2 -2 0 0 0 2: mean -1/3, sum of squares 12 - 6/9 = 34/3, variance 34/15 = 1.505545^2.
        (
            "reinforce++ with baseline",
            [[-1.107019, -1.107019], [0.221404, 0.221404], [0.221404, 0.0], [1.549826, 0.0]],
        ),
    ],
)
def test_hand_computed_with_a_group_of_one(name, expected) -> None:
    advantages, _ = ESTIMATORS[name](REWARDS, MASK, INDEX)
    torch.testing.assert_close(advantages, tensor(expected), rtol=1e-5, atol=1e-7)


def test_grpo_divides_by_the_unbiased_std() -> None:
    rewards, mask = tensor([[0.0], [4.0]]), torch.ones(2, 1)
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, ["a", "a"])
    # Mean 2, variance (4 + 4) / (2 - 1) = 8: 2 / sqrt(8) = 0.707107.
    torch.testing.assert_close(advantages, tensor([[-0.707107], [0.707107]]), rtol=1e-5, atol=0)


@each_estimator
@pytest.mark.parametrize("score", [0.1, 100.1, -0.7])
def test_equal_scores_have_no_advantage_although_their_mean_is_rounded(estimator, score) -> None:
    mask = torch.ones(7, 2)
    rewards = torch.zeros(7, 2)
    rewards[:, -1] = score
    advantages, _ = estimator(rewards, mask, ["a"] * 7)
    assert advantages.abs().max().item() < 1e-5


@each_estimator
@QUICK
@given(batch=batches(), names=st.permutations(["x", "y", "z"]))
def test_it_matters_who_shares_a_group_and_not_its_name(estimator, batch, names) -> None:
    renamed = [dict(zip("abc", names, strict=True))[group] for group in batch.groups]
    expected, _ = estimator(batch["rewards"], batch.mask, batch.groups)
    assert_equal(estimator(batch["rewards"], batch.mask, renamed)[0], expected)


@each_estimator
@QUICK
@given(batch=batches(), shifts=st.lists(st.floats(-10, 10), min_size=3, max_size=3))
def test_a_constant_added_to_all_scores_of_a_group_changes_nothing(estimator, batch, shifts) -> None:
    shift_of_group = dict(zip("abc", shifts, strict=True))
    shift_of_row = torch.tensor([shift_of_group[group] for group in batch.groups], dtype=torch.float64)
    # Divided among the valid tokens, so that it is the score that moves.
    shifted = batch["rewards"] + (shift_of_row / batch.mask.sum(dim=-1).clamp(min=1))[:, None]
    expected, _ = estimator(batch["rewards"], batch.mask, batch.groups)
    torch.testing.assert_close(estimator(shifted, batch.mask, batch.groups)[0], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["grpo", "dr. grpo", "rloo", "gpg"])
@QUICK
@given(batch=batches())
def test_the_advantages_of_a_group_add_up_to_zero(name, batch) -> None:
    advantages, _ = ESTIMATORS[name](batch["rewards"], batch.mask, batch.groups)
    of_response = advantages.sum(dim=-1) / batch.mask.sum(dim=-1).clamp(min=1)
    for group in set(batch.groups):
        rows = [row for row, other in enumerate(batch.groups) if other == group]
        assert abs(of_response[rows].sum().item()) < 1e-9


@QUICK
@given(batch=batches())
def test_reinforce_plus_plus_with_baseline_adds_up_to_zero_over_the_tokens_of_the_batch(batch) -> None:
    advantages, _ = ESTIMATORS["reinforce++ with baseline"](batch["rewards"], batch.mask, batch.groups)
    assert abs(advantages.sum().item()) < 1e-7


@each_estimator
def test_an_index_of_another_length_or_none_is_refused(estimator) -> None:
    with pytest.raises(ValueError, match="1 group ids for 2 responses"):
        estimator(torch.zeros(2, 1), torch.ones(2, 1), ["a"])
    with pytest.raises(ValueError, match="uid"):
        estimator(torch.zeros(2, 1), torch.ones(2, 1), None)
