"""Where vLLM keeps a weight of a Hugging Face model: in fused layers, padded vocabularies, shares of ranks, packed.

And where it keeps LoRA's A and B beside them: in slots, a stack of them for each part of a fused layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from vllm import LLM

TRIED_WITH = "0.32.0"
Rows = tuple[int, int]
"""First, and how many."""


@dataclass(frozen=True)
class WeightPlace:
    """Where one weight, or this rank's share of it, lies."""

    layer: Any
    kind: str
    """weight or bias"""
    rows: Rows | None
    """In the layer's tensor; None: all."""
    share: tuple[int, int, int] | None
    """Of the whole weight: dimension, first, how many. None: all of it."""
    is_packed: bool
    """Whether the layer computes with a copy in a form of its own, that can't be read."""

    def part(self, whole: Tensor) -> Tensor:
        """This rank's share of a whole weight."""
        return whole if self.share is None else whole.narrow(*self.share)

    def there(self) -> Tensor:
        """What the layer holds. Read anew each time: a reload may put other tensors there."""
        tensor: Tensor = getattr(self.layer, self.kind).data
        return tensor if self.rows is None else tensor.narrow(0, *self.rows)

    def answer(self, inputs: Tensor) -> Tensor:
        """What the layer makes of `inputs`, without its bias."""
        output: Tensor = self.layer.quant_method.apply(self.layer, inputs, None)
        return output if self.rows is None else output.narrow(1, *self.rows)


@dataclass(frozen=True)
class AdapterPlace:
    """Where LoRA's A or B of one layer, or this rank's share of it, lies: in a slot that has room for a larger rank."""

    model: Any
    slots: Tensor
    """(slot, 1, rows, columns)"""
    share: tuple[int, int, int] | None
    """As of `WeightPlace`."""

    def part(self, whole: Tensor) -> Tensor:
        """What should be in the slot: this rank's share, and zeros around it."""
        own = whole if self.share is None else whole.narrow(*self.share)
        padded = torch.zeros(self.slots.shape[2:], dtype=self.slots.dtype, device=whole.device)
        padded[: own.shape[0], : own.shape[1]] = own
        return padded

    def there(self, adapter: int) -> Tensor:
        """What is in the adapter's slot; that of no adapter is empty."""
        in_slots: list[int | None] = self.model.lora_manager.lora_index_to_id
        if adapter not in in_slots:
            return self.slots[0, 0].new_empty(0)
        return self.slots[in_slots.index(adapter), 0]


def adapter_place_of(model: nn.Module, layer_name: str, letter: str) -> AdapterPlace | None:
    """Where the A or B of this layer, by its Hugging Face name, lies; None if that is not known."""
    parent, _, own = layer_name.rpartition(".")
    weight = place_of(model, f"{layer_name}.weight")
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    joined = next((name for name, parts in fused.items() if own in parts), None)
    layer = _submodule(model, f"{parent}.{joined}" if joined else layer_name, as_it_is=True)
    stacks = getattr(layer, f"lora_{letter.lower()}_stacked", ())
    index = fused[joined].index(own) if joined else 0
    is_known = len(stacks) == (len(fused[joined]) if joined else 1) and stacks[index].ndim == 4
    if weight is None or not is_known or (layer.tp_size > 1 and layer.lora_config.fully_sharded_loras):
        return None
    # A has the columns of the layer's weight, and B its rows.
    is_shared = weight.share is not None and weight.share[0] == (1 if letter == "A" else 0)
    return AdapterPlace(model, stacks[index], weight.share if is_shared else None)


def model_of(llm: LLM) -> nn.Module:
    """The model of an engine in this process."""
    found: list[nn.Module] = []
    llm.collective_rpc(lambda worker: found.append(worker.model_runner.model))
    return found[0]


def place_of(model: nn.Module, name: str) -> WeightPlace | None:
    """Where the weight of this Hugging Face name lies; None if that is not known."""
    path, _, kind = name.rpartition(".")
    parent, _, own = path.rpartition(".")
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for joined, parts in fused.items():
        layer = _submodule(model, f"{parent}.{joined}") if own in parts else None
        if layer is not None:
            return _in_fused(layer, kind, parts.index(own))
    layer = _submodule(model, path)
    if layer is None or kind not in ("weight", "bias") or not isinstance(getattr(layer, kind, None), Tensor):
        return None
    by_class: dict[str, Callable[[Any, str], WeightPlace]] = {
        "VocabParallelEmbedding": _of_vocabulary,
        "ColumnParallelLinear": _of_columns,
        "RowParallelLinear": _of_rows,
    }
    find = next((by_class[cls.__name__] for cls in type(layer).__mro__ if cls.__name__ in by_class), None)
    if find is not None:
        return find(layer, kind)
    is_packed = kind == "weight" and layer.weight.numel() == 0
    return None if is_packed and not hasattr(layer, "quant_method") else WeightPlace(layer, kind, None, None, is_packed)


def _submodule(model: nn.Module, path: str, *, as_it_is: bool = False) -> Any:
    """A layer that has adapters beside it is inside of another."""
    try:
        found = model.get_submodule(path)
    except AttributeError:
        return None
    return found if as_it_is else getattr(found, "base_layer", found)


def _in_fused(layer: Any, kind: str, index: int) -> WeightPlace | None:
    rank, size = layer.tp_rank, layer.tp_size
    if hasattr(layer, "_get_shard_offset_mapping"):  # query, key, value
        letter = "qkv"[index]
        first, count = layer._get_shard_offset_mapping(letter), layer._get_shard_size_mapping(letter)
        start = (rank if letter == "q" else rank // layer.num_kv_head_replicas) * count
    else:
        sizes = [each // size for each in layer.output_sizes]
        first, count = sum(sizes[:index]), sizes[index]
        start = rank * count
    return WeightPlace(layer, kind, (first, count), (0, start, count), _is_packed(layer, kind))


def _of_columns(layer: Any, kind: str) -> WeightPlace:
    count = layer.output_size_per_partition
    return WeightPlace(layer, kind, None, (0, layer.tp_rank * count, count), _is_packed(layer, kind))


def _of_rows(layer: Any, kind: str) -> WeightPlace:
    count = layer.input_size_per_partition
    share = (1, layer.tp_rank * count, count) if kind == "weight" else None
    return WeightPlace(layer, kind, None, share, _is_packed(layer, kind))


def _of_vocabulary(layer: Any, kind: str) -> WeightPlace:
    """Padding rows come after a rank's own."""
    indices = layer.shard_indices
    count = indices.org_vocab_end_index - indices.org_vocab_start_index
    # A head on a CPU keeps its weight, and computes with a packed copy. An embedding reads the weight.
    is_head = any(cls.__name__ == "ParallelLMHead" for cls in type(layer).__mro__)
    is_packed = kind == "weight" and is_head and hasattr(layer, "cpu_linear")
    return WeightPlace(layer, kind, (0, count), (0, indices.org_vocab_start_index, count), is_packed)


def _is_packed(layer: Any, kind: str) -> bool:
    return kind == "weight" and layer.weight.numel() == 0
