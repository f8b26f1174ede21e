"""How large a model is, by what its folder says of itself (config.json, the headers of its safetensors), and how much
memory a device here has. No model is loaded."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Literal

from paceline.config import ModelConfig
from paceline.config.path_checks import MODEL_FILE, JsonObject, language_model_config, model_config
from paceline.machine import total_memory

FLOAT = 4
"""Bytes of a weight, a gradient, a moment, an activation: all are float32."""
CHUNK_LOGITS = 2**24
"""Logits that exist at one time; `engine.logprobs.CHUNK_ELEMENTS`."""
PACKED_ELEMENTS = 2**18
"""Weights of a linear layer that the native rollout packs on a CPU; `rollout.lean_forward.PACKED_ELEMENTS`."""
PACKED_MODELS = ("llama", "mistral", "qwen2", "qwen3")
"""Those with a forward pass of their own there, unless they have sliding windows."""

Head = Literal["language", "value", "score"]


@dataclass(frozen=True)
class ModelSize:
    """What a model folder says of its model."""

    shapes: dict[str, tuple[int, ...]]
    """Of each stored tensor: tied weights are stored once."""
    config: JsonObject

    def with_head(self, head: Head) -> ModelSize:
        """The same model under another head: a language model's own may be tied to the embeddings."""
        if head == "language":
            return self
        shapes = {name: shape for name, shape in self.shapes.items() if not name.startswith(("lm_head.", "score."))}
        shapes["score.weight"] = (1, self.get("hidden_size", "n_embd"))
        if head == "value":
            shapes["score.bias"] = (1,)
        return ModelSize(shapes, self.config)

    def parameters(self, shards: int = 1) -> int:
        """Numbers that the first of `shards` devices holds: rows are dealt, so it has the most."""
        return sum(ceil(shape[0] / shards) * math.prod(shape[1:]) if shape else 1 for shape in self.shapes.values())

    def adapter_parameters(self, rank: int, targets: str | list[str]) -> int:
        """Numbers of LoRA adapters of the linear layers with these names; all-linear are those of all layers."""
        return sum(rank * sum(shape) for name, shape in self.shapes.items() if self._is_adapted(name, targets))

    def _is_adapted(self, name: str, targets: str | list[str]) -> bool:
        wanted = [targets] if isinstance(targets, str) else targets
        is_linear = len(self.shapes[name]) == 2 and any(part.isdigit() for part in name.split("."))
        return is_linear and (wanted == ["all-linear"] or name.split(".")[-2] in wanted)

    def gathered(self) -> int:
        """Numbers that a sharded model holds whole while it computes: two layers, and what is in no layer."""
        layers: dict[str, int] = {}
        for name, shape in self.shapes.items():
            number = next((part for part in name.split(".") if part.isdigit()), "")
            layers[number] = layers.get(number, 0) + math.prod(shape)
        outside = layers.pop("", 0)
        return outside + 2 * max(layers.values(), default=0)

    def get(self, *names: str, default: int = 0) -> int:
        """A number of the configuration, under the first name that it has."""
        return next((int(self.config[name]) for name in names if self.config.get(name)), default)

    @property
    def layers(self) -> int:
        return self.get("num_hidden_layers", "n_layer")

    @property
    def key_value_width(self) -> int:
        """Numbers of a token's keys in one layer; its values have as many."""
        heads = self.get("num_attention_heads", "n_head", default=1)
        head_dim = self.get("head_dim", default=self.get("hidden_size", "n_embd") // heads)
        return self.get("num_key_value_heads", default=heads) * head_dim

    def key_value_bytes(self, sequences: int, tokens: int) -> int:
        """Keys and values of so many sequences of so many tokens."""
        return 2 * sequences * tokens * self.layers * self.key_value_width * FLOAT

    def packed_bytes(self, adapted: str | list[str]) -> int:
        """What the native rollout packs: large linear layers without an adapter, and the head of tied embeddings."""
        windows = self.config.get("sliding_window") and self.config.get("use_sliding_window", True)
        if self.config.get("model_type") not in PACKED_MODELS or windows:
            return 0
        inputs = {"model.embed_tokens.weight"} if "lm_head.weight" in self.shapes else set()
        return FLOAT * sum(
            math.prod(shape)
            for name, shape in self.shapes.items()
            if len(shape) == 2 and math.prod(shape) >= PACKED_ELEMENTS and name not in inputs
            if not self._is_adapted(name, adapted)
        )

    def activation_bytes(self, tokens: int, *, checkpointing: bool, head: Head) -> int:
        """What a forward pass keeps for the backward pass, and the logits of the head, of which a chunk exists."""
        hidden = self.get("hidden_size", "n_embd")
        inner = self.get("intermediate_size", "n_inner", default=4 * hidden)
        # Inputs and outputs of norms, attention and their projections; gate, up, activation and product of the MLP.
        of_layer = 11 * hidden + 4 * self.key_value_width + 4 * inner
        kept = of_layer + self.layers * hidden if checkpointing else self.layers * of_layer
        logits = 3 * min(tokens * self.get("vocab_size"), CHUNK_LOGITS) if head == "language" else 0
        return (tokens * kept + logits) * FLOAT


def read_model_size(model: ModelConfig) -> ModelSize | None:
    """The size of a model in a folder; None for a hub id and for weights that are no safetensors."""
    folder = Path(str(model.path)).expanduser()
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        if not (folder / MODEL_FILE).is_file():
            return None
        for file in sorted(folder.glob("*.safetensors")):
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(length))
            shapes |= {name: tuple(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return ModelSize(shapes, language_model_config(model_config(folder))) if shapes else None


def available_memory(device: str) -> int | None:
    """Bytes of one accelerator here, or of this machine or container on a CPU; None if there is no such device here."""
    if device == "cpu":
        return total_memory()
    import torch

    module = getattr(torch, device, None)
    if module is None or not module.is_available():
        return None
    return int(module.get_device_properties(0).total_memory)
