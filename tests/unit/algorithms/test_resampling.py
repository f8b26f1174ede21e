"""PF-PPO draws responses by their rewards, the same ones for the same seed."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.algorithms.resampling import pf_ppo_rows

REWARDS = np.array([0.0, 1.0, -2.0, 1.0, 0.5])
ALL = np.ones(5, dtype=bool)


def shares(
    method: str, rewards: np.ndarray = REWARDS, is_response: np.ndarray = ALL, power: float = 2.0
) -> list[float]:
    """How often each row is drawn, over many steps."""
    drawn = [pf_ppo_rows(rewards, is_response, method, power, seed=[7, step]) for step in range(4000)]
    return (np.bincount(np.concatenate(drawn), minlength=len(rewards)) / (4000 * len(rewards))).tolist()


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        ("pow", [0.0, 1.0, 4.0, 1.0, 0.25]),
        ("max_min", [0.0, 1.0, 1.0, 1.0, 0.0]),
        ("max_random", [0.1, 0.4, 0.1, 0.4, 0.1]),
    ],
)
def test_rows_are_drawn_by_their_weights(method, weights) -> None:
    expected = (np.array(weights) / sum(weights)).tolist()
    assert shares(method) == pytest.approx(expected, abs=0.01)


def test_the_power_is_that_of_the_reward() -> None:
    assert shares("pow", power=0.0) == pytest.approx([0.2] * 5, abs=0.01)


def test_rewards_of_zero_are_drawn_evenly() -> None:
    assert shares("pow", np.zeros(5)) == pytest.approx([0.2] * 5, abs=0.01)


def test_a_row_without_a_token_is_neither_drawn_nor_the_highest() -> None:
    is_response = np.array([True, True, False, True, True])
    assert shares("max_min", np.array([0.0, 1.0, 9.0, 0.5, 0.5]), is_response) == pytest.approx(
        [0.5, 0.5, 0.0, 0.0, 0.0], abs=0.01
    )
    assert pf_ppo_rows(REWARDS, ~ALL, "pow", 2.0, seed=[1]).tolist() == [0, 1, 2, 3, 4]


def test_seed_and_step_decide_and_nothing_else() -> None:
    def draw(*seed: int) -> list[int]:
        return pf_ppo_rows(np.arange(20.0), np.ones(20, dtype=bool), "pow", 1.0, seed=list(seed)).tolist()

    np.random.seed(3)
    first = draw(1, 5)
    assert first == draw(1, 5) == sorted(first)
    assert first != draw(1, 6)
    assert first != draw(2, 5)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="none of pow, max_min and max_random"):
        pf_ppo_rows(REWARDS, ALL, "median", 2.0, seed=[1])
