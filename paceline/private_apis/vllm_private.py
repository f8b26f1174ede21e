"""Private names of vLLM, and what starting it does to a process that it takes for its own."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from vllm import LLM

TRIED_WITH = "0.32.0"

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else the model lives in a process of its own, out of reach of our tensors
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other runner has no place to see log-probs before top-p and top-k
    "VLLM_NO_USAGE_STATS": "1",  # a training run reports to nobody
}
"""Variables of the process that vLLM is started in."""
RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"


def report_full_log_probs(llm: LLM) -> None:
    """Make vLLM's sampler report log-probs of the full distribution, as a training engine recomputes them.

    Its own are taken after top-p and top-k have cut it.
    """
    llm.collective_rpc(_replace_sampler)


def _replace_sampler(worker: Any) -> None:
    sampler = worker.model_runner.sampler.topk_topp_sampler
    sampler.logprobs_mode = "raw_logprobs"  # what it would compute is replaced
    cut_and_sample = sampler.forward

    def forward(logits: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = logits.log_softmax(dim=-1, dtype=torch.float32)  # before `logits` is changed in place
        return cut_and_sample(logits, *args)[0], log_probs

    sampler.forward = forward


def reload_weights(llm: LLM, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy weights into vLLM's model in place. An error of the iterator would leave layers without memory."""
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named_tensors})


def silence_reload() -> None:
    """No warning at every reload of buffers that are in no state dict. Callers check that all weights come."""
    logging.getLogger(RELOAD_LOGGER).setLevel(logging.ERROR)


def engine_peers() -> dist.ProcessGroup:
    """The ranks that share this rank's engine."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().cpu_group


@contextmanager
def shared_memory_named(name: str) -> Iterator[None]:
    """The memory that ranks of an engine on a CPU share begins with this name, if the engine is made inside."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    owner: Any = _CPUSHMDistributed
    name_by_vllm = owner.make_group_name
    owner.make_group_name = staticmethod(lambda group: name + name_by_vllm(group).lstrip("/"))
    try:
        yield
    finally:
        owner.make_group_name = staticmethod(name_by_vllm)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """The process's random state belongs to training; vLLM seeds it and draws from it."""
    python, legacy = random.getstate(), np.random.get_state()
    try:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        with torch.random.fork_rng(device_type=accelerator.type if accelerator is not None else "cuda"):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)


@contextmanager
def process_kept() -> Iterator[None]:
    """Undo what else starting vLLM does to the process: random state, threads, what child processes would inherit."""
    set_num_threads = torch.set_num_threads  # on a CPU vLLM puts a function in its place that does nothing
    names = ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")
    variables = {name: os.environ.get(name) for name in names}
    try:
        with random_state_kept():
            yield
    finally:
        torch.set_num_threads = set_num_threads
        for name, value in variables.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
