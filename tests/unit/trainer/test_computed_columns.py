"""KL in the reward, advantages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.algorithms.advantages import register_adv_estimator
from paceline.algorithms.kl import AdaptiveKLController, FixedKLController
from paceline.config import PfPpoConfig
from paceline.protocol import DataProto
from paceline.trainer.ppo.computed_columns import (
    apply_kl_penalty,
    component_metrics,
    compute_advantage,
    draw_rows,
    mean_sum_pi_squared,
)


def test_kl_penalty_is_subtracted_per_token_and_moves_the_adaptive_coefficient() -> None:
    data = DataProto.from_dict(
        tensors={
            "response_mask": torch.tensor([[1, 1, 0]]),
            "old_log_probs": torch.tensor([[-1.0, -2.0, 0.0]]),
            "ref_log_prob": torch.tensor([[-1.5, -1.0, 0.0]]),
            "token_level_scores": torch.tensor([[0.0, 1.0, 0.0]]),
        }
    )
    rewarded, metrics = apply_kl_penalty(data, FixedKLController(0.1))
    # KL (k1) is 0.5 and -1.0; the mean over two tokens is -0.25.
    torch.testing.assert_close(rewarded.batch["token_level_rewards"], torch.tensor([[-0.05, 1.1, 0.0]]))
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(-0.25)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1

    controller = AdaptiveKLController(0.1, target_kl=0.1, horizon=10)
    apply_kl_penalty(data, controller)
    # error = clip(-0.25 / 0.1 - 1, -0.2, 0.2) = -0.2; factor 1 - 0.2 * 1 / 10.
    assert controller.value == pytest.approx(0.1 * 0.98)


def test_an_empty_response_counts_neither_in_the_kl_nor_in_how_far_the_coefficient_moves() -> None:
    def data(rows: int) -> DataProto:
        mask = torch.tensor([[1, 1], [1, 0], [0, 0]])[:rows]
        columns = {"old_log_probs": torch.zeros(3, 2), "ref_log_prob": torch.full((3, 2), -0.4)}
        columns["token_level_scores"] = torch.zeros(3, 2)
        return DataProto.from_dict(
            tensors={name: column[:rows] for name, column in columns.items()} | {"response_mask": mask}
        )

    values = []
    for rows in (2, 3):
        controller = AdaptiveKLController(0.1, target_kl=0.1, horizon=10)
        _, metrics = apply_kl_penalty(data(rows), controller)
        assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.4)
        values.append(controller.value)
    assert values == [pytest.approx(0.1 * (1 + 0.2 * 2 / 10))] * 2


def test_grpo_advantages_use_the_uid_groups() -> None:
    data = DataProto.from_dict(
        tensors={
            "response_mask": torch.ones(4, 2, dtype=torch.long),
            "token_level_rewards": torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 5.0], [0.0, 5.0]]),
        },
        non_tensors={"uid": np.array(["a", "a", "b", "b"], dtype=object)},
    )
    result = compute_advantage(data, "grpo", norm_adv_by_std_in_grpo=False)
    assert result.batch["advantages"].tolist() == [[-1, -1], [1, 1], [0, 0], [0, 0]]


def test_remax_advantages_use_the_baselines() -> None:
    data = DataProto.from_dict(
        tensors={
            "response_mask": torch.tensor([[1, 1], [1, 0]]),
            "token_level_rewards": torch.tensor([[0.0, 1.0], [3.0, 0.0]]),
            "reward_baselines": torch.tensor([0.5, 4.0]),
        }
    )
    assert compute_advantage(data, "remax").batch["advantages"].tolist() == [[0.5, 0.5], [-1.0, 0.0]]


def test_gdpo_advantages_use_the_parts_of_the_scores_and_their_weights() -> None:
    data = DataProto.from_dict(
        tensors={"response_mask": torch.ones(2, 1), "token_level_rewards": torch.zeros(2, 1)},
        non_tensors={"uid": np.array(["a", "a"], dtype=object)},
    )
    parts = {"acc": torch.tensor([1.0, 0.0]), "style": torch.tensor([0.0, 1.0])}
    for weights, sign in (({"acc": 2.0, "style": 1.0}, 1), ({"acc": 1.0, "style": 2.0}, -1)):
        found = compute_advantage(data.select(), "gdpo", reward_components=parts, component_weights=weights)
        assert found.batch["advantages"][:, 0].tolist() == pytest.approx([sign * 0.5**0.5, -sign * 0.5**0.5], rel=1e-4)
    assert component_metrics(parts)["gdpo/acc/mean"] == 0.5
    assert component_metrics(parts)["gdpo/style/std"] == pytest.approx(0.5**0.5)
    assert [component_metrics(parts)[f"gdpo/acc/{kind}"] for kind in ("max", "min")] == [1.0, 0.0]


def test_token_baselines_use_the_policys_distribution() -> None:
    data = DataProto.from_dict(
        tensors={
            "response_mask": torch.ones(2, 1),
            "token_level_rewards": torch.tensor([[1.0], [0.0]]),
            "old_log_probs": torch.tensor([[0.5], [0.5]]).log(),
            "sum_pi_squared": torch.tensor([[0.3], [0.1]]),
        },
        non_tensors={"uid": np.array(["a", "a"], dtype=object)},
    )
    found = compute_advantage(data.select(), "optimal_token_baseline").batch["advantages"]
    assert found[:, 0].tolist() == pytest.approx([0.25, -0.75])  # energies 0.3 and 0.1: baseline 0.75
    weighed = data.union(DataProto.from_dict(tensors={"rollout_is_weights": torch.tensor([[1.0], [3.0**0.5]])}))
    found = compute_advantage(weighed, "optimal_token_baseline").batch["advantages"]
    assert found[:, 0].tolist() == pytest.approx([0.5, -0.5])
    assert mean_sum_pi_squared(data) == {"actor/sum_pi_squared": pytest.approx(0.2)}


def test_an_estimator_gets_only_what_it_asks_for() -> None:
    """So that one of a user's own need not know of what others need."""

    @register_adv_estimator("with few words", needs_critic=False)
    def estimator(
        *, token_level_rewards, response_mask, values, index, reward_baselines, gamma, lam, norm_by_std
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return token_level_rewards, token_level_rewards

    columns = ("response_mask", "token_level_rewards", "old_log_probs", "sum_pi_squared")
    data = DataProto.from_dict(tensors={name: torch.ones(2, 1) for name in columns})
    compute_advantage(data, "with few words")


def test_pf_ppo_draws_rows_by_the_rewards_of_whole_responses() -> None:
    data = DataProto.from_dict(
        tensors={
            "response_mask": torch.tensor([[1, 1], [1, 0], [0, 0]]),
            "token_level_rewards": torch.tensor([[2.0, -2.0], [1.0, 9.0], [5.0, 5.0]]),
        }
    )
    for step in range(5):
        assert draw_rows(data, PfPpoConfig(), seed=1, step=step).tolist() == [1, 1, 1]
    # What rollout correction rejected as a whole is not drawn.
    data.batch["loss_mask"] = torch.tensor([[1, 1], [0, 0], [0, 0]])
    assert draw_rows(data, PfPpoConfig(), seed=1, step=1).tolist() == [0, 0, 0]


def test_the_measured_kl_is_a_mean_over_responses_with_tokens() -> None:
    """Two responses with a KL of 1 and 3 a token, and one without tokens."""
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    data = DataProto.from_dict(
        tensors={
            "response_mask": mask,
            "token_level_scores": torch.zeros(3, 2),
            "old_log_probs": torch.tensor([[1.0, 1.0], [3.0, 0.0], [9.0, 9.0]]),
            "ref_log_prob": torch.zeros(3, 2),
        }
    )
    _, metrics = apply_kl_penalty(data, FixedKLController(0.1))
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(2.0)
