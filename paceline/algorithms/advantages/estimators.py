"""The estimators that `algorithm.adv_estimator` can name, and what a run must give to each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from paceline.catalog import ESTIMATORS, EstimatorEntry
from paceline.registry import Registry


class AdvantageEstimator(Protocol):
    """How every registered estimator is called; each takes what it needs. Returns (advantages, returns)."""

    def __call__(
        self,
        *,
        token_level_rewards: torch.Tensor,
        response_mask: torch.Tensor,
        values: torch.Tensor | None = None,
        index: np.ndarray | None = None,
        reward_baselines: torch.Tensor | None = None,
        gamma: float = 1.0,
        lam: float = 1.0,
        norm_by_std: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True)
class _EstimatorEntry:
    estimator: AdvantageEstimator
    about: EstimatorEntry


_ESTIMATORS: Registry[_EstimatorEntry] = Registry("algorithm.adv_estimator")


def register_adv_estimator(
    name: str, *, needs_critic: bool, needs_groups: bool = False, needs_baseline: bool = False
) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """Decorator: make an estimator available as `algorithm.adv_estimator=name`.

    With `needs_critic` a run has a critic, and the estimator gets its `values`. With `needs_groups` there are at least
    two responses to each prompt; `index` says whose. With `needs_baseline` a greedy response to each prompt is
    generated too, and `reward_baselines` (batch,) is its score.
    """

    def decorate(estimator: AdvantageEstimator) -> AdvantageEstimator:
        about = EstimatorEntry(estimator.__module__, needs_critic, needs_groups, needs_baseline)
        _ESTIMATORS.register(name)(_EstimatorEntry(estimator, about))
        ESTIMATORS.add(name, about)
        return estimator

    return decorate


def built_in_estimator(name: str) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """Decorator: the estimator that the catalogue has as `name`."""

    def decorate(estimator: AdvantageEstimator) -> AdvantageEstimator:
        _ESTIMATORS.register(name)(_EstimatorEntry(estimator, ESTIMATORS.built_in[name]))
        return estimator

    return decorate


def get_adv_estimator(name: str) -> AdvantageEstimator:
    """The estimator registered as `name`; ConfigError when there is none."""
    return _ESTIMATORS.get(name).estimator


def needs_critic(name: str) -> bool:
    """Whether the estimator registered as `name` needs values."""
    return _ESTIMATORS.get(name).about.needs_critic


def needs_groups(name: str) -> bool:
    """Whether the estimator registered as `name` compares the responses to one prompt."""
    return _ESTIMATORS.get(name).about.needs_groups


def needs_baseline(name: str) -> bool:
    """Whether the estimator registered as `name` needs the scores of greedy responses."""
    return _ESTIMATORS.get(name).about.needs_baseline
