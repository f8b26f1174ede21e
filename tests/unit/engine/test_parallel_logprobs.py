from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from paceline.engine import logprobs
from paceline.engine.parallel_logprobs import parallel_log_probs_and_entropy

VOCABULARY, SIZE, LENGTH, TEMPERATURE = 11, 5, 9, 0.7


def test_parts_of_the_vocabulary_give_what_the_whole_gives(tmp_path: Path):
    mp.spawn(_compare, (tmp_path / "store",), nprocs=2)


def _compare(rank: int, store: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(LENGTH, SIZE, generator=generator)
    weight = torch.randn(VOCABULARY, SIZE, generator=generator) * 3
    tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
    scale = torch.randn(2, LENGTH, generator=generator)
    largest = 6  # 6 rows and 5
    own = slice(rank * largest, (rank + 1) * largest)
    for chunk in (2**24, 12):
        logprobs.CHUNK_ELEMENTS = chunk
        whole = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        expected = logprobs.hidden_log_probs_and_entropy(whole[0], whole[1], None, tokens, TEMPERATURE)
        (torch.stack(expected) * scale).sum().backward()
        parts = [hidden.clone().requires_grad_(), weight[own].clone().requires_grad_()]
        found = parallel_log_probs_and_entropy(
            *parts, tokens, TEMPERATURE, first=own.start, largest=largest, group=dist.group.WORLD
        )
        (torch.stack(found) * scale).sum().backward()
        torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(parts[0].grad, whole[0].grad, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(parts[1].grad, whole[1].grad[own], atol=1e-5, rtol=1e-5)
    dist.destroy_process_group()
