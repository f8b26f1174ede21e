"""Rollout engines: token ids of prompts in, sampled token ids and their log-probs out.

This layer knows neither Ray nor the training engines; `paceline.workers` joins them.
"""

from __future__ import annotations

from paceline.rollout.rollout_interface import (
    Completion,
    Request,
    RolloutEngine,
    RolloutSpec,
    SamplingParams,
    get_rollout,
    register_rollout,
)

__all__ = [
    "Completion",
    "Request",
    "RolloutEngine",
    "RolloutSpec",
    "SamplingParams",
    "get_rollout",
    "register_rollout",
]
