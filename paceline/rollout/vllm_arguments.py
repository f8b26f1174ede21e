"""From the configuration to the arguments that vLLM is started with."""

from __future__ import annotations

import math
import os
from typing import Any

import psutil
from transformers import AutoConfig, PretrainedConfig

from paceline.errors import ConfigError
from paceline.rollout.rollout_interface import RolloutSpec

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


def engine_arguments(spec: RolloutSpec, **ours: Any) -> dict[str, Any]:
    """The keyword arguments of vLLM's LLM: `ours`, and what the configuration says."""
    from vllm import EngineArgs

    config, path = spec.config, os.path.expanduser(str(spec.model.path))
    asked = config.engine_kwargs.vllm
    problems = [
        f"actor_rollout_ref.rollout.engine_kwargs.vllm.{name} "
        + ("is set by the engine itself; leave it out." if name in OURS else "is no argument of vLLM's LLM.")
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
