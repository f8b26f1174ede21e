"""LoRA beside vLLM's own base weights, where `engine_kwargs.vllm.enable_lora` asks for it: only the adapter travels."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from paceline.config import ModelConfig, PolicyModelConfig, RolloutConfig

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM has room for."""


class AdapterFolder:
    """LoRA's adapter where vLLM reads it: in files, which here are memory where the system has such a place."""

    def __init__(self, model: PolicyModelConfig) -> None:
        memory = Path("/dev/shm")
        self._folder = TemporaryDirectory(prefix="paceline-adapter-", dir=memory if memory.is_dir() else None)
        self._model = model
        self._has_adapter = False

    def write(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> LoRARequest:
        """Take the place of the adapter before; gives what tells vLLM so. The tensors have the names of peft's file."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in named_tensors}
        layers = sorted({name.split(".")[-3] for name in tensors})
        settings = {"peft_type": "LORA", "r": self._model.lora_rank, "lora_alpha": self._model.lora_alpha}
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
        return LoRARequest("policy", 1, self._folder.name, load_inplace=is_new)


def adapted_policy(model: ModelConfig, config: RolloutConfig) -> PolicyModelConfig | None:
    """The model, if vLLM has been asked to compute its adapter beside the base weights."""
    asked = config.engine_kwargs.vllm.get("enable_lora")
    return model if asked and isinstance(model, PolicyModelConfig) and model.lora_rank > 0 else None


def room_for_adapter(model: PolicyModelConfig) -> dict[str, int]:
    """Arguments of vLLM's LLM."""
    return {"max_lora_rank": next(rank for rank in LORA_RANKS if rank >= model.lora_rank), "max_loras": 1}
