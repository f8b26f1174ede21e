"""vLLM as the rollout engine, in the worker's own process. Its weights come from the actor, never through the disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from paceline.errors import DataError, PacelineError
from paceline.log_file import output_to_log_file
from paceline.private_apis.vllm_private import (
    ENVIRONMENT,
    engine_peers,
    process_kept,
    random_state_kept,
    reload_weights,
    report_full_log_probs,
    silence_reload,
)
from paceline.rollout.rollout_interface import (
    Completion,
    RolloutEngine,
    RolloutSpec,
    SamplingParams,
    check_finite,
    check_requests,
    register_rollout,
    token_ids,
)
from paceline.rollout.vllm_arguments import engine_arguments
from paceline.rollout.vllm_memory import shared_memory_of_this_run
from paceline.rollout.weights import whole_state

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.logprobs import Logprob


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
        model_config = llm.model_config
        self.max_model_len = model_config.max_model_len
        # Also for a helper of vLLM's sampler, which else compiles for 10 s at the first call, with a C++ compiler.
        self.stance = "force_eager" if model_config.enforce_eager else "default"
        with torch.device("meta"):
            self.skeleton = AutoModelForCausalLM.from_config(
                model_config.hf_config, trust_remote_code=model_config.trust_remote_code
            )
        report_full_log_probs(llm)

    @classmethod
    def from_spec(cls, spec: RolloutSpec) -> VllmRollout:
        """Start vLLM on the model's folder: with its weights, or with random ones until the first `update_weights`."""
        is_dummy = spec.config.load_format.startswith("dummy")
        sleeps = spec.config.free_cache_engine and spec.device != "cpu"
        is_shared = spec.config.tensor_model_parallel_size > 1
        with process_kept(), output_to_log_file():
            os.environ.update(ENVIRONMENT)
            # Its lines then go where ours go: warnings about itself to the log file. VLLM_LOGGING_LEVEL still holds.
            if os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0") == "0":
                logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "WARNING").upper())
            if is_shared:
                os.environ.update(_place_of_this_rank(spec))
            from vllm import LLM

            arguments = engine_arguments(spec, load_format="dummy" if is_dummy else "auto", enable_sleep_mode=sleeps)
            with shared_memory_of_this_run() if is_shared and spec.device == "cpu" else nullcontext():
                llm = LLM(**arguments)
        silence_reload()
        configured = llm.model_config.try_get_generation_config().get("eos_token_id")
        eos = {*spec.eos_token_ids, *token_ids(configured)}
        return cls(llm, eos, has_weights=not is_dummy, sleeps=sleeps, peers=engine_peers() if is_shared else None)

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
        from vllm import TokensPrompt

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
        with random_state_kept(), torch.compiler.set_stance(self.stance):
            # What an earlier call left in the cache may be of old weights, or differ in the last bits.
            self.llm.reset_prefix_cache()
            outputs = self.llm.generate(
                [TokensPrompt(prompt_token_ids=ids) for ids in prompts], requests, use_tqdm=False
            )
        completions = []
        for output in (request.outputs[0] for request in outputs):
            tokens = list(output.token_ids)
            by_place = cast(list[dict[int, "Logprob"]], output.logprobs)
            log_probs = [place[token].logprob for token, place in zip(tokens, by_place, strict=True)]
            completions.append(Completion(tokens, log_probs, tokens[-1] in eos))
        check_finite(completions)
        return completions

    def update_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the weights into vLLM in place. After an error it holds a mix of old and new weights."""
        self.wake()
        problems: list[PacelineError] = []

        def checked() -> Iterator[tuple[str, torch.Tensor]]:
            try:
                # Tied weights come under all of their names: vLLM keeps old ones where a name does not come.
                yield from whole_state(self.skeleton, named_tensors)
            except PacelineError as error:
                problems.append(error)

        reload_weights(self.llm, checked())
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
