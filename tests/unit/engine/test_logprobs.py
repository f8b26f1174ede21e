from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.engine import logprobs
from paceline.engine.logprobs import (
    hidden_log_probs_and_entropy,
    parallel_log_probs_and_entropy,
    token_log_probs_and_entropy,
)


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


def squares_of(logits: Tensor, temperature: float) -> Tensor:
    """By another way than the code's: e^(lse(2z) - 2 lse(z))."""
    scaled = logits / temperature
    return (torch.logsumexp(2 * scaled, -1) - 2 * torch.logsumexp(scaled, -1)).exp()


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.0])
def test_the_sum_of_squared_probabilities_comes_beside_the_others_and_changes_neither_them_nor_gradients(
    logits: Tensor, tokens: Tensor, temperature: float
) -> None:
    results = []
    for asked in (True, False):
        leaf = logits.clone().requires_grad_()
        columns = token_log_probs_and_entropy(leaf, tokens, temperature, sum_pi_squared=asked)
        (columns[0].sum() + 0.3 * columns[1].sum()).backward()
        results.append([*columns[:2], leaf.grad])
        if asked:
            torch.testing.assert_close(columns[2], squares_of(logits, temperature))
            assert not columns[2].requires_grad
        else:
            assert len(columns) == 2
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("chunk", [1, 22, 10**6])
def test_chunks_change_no_sum_of_squared_probabilities(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    hidden, weight, bias = head_inputs()
    columns = hidden_log_probs_and_entropy(hidden, weight, bias, HEAD_TOKENS, 0.7, sum_pi_squared=True)
    torch.testing.assert_close(columns[2], squares_of(linear(hidden, weight, bias), 0.7).detach())
    head_loss(*columns[:2]).backward()
    assert hidden.grad is not None


def test_a_temperature_of_zero_is_an_error(logits: Tensor, tokens: Tensor) -> None:
    with pytest.raises(ValueError, match="temperature is 0"):
        token_log_probs_and_entropy(logits, tokens, 0.0)


def head_inputs(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> list[Tensor | None]:
    """Hidden states of 7 tokens, a head of 11 words and its bias, all to be differentiated."""
    generator = torch.Generator().manual_seed(2)
    shapes = [(7, 5), (11, 5), (11,)]
    leaves = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return leaves if bias else [*leaves[:2], None]


def head_loss(log_probs: Tensor, entropy: Tensor) -> Tensor:
    position = torch.arange(1.0, len(log_probs) + 1)
    return (log_probs * position).sum() - 0.3 * (entropy * position.sqrt()).sum()


HEAD_TOKENS = torch.tensor([3, 0, 10, 3, 5, 1, 9])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 11, 22, 33, 10**6])
def test_chunks_of_logits_change_neither_results_nor_gradients(
    monkeypatch: pytest.MonkeyPatch, chunk: int, bias: bool
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    outcomes = []
    for chunked in (True, False):
        hidden, weight, offset = leaves = head_inputs(bias=bias)
        if chunked:
            results = hidden_log_probs_and_entropy(hidden, weight, offset, HEAD_TOKENS, 0.7)
        else:
            results = reference(linear(hidden, weight, offset), HEAD_TOKENS, 0.7)
        head_loss(*results).backward()
        outcomes.append([*results, *(leaf.grad for leaf in leaves if leaf is not None)])
    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("trained", [0, 1])
def test_a_frozen_head_or_a_frozen_body_has_no_gradient(monkeypatch: pytest.MonkeyPatch, trained: int) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 22)
    leaves = head_inputs()
    for index, leaf in enumerate(leaves):
        leaf.requires_grad_(index == trained)
    head_loss(*hidden_log_probs_and_entropy(*leaves, HEAD_TOKENS, 1.0)).backward()
    assert [leaf.grad is not None for leaf in leaves] == [index == trained for index in range(3)]


def test_no_tokens_give_gradients_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without response tokens takes part in the reduction of gradients all the same."""
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 0)
    hidden, weight, bias = head_inputs()
    log_probs, entropy = hidden_log_probs_and_entropy(hidden[:0], weight, bias, HEAD_TOKENS[:0], 1.0)
    (log_probs.sum() + entropy.sum()).backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


@pytest.mark.parametrize("chunk", [22, 10**6])
def test_only_the_head_computes_in_the_type_of_autocast_and_in_both_passes(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    seen = []
    for autocast in (True, False):
        leaves = head_inputs()
        inputs = leaves if autocast else [leaf.bfloat16() for leaf in leaves]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            results = hidden_log_probs_and_entropy(*inputs, HEAD_TOKENS, 1.0)
        head_loss(*results).backward()
        assert results[0].dtype == torch.float32
        seen.append([*results, *(leaf.grad for leaf in leaves)])
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one, other)


class LargestTensor(TorchDispatchMode):
    """Watches how many elements the largest tensor has that any operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("fits", [True, False])
