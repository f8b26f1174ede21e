"""LoRA beside vLLM's own base weights, where `engine_kwargs.vllm.enable_lora` asks for it: only the adapter travels."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from paceline.config import ModelConfig, PolicyModelConfig, RolloutConfig
from paceline.private_apis.vllm_layout import AdapterPlace, adapter_place_of
from paceline.rollout.held_weights import Held

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM has room for."""


ADAPTER_ID = 1
"""vLLM's name for the only one."""


class AdapterFolder:
    """LoRA's adapter where vLLM reads it: in files, which here are memory where the system has such a place."""

    def __init__(self, model: PolicyModelConfig) -> None:
        memory = Path("/dev/shm")
        self._folder = TemporaryDirectory(prefix="paceline-adapter-", dir=memory if memory.is_dir() else None)
        self.policy = model
        self._has_adapter = False

    def write(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> LoRARequest:
        """Take the place of the adapter before; gives what tells vLLM so. The tensors have the names of peft's file."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in named_tensors}
        layers = sorted({name.split(".")[-3] for name in tensors})
        settings = {"peft_type": "LORA", "r": self.policy.lora_rank, "lora_alpha": self.policy.lora_alpha}
        folder = Path(self._folder.name)
        (folder / "adapter_config.json").write_text(json.dumps({**settings, "target_modules": layers}))
        save_file(tensors, folder / "adapter_model.safetensors")
        self._has_adapter = True
        return self._request(is_new=True)

    @property
    def of_requests(self) -> LoRARequest | None:
        """What goes with each request; None before the first adapter came: it begins as a change of nothing."""
        return self._request() if self._has_adapter else None

    def _request(self, *, is_new: bool = False) -> LoRARequest:
        from vllm.lora.request import LoRARequest

        # Without load_inplace new files under a known name would be ignored.
        return LoRARequest("policy", ADAPTER_ID, self._folder.name, load_inplace=is_new)


def adapted_layers(model: nn.Module, target_modules: str | list[str]) -> list[str]:
    """The names of the linear layers of a Hugging Face model that get an adapter."""
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D)}
    if target_modules == "all-linear":
        head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
        return [name for name, layer in linear.items() if layer is not head]
    targets = [target_modules] if isinstance(target_modules, str) else target_modules
    return [name for name in linear if any(f".{name}".endswith(f".{target}") for target in targets)]


def held_adapter(model: nn.Module, skeleton: nn.Module, policy: PolicyModelConfig) -> dict[str, Held]:
    """Where vLLM's model holds A and B, by their names in peft's file. It folds the scale into B when it loads them."""
    scales = {"A": 1.0, "B": policy.lora_alpha / policy.lora_rank}
    places = {
        f"base_model.model.{layer}.lora_{letter}.weight": (adapter_place_of(model, layer, letter), scale)
        for layer in adapted_layers(skeleton, policy.target_modules)
        for letter, scale in scales.items()
    }
    return {name: _held_in_slot(place, scale) for name, (place, scale) in places.items() if place is not None}


def _held_in_slot(place: AdapterPlace, scale: float) -> Held:
    return Held(lambda whole: place.part(whole.to(place.slots.dtype) * scale), lambda: place.there(ADAPTER_ID))


def adapted_policy(model: ModelConfig, config: RolloutConfig) -> PolicyModelConfig | None:
    """The model, if vLLM has been asked to compute its adapter beside the base weights."""
    asked = config.engine_kwargs.vllm.get("enable_lora")
    return model if asked and isinstance(model, PolicyModelConfig) and model.lora_rank > 0 else None


def room_for_adapter(model: PolicyModelConfig) -> dict[str, int]:
    """Arguments of vLLM's LLM."""
    return {"max_lora_rank": next(rank for rank in LORA_RANKS if rank >= model.lora_rank), "max_loras": 1}
