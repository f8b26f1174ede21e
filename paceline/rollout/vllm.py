"""vLLM as the rollout engine, in the worker's own process. Its weights come from the actor, never through the disk."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from paceline.errors import DataError, PacelineError
from paceline.rollout.rollout_interface import (
    Completion,
    RolloutEngine,
    RolloutSpec,
    SamplingParams,
    check_finite,
    check_requests,
    token_ids,
)
from paceline.rollout.rollout_registry import register_rollout
from paceline.rollout.vllm_arguments import engine_arguments
from paceline.rollout.weights import whole_state

if TYPE_CHECKING:
    from vllm import LLM

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else the model lives in a process of its own, out of reach of our tensors
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other runner has no place to see log-probs before top-p and top-k
    "VLLM_NO_USAGE_STATS": "1",  # a training run reports to nobody
}


@register_rollout("vllm")
class VllmRollout(RolloutEngine):
    """One vLLM engine per worker, or per `tensor_model_parallel_size` workers, with a model beside the actor's.

    Workers that share an engine are neighbours by rank. Each runs a part of every layer in its own process, so all of
    them must make the same calls; each gives its own prompts and gets the responses to them.
    """

    keeps_own_weights = True

    def __init__(
        self,
        llm: LLM,
        eos_token_ids: set[int],
        *,
        has_weights: bool,
        sleeps: bool,
        peers: dist.ProcessGroup | None = None,
    ) -> None:
        self.llm = llm
        self.peers = peers
        self.eos_token_ids = sorted(eos_token_ids)
        self.has_weights = has_weights
        self.sleeps, self.is_asleep = sleeps, False
        model_config = llm.llm_engine.model_config
        self.max_model_len = model_config.max_model_len
        # Also for a helper of vLLM's sampler, which else compiles for 10 s at the first call, with a C++ compiler.
        self.stance = "force_eager" if model_config.enforce_eager else "default"
        with torch.device("meta"):
            self.skeleton = AutoModelForCausalLM.from_config(
                model_config.hf_config, trust_remote_code=model_config.trust_remote_code
            )
        llm.collective_rpc(_report_full_log_probs)

    @classmethod
    def from_spec(cls, spec: RolloutSpec) -> VllmRollout:
        """Start vLLM on the model's folder: with its weights, or with random ones until the first `update_weights`."""
        is_dummy = spec.config.load_format.startswith("dummy")
        sleeps = spec.config.free_cache_engine and spec.device != "cpu"
        is_shared = spec.config.tensor_model_parallel_size > 1
        with _process_kept():
            os.environ.update(_ENVIRONMENT)
            if is_shared:
                os.environ.update(_place_of_this_rank(spec))
                _remove_memory_of_killed_runs()
            from vllm import LLM

            llm = LLM(**engine_arguments(spec, load_format="dummy" if is_dummy else "auto", enable_sleep_mode=sleeps))
        # It would warn at every update of buffers that are in no state dict; that all weights come is checked here.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        configured = llm.llm_engine.model_config.try_get_generation_config().get("eos_token_id")
        eos = {*spec.eos_token_ids, *token_ids(configured)}
        return cls(llm, eos, has_weights=not is_dummy, sleeps=sleeps, peers=_peers() if is_shared else None)

    def generate(self, prompts: list[list[int]], sampling: SamplingParams, seeds: list[int]) -> list[Completion]:
        """One response per prompt, in order. Equal prompts share what vLLM's prefix cache holds of them."""
        everyone = [(prompts, seeds)]
        if self.peers is not None:
            everyone *= self.peers.size()
            dist.all_gather_object(everyone, (prompts, seeds), self.peers)
        for requests in everyone:  # also those of peers: what one of them refuses, all refuse
            check_requests(*requests)
        every_prompt = [prompt for own, _ in everyone for prompt in own]
        completions = self._generate(every_prompt, sampling, [seed for _, own in everyone for seed in own])
        start = sum(len(own) for own, _ in everyone[: self.peers.rank()]) if self.peers is not None else 0
        return completions[start : start + len(prompts)]

    def _generate(self, prompts: list[list[int]], sampling: SamplingParams, seeds: list[int]) -> list[Completion]:
        from vllm import SamplingParams as VllmSamplingParams

        if not prompts:
            return []
        if not self.has_weights:
            raise PacelineError("vLLM has random weights (load_format=dummy): call update_weights before generate.")
        longest = max(len(prompt) for prompt in prompts)
        if longest + sampling.max_tokens > self.max_model_len:
            raise DataError(
                f"a prompt of {longest} and a response of {sampling.max_tokens} tokens are more than vLLM was started "
                f"for, {self.max_model_len}: raise data.max_prompt_length or actor_rollout_ref.rollout.engine_kwargs."
                "vllm.max_model_len."
            )
        self.wake()
        eos = [] if sampling.ignore_eos else self.eos_token_ids
        requests = [
            VllmSamplingParams(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature if sampling.do_sample else 0.0,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                seed=seed,
                stop_token_ids=eos,
                ignore_eos=True,  # vLLM's own, in whose place there are stop_token_ids
                logprobs=0,
                detokenize=False,
            )
            for seed in seeds
        ]
        with _random_state_kept(), torch.compiler.set_stance(self.stance):
            # What an earlier call left in the cache may be of old weights, or differ in the last bits.
            self.llm.reset_prefix_cache()
            outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], requests, use_tqdm=False)
        completions = []
        for output in (request.outputs[0] for request in outputs):
            tokens = list(output.token_ids)
            log_probs = [place[token].logprob for token, place in zip(tokens, output.logprobs, strict=True)]
            completions.append(Completion(tokens, log_probs, tokens[-1] in eos))
        check_finite(completions)
        return completions

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the weights into vLLM in place. After an error it holds a mix of old and new weights."""
        self.wake()
        problems: list[PacelineError] = []

        def checked() -> Iterator[tuple[str, torch.Tensor]]:
            # Raised in the middle, an error would leave vLLM with layers that have no memory.
            try:
                # Tied weights come under all of their names: vLLM keeps old ones where a name does not come.
                yield from whole_state(self.skeleton, named_tensors)
            except PacelineError as error:
                problems.append(error)

        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": checked()})
        if problems:
            raise problems[0]
        self.has_weights = True

    def sleep(self) -> None:
        """Give the weights' and the cache's device memory back, where the platform can; not on a CPU."""
        if self.sleeps and not self.is_asleep:
            self.llm.sleep(level=1)
            self.is_asleep = True

    def wake(self) -> None:
        """Take the memory again. `generate` and `update_weights` do it themselves."""
        if self.is_asleep:
            self.llm.wake_up()
            self.is_asleep = False


def _place_of_this_rank(spec: RolloutSpec) -> dict[str, str]:
    """What vLLM reads to join the process group that is there, as its external launcher."""
    shared_by = spec.config.tensor_model_parallel_size
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size % shared_by:
        raise PacelineError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={shared_by} does not divide the {world_size} ranks "
            "of the actor's process group. Set it to a divisor."
        )
    index = 0 if spec.device == "cpu" else torch.accelerator.current_device_index()
    return {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(index)}


def _remove_memory_of_killed_runs(folder: Path = Path("/dev/shm")) -> None:
    """On a CPU vLLM's ranks share memory under a name that is the same in every run; what a killed one left would keep
    the next from starting. No rank has made its own yet: that takes all of them."""
    for file in folder.glob("*-cpushm_*"):
        if not _is_mapped(file):
            with suppress(OSError):  # another rank was faster, or it is someone else's
                file.unlink()


def _is_mapped(file: Path) -> bool:
    """Whether a process that this user may look at has the file in its memory."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it ended, or is someone else's
            if str(file) in maps.read_text():
                return True
    return False


def _peers() -> dist.ProcessGroup:
    """The ranks that share this rank's engine."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().cpu_group


def _report_full_log_probs(worker: Any) -> None:
    """Make vLLM's sampler report log-probs of the full distribution, as a training engine recomputes them.

    Its own are taken after top-p and top-k have cut it.
    """
    sampler = worker.model_runner.sampler.topk_topp_sampler
    sampler.logprobs_mode = "raw_logprobs"  # what it would compute is replaced
    cut_and_sample = sampler.forward

    def forward(logits: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs = logits.log_softmax(dim=-1, dtype=torch.float32)  # before `logits` is changed in place
        return cut_and_sample(logits, *args)[0], log_probs

    sampler.forward = forward


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """The process's random state belongs to training; vLLM seeds it and draws from it."""
    python, legacy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)


@contextmanager
def _process_kept() -> Iterator[None]:
    """Undo what else starting vLLM does to the process: random state, threads, what child processes would inherit."""
    set_num_threads = torch.set_num_threads  # on a CPU vLLM puts a function in its place that does nothing
    names = ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK")
    variables = {name: os.environ.get(name) for name in names}
    try:
        with _random_state_kept():
            yield
    finally:
        torch.set_num_threads = set_num_threads
        for name, value in variables.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
