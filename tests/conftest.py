"""One compute thread per test process: tiny tensors gain nothing from more, and processes fight over the cores."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest

os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session", autouse=True)
def cache_outside_the_home_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For this process and all that it starts, Ray workers included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def process_groups_end_with_their_file() -> Iterator[None]:
    """Files share a process, in an order of their own. vLLM keeps its groups in module variables; left to the garbage
    collector, it would end those of a later file, or that file theirs."""
    yield
    dist, vllm = (sys.modules.get(name) for name in ("torch.distributed", "vllm.distributed.parallel_state"))
    if vllm is not None and vllm._WORLD is not None:  # collecting takes seconds once vLLM is loaded
        gc.collect()
        vllm.cleanup_dist_env_and_memory()
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()
