"""LoRA: trained low-rank adapters beside frozen linear layers, made by peft and written in its format.

An adapted layer computes W x + (alpha / rank) B A x. A starts random and B at 0, so the model starts as it was read.
The model stays a Hugging Face model: its adapted layers have the old one inside as `base_layer`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from paceline.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_NAME = "default"
"""peft's name of a model's only adapter. It is in the names of parameters, and not in files."""
_FILE_PREFIX = "base_model.model."
"""Before the names of parameters in files."""


@dataclass(frozen=True)
class LoraSpec:
    """Which adapters a model gets."""

    rank: int
    alpha: float = 16
    target_modules: str | list[str] = "all-linear"
    """all-linear (all but the head), a layer's name, or a list of names. `q_proj` is that of every layer."""


def add_adapter(model: PreTrainedModel, lora: LoraSpec, path: str | None) -> None:
    """Put adapters into `model`, which was read from `path`, and freeze all else. Draws A from the random state."""
    from peft import LoraConfig, inject_adapter_in_model

    targets = lora.target_modules
    if targets != "all-linear":
        targets = [targets] if isinstance(targets, str) else list(targets)
        _check_targets(model, targets)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=path,
    )
    inject_adapter_in_model(config, model, _NAME)
    config.target_modules = sorted(config.target_modules or ())  # a set, whose order would change from file to file
    model.eval()


def _check_targets(model: PreTrainedModel, targets: list[str]) -> None:
    """Every name must be that of a linear layer; peft raises no error if one of them is."""
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    chosen = {target: [name for name in linear if f".{name}".endswith(f".{target}")] for target in targets}
    missing = [target for target, names in chosen.items() if not names]
    if missing:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise ConfigError(
            f"model.target_modules: {type(model).__name__} has no linear layer named {' or '.join(missing)}; set it to "
            f"all-linear or to names among: {known}."
        )
    head = model.get_output_embeddings()
    if model.config.get_text_config().tie_word_embeddings:
        for target, names in chosen.items():
            if any(linear[name] is head for name in names):
                raise ConfigError(
                    f"model.target_modules has {target}, whose weight is the embedding's too (tie_word_embeddings), so "
                    "the adapter could not be merged. Leave it out."
                )


def has_adapter(model: PreTrainedModel) -> bool:
    """Whether `add_adapter` was called."""
    return hasattr(model, "peft_config")


def merged_tensors(
    model: PreTrainedModel, state: Mapping[str, Tensor], whole: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `state`, the model's state dict, under the names that they had before `add_adapter`.

    Each is made whole by `whole`; adapted weights are W + (alpha / rank) B A, new tensors beside the live ones.
    """
    layers = dict(model.named_modules())
    for name, value in state.items():
        layer_name, inside, parameter = name.partition(".base_layer.")
        if _is_adapter(name):
            continue
        tensor = whole(value)
        if inside and parameter == "weight":
            layer: Any = layers[layer_name]
            a, b = (whole(state[f"{layer_name}.lora_{part}.{_NAME}.weight"]) for part in "AB")
            change = b @ a
            tensor = tensor + (change.T if layer.fan_in_fan_out else change) * layer.scaling[_NAME]
        yield f"{layer_name}.{parameter}" if inside else name, tensor


def adapter_tensors(state: Mapping[str, Tensor], whole: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """A and B of all layers, whole, under the names of the file."""
    for name, value in state.items():
        if _is_adapter(name):
            yield _FILE_PREFIX + name.replace(f".{_NAME}.", "."), whole(value)


def _is_adapter(name: str) -> bool:
    return f".{_NAME}.weight" in name and (".lora_A." in name or ".lora_B." in name)


def write_adapter(model: PreTrainedModel, tensors: dict[str, Tensor], folder: Path) -> None:
    """Write the files that `peft.PeftModel.from_pretrained(base, folder)` reads, with the model's settings."""
    model.peft_config[_NAME].save_pretrained(str(folder))
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def read_adapter(folder: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """What `write_adapter` wrote, under the names of the model's parameters, if it fits the model's adapters."""
    if not (folder / ADAPTER_CONFIG).is_file():
        raise CheckpointError(f"it has no {ADAPTER_CONFIG}, so it is not of a run with LoRA. Set model.lora_rank=0.")
    saved, own = read_lora_config(folder), model.peft_config[_NAME]
    for key, field in {"lora_rank": "r", "lora_alpha": "lora_alpha", "target_modules": "target_modules"}.items():
        here, there = getattr(own, field), getattr(saved, field)
        if key == "target_modules":
            here, there = sorted(here), sorted(there)
        if here != there:
            raise CheckpointError(f"it was trained with model.{key}={there}, and this run has {here}. Set it to that.")
    if saved.base_model_name_or_path != own.base_model_name_or_path:
        logger.warning(
            "%s was trained beside %s, and this model was read from %s: they must have the same weights.",
            folder,
            saved.base_model_name_or_path,
            own.base_model_name_or_path,
        )
    tensors = {
        name.removeprefix(_FILE_PREFIX).replace(".weight", f".{_NAME}.weight"): value
        for name, value in load_file(folder / ADAPTER_WEIGHTS).items()
    }
    differing = tensors.keys() ^ {name for name, _ in model.named_parameters() if _is_adapter(name)}
    if differing:
        raise CheckpointError(f"its adapter belongs to another model (they differ in {min(differing)}).")
    return tensors


def read_lora_config(folder: Path) -> Any:
    """peft's LoraConfig of an adapter on disk."""
    from peft import LoraConfig

    return LoraConfig.from_pretrained(str(folder))
