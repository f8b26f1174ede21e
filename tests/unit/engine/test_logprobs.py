from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.engine.logprobs import token_log_probs_and_entropy


def reference(logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    return distribution.log_prob(tokens), distribution.entropy()


@pytest.fixture
def logits() -> Tensor:
    return 3 * torch.randn(3, 4, 11, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(11, (3, 4), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.0])
def test_log_probs_and_entropy_are_those_of_the_tempered_distribution(
    logits: Tensor, tokens: Tensor, temperature: float
) -> None:
    log_probs, entropy = token_log_probs_and_entropy(logits, tokens, temperature)
    expected_log_probs, expected_entropy = reference(logits, tokens, temperature)
    torch.testing.assert_close(log_probs, expected_log_probs)
    torch.testing.assert_close(entropy, expected_entropy)


@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.7, -0.2)])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_gradients_are_those_of_autograd(
    logits: Tensor, tokens: Tensor, weights: tuple[float, float], temperature: float
) -> None:
    gradients = []
    for function in (token_log_probs_and_entropy, reference):
        leaf = logits.clone().requires_grad_()
        log_probs, entropy = function(leaf, tokens, temperature)
        position = torch.arange(1.0, 5.0)
        loss = weights[0] * (log_probs * position).sum() + weights[1] * (entropy * position**2).sum()
        loss.backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients)


def test_an_output_without_part_in_the_loss_costs_no_gradient(logits: Tensor, tokens: Tensor) -> None:
    leaf = logits.clone().requires_grad_()
    token_log_probs_and_entropy(leaf, tokens, 1.0)[0].sum().backward()
    expected = torch.nn.functional.one_hot(tokens, 11) - torch.softmax(logits, -1)
    torch.testing.assert_close(leaf.grad, expected)


def test_half_precision_logits_are_summed_in_float32(logits: Tensor, tokens: Tensor) -> None:
    leaf = logits.bfloat16().requires_grad_()
    log_probs, entropy = token_log_probs_and_entropy(leaf, tokens, 1.0)
    torch.testing.assert_close(log_probs, reference(leaf.detach().float(), tokens, 1.0)[0])
    assert (log_probs.dtype, entropy.dtype) == (torch.float32, torch.float32)
    (log_probs.sum() + entropy.sum()).backward()
    assert leaf.grad.dtype == torch.bfloat16


def test_only_the_logits_are_kept_for_the_backward_pass(logits: Tensor, tokens: Tensor) -> None:
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    leaf = logits.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_log_probs_and_entropy(leaf, tokens, 0.5)
    assert sorted(kept) == [tokens.numel(), tokens.numel(), logits.numel()]


def test_a_temperature_of_zero_is_an_error(logits: Tensor, tokens: Tensor) -> None:
    with pytest.raises(ValueError, match="temperature is 0"):
        token_log_probs_and_entropy(logits, tokens, 0.0)
