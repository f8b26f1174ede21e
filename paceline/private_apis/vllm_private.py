"""Private names of vLLM, and what starting it does to a process, and to a machine, that it takes for its own."""

from __future__ import annotations

import fcntl
import logging
import os
import random
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.logprobs import SampleLogprobs

TRIED_WITH = "0.32.0"

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else the model lives in a process of its own, out of reach of our tensors
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other runner has no place to see log-probs before top-p and top-k
    "VLLM_NO_USAGE_STATS": "1",  # a training run sends no statistics
}
"""Variables of the process that vLLM is started in."""
DRAWN = "paceline_drawn"
"""Among a request's `extra_args`: how many tokens its seed has chosen before."""
RELOAD_LOGGER = "vllm.model_executor.model_loader.reload.layerwise"
SHARED_MEMORY = Path("/dev/shm")
MEMORY_PREFIX = "paceline-vllm-"
_held_locks: list[int] = []
"""Descriptors of the locks of this process; the kernel releases them when it ends, however that happens."""


def prepare_sampler(llm: LLM) -> None:
    """Make vLLM's sampler report log-probs of the full distribution, and go on with a request's random numbers.

    Its own log-probs are taken after top-p and top-k have cut the distribution; a training engine recomputes the full
    one. A request with `extra_args={DRAWN: k}` leaves the first k random numbers of its seed out. And on a CPU a prompt
    may be computed in parts: vLLM samples after each, and can't take the random numbers of all but the last back.
    """
    llm.collective_rpc(_replace_sampler)


def _replace_sampler(worker: Any) -> None:
    runner = worker.model_runner
    sampler = runner.sampler.topk_topp_sampler
    sampler.logprobs_mode = "raw_logprobs"  # what it would compute is replaced
    cut_and_sample, update_states, keep_books = sampler.forward, runner._update_states, runner._bookkeeping_sync
    is_cpu = runner.device.type == "cpu"

    def forward(
        logits: torch.Tensor, generators: dict[int, torch.Generator], *limits: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = logits.log_softmax(dim=-1, dtype=torch.float32)  # before `logits` is changed in place
        if is_cpu:  # these rows may draw from the global state, since their tokens are thrown away
            is_part = runner.discard_request_mask.np
            generators = {row: generator for row, generator in generators.items() if not is_part[row]}
        return cut_and_sample(logits, generators, *limits)[0], log_probs

    def keep_books_without_offsets(*args: Any, **kwargs: Any) -> Any:
        generators, runner.input_batch.generators = runner.input_batch.generators, {}
        try:
            return keep_books(*args, **kwargs)
        finally:
            runner.input_batch.generators = generators

    def update_and_draw(scheduler_output: Any) -> Any:
        result = update_states(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            generator = runner.requests[new.req_id].generator
            if generator is not None:
                for _ in range((new.sampling_params.extra_args or {}).get(DRAWN, 0)):
                    logits = torch.zeros(1, runner.input_batch.vocab_size, device=generator.device)
                    cut_and_sample(logits, {0: generator}, None, None)
        return result

    sampler.forward, runner._update_states = forward, update_and_draw
    if is_cpu:
        runner._bookkeeping_sync = keep_books_without_offsets


def sampled_so_far(llm: LLM, request_id: str) -> tuple[list[int], SampleLogprobs | None]:
    """The tokens of a request under way, and vLLM's log-probs of each place."""
    state = llm.llm_engine.output_processor.request_states[request_id]
    assert state.detokenizer is not None
    assert state.logprobs_processor is not None
    return list(state.detokenizer.output_token_ids), state.logprobs_processor.logprobs


def num_running(llm: LLM) -> int:
    """Requests that have a place in the cache."""
    client: Any = llm.llm_engine.engine_core  # of an engine in this process
    return len(client.engine_core.scheduler.running)


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
def random_state_kept() -> Iterator[None]:
    """The process's random state belongs to training; vLLM seeds it and draws from it."""
    python, legacy = random.getstate(), np.random.get_state()
    try:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kind, devices = (
            ("cuda", []) if accelerator is None else (accelerator.type, [torch.accelerator.current_device_index()])
        )
        with torch.random.fork_rng(devices, device_type=kind):  # without a list it would make a context on every device
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


@contextmanager
def shared_memory_of_this_run(folder: Path = SHARED_MEMORY) -> Iterator[None]:
    """The ranks of an engine on a CPU share memory under a name of this run alone. All of them must enter this.

    vLLM names it alike in every run, so that two runs on a machine would write into each other's, and what a killed one
    left would keep the next from starting. A lock on a file beside the memory, not a process id, says whether an owner
    is alive: containers may share /dev/shm and see none of each other's processes.
    """
    remove_left_memory(folder)
    names = [f"{MEMORY_PREFIX}{uuid.uuid4().hex}"]
    if dist.is_initialized():
        dist.broadcast_object_list(names, src=0)
    hold_memory(names[0], folder)
    with _shared_memory_named(names[0]):
        yield


def hold_memory(name: str, folder: Path = SHARED_MEMORY) -> int:
    """Lock the name for as long as this process lives, together with other ranks."""
    path = folder / f"{name}.lock"
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with suppress(OSError):  # another process may have removed it between the two lines
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                _held_locks.append(descriptor)
                return descriptor
        os.close(descriptor)


def remove_left_memory(folder: Path = SHARED_MEMORY) -> None:
    """Remove memory whose owners have all ended. Memory without a lock is not ours, and stays."""
    for lock in folder.glob(f"{MEMORY_PREFIX}*.lock"):
        with suppress(OSError):  # its owner lives, or is another user, or another rank was faster
            descriptor = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for file in folder.glob(f"{lock.stem}*"):
                    if file != lock:
                        file.unlink(missing_ok=True)
                lock.unlink()
            finally:
                os.close(descriptor)


@contextmanager
def _shared_memory_named(name: str) -> Iterator[None]:
    """The memory that ranks of an engine on a CPU share begins with this name, if the engine is made inside."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    owner: Any = _CPUSHMDistributed
    name_by_vllm = owner.make_group_name
    owner.make_group_name = staticmethod(lambda group: name + name_by_vllm(group).lstrip("/"))
    try:
        yield
    finally:
        owner.make_group_name = staticmethod(name_by_vllm)
