"""vLLM as the rollout engine, in the worker's own process. Its weights come from the actor, never through the disk."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import psutil
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from paceline.errors import ConfigError, DataError, PacelineError
from paceline.log_file import output_to_log_file
from paceline.private_apis.vllm_layout import WeightPlace, model_of, place_of
from paceline.private_apis.vllm_private import (
    DRAWN,
    ENVIRONMENT,
    engine_peers,
    num_running,
    prepare_sampler,
    process_kept,
    random_state_kept,
    reload_weights,
    sampled_so_far,
    shared_memory_of_this_run,
    silence_reload,
)
from paceline.rollout.held_weights import Held, fixed_input
from paceline.rollout.rollout_interface import (
    CachePolicy,
    Completion,
    Request,
    RequestId,
    RolloutEngine,
    RolloutSpec,
    SamplingParams,
    check_requests,
    register_rollout,
    token_ids,
    whole_state,
)
from paceline.rollout.vllm_adapter import AdapterFolder, adapted_policy, held_adapter, room_for_adapter

if TYPE_CHECKING:
    from vllm import LLM
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.logprobs import Logprob, SampleLogprobs
    from vllm.outputs import RequestOutput

CPU_BLOCK = 128
"""Tokens of a block of vLLM's cache on a CPU."""
OURS = {
    "model",
    "trust_remote_code",
    "load_format",
    "enable_sleep_mode",
    "logprobs_mode",
    "skip_tokenizer_init",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "distributed_executor_backend",
}
"""Arguments that `engine_kwargs.vllm` can't have: other keys choose them, or the engine relies on them."""


