"""The registry of estimators, and what all of them owe their callers."""

from __future__ import annotations

import inspect
import uuid
from typing import Any

import numpy as np
import pytest
import torch

from paceline.algorithms.advantages import (
    AdvantageEstimator,
    estimator_needs,
    get_adv_estimator,
    register_adv_estimator,
)
from paceline.algorithms.advantages_by_group import compute_grpo_outcome_advantage
from paceline.algorithms.advantages_by_token import compute_gae_advantage_return
from paceline.catalog import ESTIMATORS, EstimatorEntry
from paceline.errors import ConfigError

BUILT_IN = tuple(ESTIMATORS.built_in)


def _inputs() -> dict[str, Any]:
    """Every keyword of the protocol."""
    generator = torch.Generator().manual_seed(0)
    return {
        "token_level_rewards": torch.rand(4, 3, generator=generator),
        "response_mask": torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 0]]),
        "values": torch.rand(4, 3, generator=generator),
        "index": np.array(["a", "a", "b", "b"], dtype=object),
        "reward_baselines": torch.rand(4, generator=generator),
        "reward_components": {"style": torch.rand(4, generator=generator)},
        "component_weights": {"style": 2.0},
        "old_log_probs": -torch.rand(4, 3, generator=generator),
        "sum_pi_squared": torch.rand(4, 3, generator=generator),
        "rollout_is_weights": torch.rand(4, 3, generator=generator),
        "gamma": 0.9,
        "lam": 0.8,
        "lam_critic": None,
        "lam_length_alpha": None,
        "norm_by_std": False,
    }


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_estimator_is_called_alike_and_leaves_its_inputs_as_they_were(name) -> None:
    inputs, before = _inputs(), _inputs()
    assert set(inputs) == set(inspect.signature(AdvantageEstimator.__call__).parameters) - {"self"}
    advantages, returns = get_adv_estimator(name)(**inputs)
    assert advantages.shape == returns.shape == (4, 3)
    assert advantages.dtype == returns.dtype == torch.float32
    assert advantages.abs().sum() > 0
    assert all(torch.equal(inputs[key], before[key]) for key in before if torch.is_tensor(before[key]))


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_estimator_gets_along_with_what_it_says_that_it_needs(name) -> None:
    needs = estimator_needs(name)
    needed = {
        "token_level_rewards": True,
        "response_mask": True,
        "values": needs.needs_critic,
        "index": needs.needs_groups,
        "reward_baselines": needs.needs_baseline,
        "reward_components": needs.needs_components,
        "old_log_probs": needs.needs_sum_pi_squared,
        "sum_pi_squared": needs.needs_sum_pi_squared,
    }
    inputs = {key: value for key, value in _inputs().items() if needed.get(key)}
    get_adv_estimator(name)(**inputs)
    for key in list(needed)[2:]:
        if needed[key]:
            with pytest.raises(ValueError, match="none were given"):
                get_adv_estimator(name)(**{other: value for other, value in inputs.items() if other != key})


def test_few_estimators_need_more_than_groups() -> None:
    def those_with(need: str) -> list[str]:
        return [name for name in BUILT_IN if getattr(estimator_needs(name), need)]

    assert those_with("needs_critic") == ["gae"]
    assert those_with("needs_baseline") == ["remax"]
    assert those_with("needs_components") == ["gdpo"]
    assert those_with("needs_sum_pi_squared") == ["optimal_token_baseline", "tir_optimal_token_baseline"]


@pytest.mark.parametrize(("other", "name"), [("grpo_vectorized", "grpo"), ("rloo_vectorized", "rloo")])
def test_two_estimators_have_a_second_name(other, name) -> None:
    assert get_adv_estimator(other) is get_adv_estimator(name)


def test_gae_and_grpo_take_their_settings_from_the_call() -> None:
    inputs = _inputs()
    rewards, mask = inputs["token_level_rewards"], inputs["response_mask"]
    gae = compute_gae_advantage_return(rewards, inputs["values"], mask, 0.9, 0.8)
    grpo = compute_grpo_outcome_advantage(rewards, mask, inputs["index"], norm_adv_by_std_in_grpo=False)
    assert all(map(torch.equal, get_adv_estimator("gae")(**inputs), gae))
    assert all(map(torch.equal, get_adv_estimator("grpo")(**inputs), grpo))


def test_users_can_register_an_estimator_but_not_replace_one() -> None:
    name = f"test-{uuid.uuid4()}"

    @register_adv_estimator(name, needs_critic=True)
    def rewards_as_advantages(*, token_level_rewards, response_mask, **_):
        return token_level_rewards, token_level_rewards

    assert get_adv_estimator(name) is rewards_as_advantages
    assert estimator_needs(name) == EstimatorEntry(needs_critic=True)
    with pytest.raises(ValueError, match="already registered"):
        register_adv_estimator(name, needs_critic=False)(rewards_as_advantages)


def test_an_unknown_estimator_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.adv_estimator='grop'.*did you mean grpo\?"):
        get_adv_estimator("grop")
    with pytest.raises(ConfigError, match="gae, gdpo"):
        estimator_needs("ga-e-misspelt-beyond-recognition")
