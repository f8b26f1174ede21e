"""Which ranks compute what of a sequence that they share, and models that can't be shared."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen2Config

from paceline.engine import sequence_parallel
from paceline.engine.sequence_parallel import SequenceGroup, heads_problem, ulysses_sdpa


class ThreadGroup(SequenceGroup):
    """A rank that is a thread, so that a test needs no processes."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.__dict__ |= {"group": dist.ProcessGroupGloo(store, rank, size), "place": (rank, size)}

    rank = property(lambda self: self.place[0])
    size = property(lambda self: self.place[1])


def all_to_all(received: torch.Tensor, sent: torch.Tensor, group: Any) -> None:
    group.alltoall_base(received, sent, [], []).wait()


def by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Attention in so many words: softmax over what is visible, head by head."""
    copies = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    scores = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
    return (scores.softmax(dim=-1) @ value).transpose(1, 2)


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(4, 2, 2), (4, 2, 4), (6, 2, 3), (6, 2, 6), (12, 3, 2)])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_shared_attention_and_its_gradients_are_those_of_one_rank(
    heads: int, key_heads: int, size: int, window: int | None, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_parallel.dist, "all_to_all_single", all_to_all)
    tokens, width, dice = 12, 8, torch.Generator().manual_seed(0)
    states = [torch.randn(1, count, tokens, width, generator=dice) for count in (heads, key_heads, key_heads)]
    weights = torch.randn(1, tokens, heads, width, generator=dice)
    visible = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if packed:
        visible &= torch.block_diag(torch.ones(5, 5), torch.ones(7, 7)).bool()
    told: dict[str, Any] = {"whole_lengths": (5, 7)} if packed else {"whole_mask": visible[None, None]}
    wanted = [one.clone().requires_grad_() for one in states]
    seen = visible if window is None else visible & torch.ones_like(visible).triu(1 - window)
    expected = by_hand(*wanted, seen)
    (expected * weights).sum().backward()
    store = dist.HashStore()

    def attend(rank: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        group = ThreadGroup(store, rank, size)
        own = [one.chunk(size, dim=2)[rank].clone().requires_grad_() for one in states]
        module = SimpleNamespace(training=True, is_causal=True)
        output, _ = ulysses_sdpa(module, *own, None, sequence_group=group, sliding_window=window, **told)
        return output.detach(), torch.autograd.grad((output * weights.chunk(size, dim=1)[rank]).sum(), own)

    with ThreadPoolExecutor(size) as threads:
        ranks = list(threads.map(attend, range(size)))
    torch.testing.assert_close(torch.cat([output for output, _ in ranks], dim=1), expected.detach())
    for number, whole in enumerate(wanted):
        torch.testing.assert_close(torch.cat([gradients[number] for _, gradients in ranks], dim=2), whole.grad)


@pytest.mark.parametrize(("size", "problem"), [(2, ""), (7, ""), (4, "4 does not divide its 14 attention heads")])
def test_heads_are_divided_evenly(size: int, problem: str) -> None:
    found = heads_problem(Qwen2Config(num_attention_heads=14, num_key_value_heads=2), size)
    assert found.startswith(problem)
    assert bool(found) == bool(problem)