@register_rollout("vllm")
class VllmRollout(RolloutEngine):
    """One vLLM engine per worker, or per `tensor_model_parallel_size` workers, with a model beside the actor's.

    Workers that share an engine are neighbours by rank. Each runs a part of every layer in its own process, so all of
    them must make the same calls: they call `generate` alone, where each gives its own prompts and gets the responses
    to them.
    """

    keeps_own_weights = True

    def __init__(
        self,
        llm: LLM,
        eos_token_ids: set[int],
        *,
        has_weights: bool,
        sleeps: bool,
        adapter: AdapterFolder | None = None,
        peers: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.llm = llm
        self._ids: dict[RequestId, str] = {}
        """Of the requests under way, the ids that vLLM gave them."""
        self._names: dict[str, RequestId] = {}
        """The requests under way by the ids in vLLM's outputs, which are those that we gave it."""
        self.adapter = adapter
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
        prepare_sampler(llm)

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
        policy = adapted_policy(spec.model, spec.config)
        configured = llm.model_config.try_get_generation_config().get("eos_token_id")
        eos = {*spec.eos_token_ids, *token_ids(configured)}
        return cls(
            llm,
            eos,
            has_weights=not is_dummy,
            sleeps=sleeps,
            adapter=AdapterFolder(policy) if policy is not None else None,
            peers=engine_peers() if is_shared else None,
        )

    def generate(self, prompts: list[list[int]], sampling: SamplingParams, seeds: list[int]) -> list[Completion]:
        """One response per prompt, in order. Equal prompts share what vLLM's prefix cache holds of them."""
        if self.peers is None:
            return super().generate(prompts, sampling, seeds)
        everyone = [(prompts, seeds)] * self.peers.size()
        dist.all_gather_object(everyone, (prompts, seeds), self.peers)
        for requests in everyone:  # also those of peers: what one of them refuses, all refuse
            check_requests(*requests)
        every_prompt = [prompt for own, _ in everyone for prompt in own]
        completions = super().generate(every_prompt, sampling, [seed for _, own in everyone for seed in own])
        start = sum(len(own) for own, _ in everyone[: self.peers.rank()])
        return completions[start : start + len(prompts)]

    def submit(self, requests: list[Request]) -> None:
        if self.peers is not None:
            raise PacelineError(
                f"{self.peers.size()} ranks share this vLLM and must make the same calls, so it takes batches by "
                "`generate` and no single requests. Set actor_rollout_ref.rollout.tensor_model_parallel_size=1."
            )
        super().submit(requests)

    def admit(self, requests: list[Request]) -> None:
        from vllm.inputs import tokens_input

        if not requests:
            return
        if not self.has_weights:
            raise PacelineError("vLLM has random weights (load_format=dummy): call update_weights before generate.")
        for request in requests:
            self._check_length(request)
        self.wake()
        if not self._under_way:
            # What earlier requests left in the cache may be of old weights, or differ in the last bits.
            self.llm.reset_prefix_cache()
        try:
            for request in requests:
                name = str(next(self.llm.request_counter))
                # The salt keeps prefixes of old weights from new requests while old ones are under way.
                prompt = tokens_input(request.context, cache_salt=str(self.version))
                adapter = self.adapter.of_requests if self.adapter is not None else None
                self._ids[request.id] = self.llm.llm_engine.add_request(
                    name, prompt, self._sampling_of(request), lora_request=adapter
                )
                self._names[name] = request.id
        except BaseException:  # vLLM refuses, for example, token ids that the model does not have
            self._drop([request.id for request in requests if request.id in self._ids])
            raise

    def _check_length(self, request: Request) -> None:
        prompt, response = len(request.prompt_ids), request.sampling.max_tokens
        if prompt + response > self.max_model_len:
            raise DataError(
                f"a prompt of {prompt} and a response of {response} tokens are more than vLLM was started for, "
                f"{self.max_model_len}: raise data.max_prompt_length or actor_rollout_ref.rollout.engine_kwargs."
                "vllm.max_model_len."
            )

    def _sampling_of(self, request: Request) -> VllmSamplingParams:
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        return VllmSamplingParams(
            max_tokens=sampling.max_tokens - request.num_sampled,
            temperature=sampling.temperature if sampling.do_sample else 0.0,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=request.seed,
            stop_token_ids=self._eos_of(request),
            ignore_eos=True,  # vLLM's own, in whose place there are stop_token_ids
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={DRAWN: request.num_sampled} if request.num_sampled else None,
        )

    def _eos_of(self, request: Request) -> list[int]:
        return [] if request.sampling.ignore_eos else self.eos_token_ids

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """The process's random state stays as it is, and nothing is compiled unless that is asked for."""
        with random_state_kept(), torch.compiler.set_stance(self.stance):
            yield

    def step(self) -> None:
        with self.decoding():
            outputs = self.llm.llm_engine.step()
        for output in outputs:
            if output.finished:
                request = self._under_way[self._names[output.request_id]]
                [sampled] = cast("RequestOutput", output).outputs
                completion = _joined(request, list(sampled.token_ids), sampled.logprobs)
                completion.finished_by_eos = completion.token_ids[-1] in self._eos_of(request)
                del self._ids[self._names.pop(output.request_id)]
                self.finish(request.id, completion)

    @property
    def num_running(self) -> int:
        return num_running(self.llm)

    def withdraw(self, ids: list[RequestId]) -> dict[RequestId, Completion]:
        withdrawn = {name: self.sampled_so_far(self._under_way[name]) for name in ids}
        self._drop(ids)
        return withdrawn

    def _drop(self, ids: list[RequestId]) -> None:
        self.llm.llm_engine.abort_request([self._ids.pop(name) for name in ids], internal=True)
        self._names = {number: name for number, name in self._names.items() if name in self._ids}

    def num_sampled(self, request: Request) -> int:
        return request.num_sampled + len(sampled_so_far(self.llm, self._ids[request.id])[0])

    def sampled_so_far(self, request: Request) -> Completion:
        return _joined(request, *sampled_so_far(self.llm, self._ids[request.id]))

    def renew_caches(self, kv_cache: CachePolicy) -> None:
        if self._under_way and kv_cache == "recompute":
            self.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the weights into vLLM in place. After an error it holds a mix of old and new weights."""
        if self._under_way and self.llm.llm_engine.vllm_config.scheduler_config.async_scheduling:
            raise PacelineError(
                "vLLM has begun its next step, so its weights can't change while requests are under way: set "
                "actor_rollout_ref.rollout.engine_kwargs.vllm.async_scheduling=False."
            )
        self.wake()
        if self.adapter is not None:
            self.llm.llm_engine.add_lora(self.adapter.write(named_tensors))
            return
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

    @property
    def takes_adapter(self) -> bool:
        return self.adapter is not None

    @property
    def weights_dtype(self) -> torch.dtype:
        dtype = self.llm.model_config.dtype
        assert isinstance(dtype, torch.dtype)  # vLLM has resolved a name
        return dtype

    def held_weights(self) -> Mapping[str, Held] | None:
        """By bytes, in fused layers and padded vocabularies too; where they are packed, by the layer's answer."""
        model, dtype = model_of(self.llm), self.weights_dtype
        if self.adapter is not None:
            return held_adapter(model, self.skeleton, self.adapter.policy)
        places = {name: place_of(model, name) for name in self.skeleton.state_dict()}
        return {name: held_at(place, dtype) for name, place in places.items() if place is not None}

    def sleep(self) -> None:
        """Give the weights' and the cache's device memory back, where the platform can; not on a CPU."""
        if self.sleeps and not self.is_asleep:
            if self._under_way:  # the cache goes
                self.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
            self.llm.sleep(level=1)
            self.is_asleep = True

    def wake(self) -> None:
        """Take the memory again. `generate` and `update_weights` do it themselves."""
        if self.is_asleep:
            self.llm.wake_up()
            self.is_asleep = False


def held_at(place: WeightPlace, dtype: torch.dtype) -> Held:
    """What vLLM holds there, in numbers of this dtype where they are packed."""
    if not place.is_packed:
        return Held(lambda whole: place.part(whole).to(place.there().dtype), place.there)

    def answer() -> torch.Tensor:
        width = getattr(place.layer, "input_size_per_partition", None) or place.layer.embedding_dim
        return place.answer(fixed_input(width, dtype, next(place.layer.parameters()).device))

    return Held(lambda whole: place.part(whole).to(dtype), answer, by_output=True)


def _joined(request: Request, tokens: list[int], by_place: SampleLogprobs | None) -> Completion:
    """What was sampled before the request and since."""
    by_token = cast(list[dict[int, "Logprob"]], by_place or [])
    since = [place[token].logprob for token, place in zip(tokens, by_token, strict=True)]
    before = request.sampled or Completion([], [], False)
    return Completion(before.token_ids + tokens, before.log_probs + since, False)


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


def engine_arguments(spec: RolloutSpec, **ours: object) -> dict[str, Any]:
    """The keyword arguments of vLLM's LLM: `ours`, and what the configuration says."""
    from vllm import EngineArgs

    config, path = spec.config, os.path.expanduser(str(spec.model.path))
    asked = config.engine_kwargs.vllm
    problems = [
        f"actor_rollout_ref.rollout.engine_kwargs.vllm.{name} "
        + ("is set by the engine itself; leave it out." if name in OURS else "is not an argument of vLLM's LLM.")
        for name in asked
        if name in OURS or name not in EngineArgs.__dataclass_fields__
    ]
    if problems:
        raise ConfigError(problems)
    arguments: dict[str, Any] = {
        "model": path,
        "trust_remote_code": spec.model.trust_remote_code,
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature
        "use_tqdm_on_load": False,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "max_model_len": spec.max_prompt_length + spec.max_response_length,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enforce_eager": config.enforce_eager,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        **ours,
        **asked,
    }
    if spec.model.max_position_embeddings is not None:
        arguments.setdefault("hf_overrides", {"max_position_embeddings": spec.model.max_position_embeddings})
    if (policy := adapted_policy(spec.model, config)) is not None:
        arguments = room_for_adapter(policy) | arguments
    if config.tensor_model_parallel_size > 1:
        arguments["tensor_parallel_size"] = config.tensor_model_parallel_size
        arguments["distributed_executor_backend"] = "external_launcher"  # the ranks are there: vLLM starts no process
    if spec.device == "cpu":
        # Left alone, vLLM takes that share of the machine's memory at once: too much for several workers on one node.
        hf_config = AutoConfig.from_pretrained(path, trust_remote_code=spec.model.trust_remote_code)
        most = int(psutil.virtual_memory().available * config.gpu_memory_utilization)
        arguments.setdefault("kv_cache_memory_bytes", min(most, cache_bytes(hf_config, arguments)))
    return arguments


def cache_bytes(hf_config: PretrainedConfig, arguments: dict[str, Any]) -> int:
    """One rank's memory of the keys and values of `max_num_seqs` sequences of full length, in float32."""
    text = hf_config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    heads = math.ceil(heads / arguments.get("tensor_parallel_size", 1))
    blocks = arguments["max_num_seqs"] * math.ceil(arguments["max_model_len"] / CPU_BLOCK) + 1
    return blocks * CPU_BLOCK * text.num_hidden_layers * heads * head_dim * 2 * 4
