"""Which responses an update trains on, where they are drawn by their rewards: PF-PPO."""

from __future__ import annotations

import numpy as np

SMALLEST_WEIGHT = 1e-8
"""What every response weighs at least, so that there is always something to draw."""


def pf_ppo_rows(
    rewards: np.ndarray, is_response: np.ndarray, method: str, weight_pow: float, seed: list[int]
) -> np.ndarray:
    """As many row numbers as there are rows, in order, drawn with replacement by the rewards (batch,) of the responses.

    (Policy filtration, arXiv:2409.06957.) The weight of a response is, plus 1e-8,

    - ``pow``: |reward| ** weight_pow;
    - ``max_min``: 1 for the highest and for the lowest reward of the batch, 0 for all others;
    - ``max_random``: 0.4 for the highest, 0.1 for all others.

    Rows that are no responses (padding, or without a token) are not drawn, and without responses all rows stay.

    >>> pf_ppo_rows(np.array([0.0, 3.0, 3.0]), np.array([True, True, False]), "pow", 2.0, seed=[1, 7])
    array([1, 1, 1])
    """
    if not is_response.any():
        return np.arange(len(rewards))
    rewards = np.asarray(rewards, dtype=np.float64)
    highest, lowest = rewards[is_response].max(), rewards[is_response].min()
    if method == "pow":
        weights = np.abs(rewards) ** weight_pow
    elif method == "max_min":
        weights = ((rewards == highest) | (rewards == lowest)).astype(float)
    elif method == "max_random":
        weights = np.where(rewards == highest, 0.4, 0.1)
    else:
        raise ValueError(f"reweight_method={method!r} is none of pow, max_min and max_random.")
    weights = np.where(is_response, weights + SMALLEST_WEIGHT, 0.0)
    drawn = np.random.default_rng(seed).choice(len(rewards), size=len(rewards), p=weights / weights.sum())
    return np.sort(drawn)