def test_no_tensor_is_larger_than_a_chunk_of_logits(monkeypatch: pytest.MonkeyPatch, fits: bool) -> None:
    num_tokens, size, vocabulary, chunk = 100, 4, 500, 5000
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", num_tokens * vocabulary if fits else chunk)
    hidden, weight = torch.randn(num_tokens, size).requires_grad_(), torch.randn(vocabulary, size).requires_grad_()
    tokens = torch.zeros(num_tokens, dtype=torch.int64)
    with LargestTensor() as largest:
        log_probs, entropy = hidden_log_probs_and_entropy(hidden, weight, None, tokens, 1.0)
        (log_probs.sum() + entropy.sum()).backward()
    assert largest.elements == (num_tokens * vocabulary if fits else chunk)


@pytest.mark.parametrize("chunk", [2**24, 12])
def test_parts_of_the_vocabulary_give_what_the_whole_gives(chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as ranks:  # threads: a process would load torch first
        list(ranks.map(lambda rank: _compare(rank, store), range(2)))


def _compare(rank: int, store: dist.Store) -> None:
    group = dist.ProcessGroupGloo(store, rank, 2)
    vocabulary, size, length, temperature = 11, 5, 9, 0.7
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(length, size, generator=generator)
    weight = torch.randn(vocabulary, size, generator=generator) * 3
    tokens = torch.randint(0, vocabulary, (length,), generator=generator)
    scale = torch.randn(2, length, generator=generator)
    largest = 6  # 6 rows and 5
    own = slice(rank * largest, (rank + 1) * largest)
    whole = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected = logprobs.hidden_log_probs_and_entropy(whole[0], whole[1], None, tokens, temperature)
    (torch.stack(expected) * scale).sum().backward()
    parts = [hidden.clone().requires_grad_(), weight[own].clone().requires_grad_()]
    places = {"first": own.start, "largest": largest, "group": group}
    found = parallel_log_probs_and_entropy(*parts, tokens, temperature, **places)
    (torch.stack(found) * scale).sum().backward()
    *others, squares = parallel_log_probs_and_entropy(*parts, tokens, temperature, **places, sum_pi_squared=True)
    assert torch.equal(torch.stack(others), torch.stack(found))
    torch.testing.assert_close(squares, squares_of(hidden @ weight.T, temperature), atol=1e-6, rtol=1e-5)
    assert not squares.requires_grad
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(parts[0].grad, whole[0].grad, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(parts[1].grad, whole[1].grad[own], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [7, 2**24])
def test_several_tokens_at_a_place_have_their_log_probs_and_gradients(
    monkeypatch: pytest.MonkeyPatch, logits: Tensor, chunk: int
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    tokens = torch.randint(11, (3, 4, 5), generator=torch.Generator().manual_seed(2))
    weights = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(3))
    gradients = []
    for log_probs_of in (
        lambda leaf: token_log_probs_and_entropy(leaf, tokens, 0.7)[0],
        lambda leaf: (leaf / 0.7).log_softmax(dim=-1).gather(-1, tokens),
    ):
        leaf = logits.clone().requires_grad_()
        found = log_probs_of(leaf)
        (found * weights).sum().backward()
        gradients.append((found.detach(), leaf.grad))
    torch.testing.assert_close(gradients[0][0], gradients[1][0])
    torch.testing.assert_close(gradients[0][1], gradients[1][1])


@pytest.mark.parametrize("chunk", [7, 2**24])
def test_several_tokens_from_hidden_states(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(11, (6, 3), generator=generator)
    hidden, weight = torch.randn(6, 4, generator=generator), torch.randn(11, 4, generator=generator)
    answers = []
    for log_probs_of in (
        lambda h, w: hidden_log_probs_and_entropy(h, w, None, tokens, 1.0)[0],
        lambda h, w: linear(h, w).log_softmax(dim=-1).gather(-1, tokens),
    ):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        found = log_probs_of(h, w)
        found.square().sum().backward()
        answers.append((found.detach(), h.grad, w.grad))
    for mine, expected in zip(*answers, strict=True):
        torch.testing.assert_close(mine, expected)
