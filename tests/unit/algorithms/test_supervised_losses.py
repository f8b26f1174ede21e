"""Numbers by hand, and the gradients that follow from the formulas."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.algorithms.supervised_losses import pair_score_losses, preference_losses, response_log_probs


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_pairs_without_margin_and_centering() -> None:
    losses, centering = pair_score_losses(torch.tensor([1.2, 0.1]), torch.tensor([0.3, 0.4]), torch.zeros(2), 0.0)
    assert losses.mean().item() == pytest.approx(0.597755, abs=1e-6)
    assert centering.tolist() == [0.0, 0.0]


def test_a_score_far_behind_gives_a_finite_loss() -> None:
    losses, _ = pair_score_losses(torch.tensor([-500.0]), torch.tensor([500.0]), torch.zeros(1), 0.0)
    assert losses.item() == 1000.0


def test_the_gradient_of_a_pair_is_how_wrong_it_is() -> None:
    chosen = torch.tensor([0.2], requires_grad=True)
    losses, _ = pair_score_losses(chosen, torch.tensor([0.5]), torch.tensor([0.1]), 0.0)
    losses.sum().backward()
    assert chosen.grad is not None
    assert chosen.grad.item() == pytest.approx(-sigmoid(0.5 - 0.2 + 0.1))


def test_log_probs_of_responses_and_of_their_tokens() -> None:
    log_probs, mask = torch.tensor([[-1.0, -2.0, -4.0], [-3.0, -9.0, -9.0]]), torch.tensor([[0, 1, 1], [1, 0, 0]])
    assert response_log_probs(log_probs, mask, per_token=False).tolist() == [-6.0, -3.0]
    assert response_log_probs(log_probs, mask, per_token=True).tolist() == [-3.0, -3.0]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_dpo_by_hand(beta: float, smoothing: float) -> None:
    chosen, rejected = torch.tensor([2.0, -1.0], requires_grad=True), torch.tensor([0.5, 0.25])
    losses = preference_losses(chosen, rejected, form="sigmoid", beta=beta, label_smoothing=smoothing)
    by_hand = [
        -(1 - smoothing) * math.log(sigmoid(beta * h)) - smoothing * math.log(sigmoid(-beta * h)) for h in (1.5, -1.25)
    ]
    assert losses.tolist() == pytest.approx(by_hand, rel=1e-5)
    losses.sum().backward()
    gradients = [
        -(1 - smoothing) * beta * sigmoid(-beta * h) + smoothing * beta * sigmoid(beta * h) for h in (1.5, -1.25)
    ]
    assert chosen.grad is not None
    assert chosen.grad.tolist() == pytest.approx(gradients, rel=1e-4)


def test_ipo_draws_the_difference_to_its_target() -> None:
    difference = torch.tensor([5.0], requires_grad=True)
    loss = preference_losses(difference, torch.zeros(1), form="ipo", beta=0.1)
    loss.backward()
    assert (loss.item(), difference.grad) == (0.0, torch.zeros(1))
