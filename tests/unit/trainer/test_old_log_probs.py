"""Whose log-probs are the policy's before its update, and how the rollout's are verified."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import PPOConfig
from paceline.config.load import load_config
from paceline.protocol import DataProto
from paceline.trainer.ppo.old_log_probs import (
    BOUNDS,
    bound_of,
    probs_difference,
    rollout_has_log_probs,
    rows_to_check,
    update_has_log_probs,
)


def config(**changes: Any) -> PPOConfig:
    """Keyword names are keys below actor_rollout_ref with `.` written as `__`."""
    policy: dict[str, Any] = {}
    for key, value in changes.items():
        section, name = key.split("__")
        policy.setdefault(section, {})[name] = value
    return load_config({"actor_rollout_ref": policy})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"model__compute_dtype": "bfloat16"}, True),
        ({"model__compute_dtype": "bfloat16", "rollout__dtype": "float32"}, False),
        ({"rollout__dtype": "bfloat16"}, False),
        ({"rollout__dtype": "float32"}, True),
        ({"rollout__name": "hf"}, False),
        ({"rollout__name": "vllm"}, False),
        ({"rollout__name": "vllm", "rollout__trust_log_probs": True}, True),
        ({"rollout__trust_log_probs": False}, False),
        ({"model__lora_rank": 4}, False),
        ({"actor__tis_imp_ratio_cap": 2.0}, False),
        ({"rollout__do_sample": False}, True),
        ({"rollout__do_sample": False, "rollout__temperature": 0.7}, False),
        ({"rollout__temperature": 0.7}, True),
    ],
)
def test_the_rollouts_log_probs_are_taken_where_it_computes_as_the_actor_does(
    changes: dict[str, Any], expected: bool
) -> None:
    assert rollout_has_log_probs(config(**changes)) is expected


def test_a_run_that_trusts_has_no_bound_and_others_have_that_of_their_numbers() -> None:
    assert bound_of(config()) == BOUNDS["float32"] < BOUNDS["bfloat16"]
    assert bound_of(config(model__compute_dtype="bfloat16")) == BOUNDS["bfloat16"]
    assert bound_of(config(rollout__trust_log_probs=True)) is None


def test_the_only_update_on_a_batch_computes_its_old_log_probs_itself() -> None:
    cfg = config(actor__ppo_mini_batch_size=8, rollout__n=2)
    assert update_has_log_probs(cfg, 16)
    assert not update_has_log_probs(cfg, 17)
    assert not update_has_log_probs(config(actor__ppo_mini_batch_size=8, actor__ppo_epochs=2), 8)
    assert not update_has_log_probs(replace(cfg, algorithm=replace(cfg.algorithm, use_kl_in_reward=True)), 16)


@given(st.integers(1, 5000), st.integers(0, 2**32), st.integers(1, 10**6))
def test_a_small_share_of_the_rows_is_checked_each_once_and_reproducibly(rows: int, seed: int, step: int) -> None:
    mask = torch.ones(rows, 1)
    chosen = rows_to_check(mask, seed, step)
    assert 1 <= len(chosen) <= max(1, rows // 16)
    assert list(chosen) == sorted({*chosen.tolist()})
    assert 0 <= chosen[0] <= chosen[-1] < rows
    assert np.array_equal(chosen, rows_to_check(mask, seed, step))


def test_in_time_every_row_is_checked() -> None:
    mask = torch.ones(64, 3)
    assert {row for step in range(400) for row in rows_to_check(mask, 1, step).tolist()} == {*range(64)}


def test_a_row_without_a_token_is_not_checked() -> None:
    mask = torch.zeros(64, 3)
    mask[[5, 9], 1] = 1
    assert {row for step in range(50) for row in rows_to_check(mask, 1, step).tolist()} == {5, 9}
    assert len(rows_to_check(torch.zeros(64, 3), 1, 1)) == 2


def test_the_difference_counts_response_tokens_only() -> None:
    data = DataProto.from_dict(
        {
            "rollout_log_probs": torch.tensor([[0.4, 0.2, 0.1]]).log(),
            "response_mask": torch.tensor([[1, 1, 0]]),
        }
    )
    found = probs_difference(data, torch.tensor([[0.5, 0.2, 0.9]]).log())
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(0.05)
    assert found["training/rollout_probs_diff_max"] == pytest.approx(0.1)
    data.batch["response_mask"] = torch.zeros(1, 3, dtype=torch.long)
    assert probs_difference(data, torch.zeros(1, 3)) == {}


def test_the_mismatch_of_rollout_and_trainer_counts_response_tokens_only() -> None:
    data = DataProto.from_dict(
        {
            "old_log_probs": torch.tensor([[0.5, 0.2, 0.9]]).log(),
            "rollout_log_probs": torch.tensor([[0.4, 0.2, 0.1]]).log(),
            "response_mask": torch.tensor([[1, 1, 0]]),
        }
    )
    found = probs_difference(data, data.batch["old_log_probs"])
    assert found["training/rollout_probs_diff_mean"] == pytest.approx(0.05)
    assert found["training/rollout_probs_diff_max"] == pytest.approx(0.1)
    assert found["training/rollout_probs_diff_std"] == pytest.approx(0.05)
    assert found["training/rollout_probs_diff_valid"] == 1.0
    assert found["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)  # two points are on a line
    same = DataProto.from_dict({name: torch.zeros(1, 2) for name in ("old_log_probs", "rollout_log_probs")})
    same.batch["response_mask"] = torch.ones(1, 2)
    assert "training/rollout_actor_probs_pearson_corr" not in probs_difference(same, same.batch["old_log_probs"])
