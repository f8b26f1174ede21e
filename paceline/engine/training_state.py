"""Training state in memory and on disk, in a form that does not depend on the backend or the number of ranks.

    folder/config.json, model.safetensors   a Hugging Face model: `from_pretrained(folder)` reads it
    folder/optimizer.pt                     AdamW's moments by parameter name, and the number of steps

or, with LoRA, in place of the model

    folder/adapter_config.json, adapter_model.safetensors   the adapter alone, as peft writes it

Rank 0 reads and writes whole tensors; nothing is unpickled (`weights_only`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar, cast

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from paceline.config import ModelConfig
from paceline.engine.hf_models import ModelKind, quiet_transformers, read_model
from paceline.engine.lora import (
    ADAPTER_CONFIG,
    adapter_tensors,
    has_adapter,
    merged_tensors,
    read_adapter,
    write_adapter,
)
from paceline.errors import CheckpointError
from paceline.files import sync_tree
from paceline.private_apis.torch_private import FSDP1_PREFIX

OPTIMIZER_FILE = "optimizer.pt"
_ROOT_PREFIX = "model."
"""Before a parameter's Hugging Face name in the module that is called: see AnswerModel."""


Weights = dict[str, torch.Tensor]
"""By Hugging Face's names."""
Moments = dict[str, dict[str, torch.Tensor]]
"""What AdamW keeps of each parameter, by the parameter's name."""
T = TypeVar("T")


class Training(TypedDict):
    """What OPTIMIZER_FILE holds."""

    moments: Moments
    num_steps: int


class Gather(Protocol):
    def __call__(self, value: T, /) -> list[T]: ...


@dataclass(frozen=True)
class TrainingState:
    """What is saved: the model as the backend holds it, its optimizer if it trains, and how many steps it made."""

    model: PreTrainedModel
    root: nn.Module
    """What the backend calls; it has the model as `model`."""
    optimizer: Optimizer | None
    num_steps: int
    source: ModelConfig
    """What the model was read from: a checkpoint is read in the same way."""
    kind: ModelKind
    rank: int
    """This process among those that hold the model. Rank 0 reads and writes."""
    gather: Gather
    """From what each rank that holds the model passes to the list of it, on all of them."""


@dataclass(frozen=True)
class Snapshot:
    """A training state at one moment, in main memory: whole on rank 0, empty on other ranks. Steps don't change it."""

    rank: int
    model: PreTrainedModel
    """For its configuration; the live weights are not read."""
    weights: dict[str, torch.Tensor]
    """The model's or, with LoRA, the adapter's."""
    training: Training | None
    """None if the engine does not train."""


def take_snapshot(state: TrainingState) -> Snapshot:
    """Copy a training state into the main memory of rank 0. Collective."""
    with_adapter, is_first = has_adapter(state.model), state.rank == 0
    tensors = adapter_tensors(_state_dict(state.root), full_tensor) if with_adapter else named_full_tensors(state)
    weights = in_main_memory(tensors, keep=is_first)
    training: Training | None = None
    if state.optimizer is not None:
        # An optimizer that made no step has no moments, and asking for them would count as a step.
        sharded: Moments = {}
        if state.num_steps:
            sharded = cast(Moments, get_optimizer_state_dict(state.root, state.optimizer)["state"])
        moments = {
            _hf_name(name): in_main_memory(((key, full_tensor(value)) for key, value in parts.items()), keep=is_first)
            for name, parts in sharded.items()
        }
        training = {"moments": moments, "num_steps": state.num_steps}
    if not is_first:
        return Snapshot(state.rank, state.model, {}, None)
    # Gathered tensors no longer share memory, by which transformers would know a tied weight. It ties them on reading.
    for name in () if with_adapter else _tied_duplicates(state.model):
        weights.pop(name)
    return Snapshot(state.rank, state.model, weights, training)


def write_snapshot(snapshot: Snapshot, folder: Path) -> None:
    """Write `folder`; on return of rank 0 its content is on the disk. Not collective, other ranks have nothing to do.

    May run in a thread beside training: of the model it reads the configuration only.
    """
    if snapshot.rank != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    if has_adapter(snapshot.model):
        write_adapter(snapshot.model, snapshot.weights, folder)
    else:
        with quiet_transformers():
            snapshot.model.save_pretrained(folder, state_dict=dict(snapshot.weights))
    if snapshot.training is not None:
        torch.save(snapshot.training, folder / OPTIMIZER_FILE)
    sync_tree(folder)


def read_training_state(folder: Path, state: TrainingState) -> tuple[Weights, Moments, int]:
    """Weights and AdamW's moments of `folder`, on rank 0; the number of steps made, on all ranks. Collective.

    Only rank 0 reads; a failure is raised on all ranks.
    """
    weights: Weights = {}
    training = Training(moments={}, num_steps=0)
    failure: str | None = None
    if state.rank == 0:
        try:
            with_adapter = has_adapter(state.model)
            weights = read_adapter(folder, state.model) if with_adapter else _read_weights(folder, state)
            if state.optimizer is not None:
                training = _read_training(folder, state)
        except Exception as error:
            failure = f"{folder} can't be loaded: {error}"
    failure, num_steps = state.gather((failure, training["num_steps"]))[0]
    if failure is not None:
        raise CheckpointError(failure)
    return weights, training["moments"], num_steps


def load_training_state(folder: Path, state: TrainingState) -> int:
    """Put what `folder` holds into the model and optimizer of `state`; returns the number of steps made. Collective."""
    weights, moments, num_steps = read_training_state(folder, state)
    sharded = len(state.gather(None)) > 1
    set_weights(state.root, weights, from_rank0=sharded, partial=has_adapter(state.model))
    if state.optimizer is None:
        return num_steps
    if num_steps == 0:
        state.optimizer.state.clear()
        return num_steps
    # The parameter groups are this run's own: hyperparameters come from its configuration, not from the checkpoint.
    groups = get_optimizer_state_dict(state.root, state.optimizer)["param_groups"]
    saved: dict[str, Any] = {"state": _root_names(moments), "param_groups": groups} if state.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=sharded)
    set_optimizer_state_dict(state.root, state.optimizer, saved, options=options)
    return num_steps


def _read_weights(folder: Path, state: TrainingState) -> Weights:
    if (folder / ADAPTER_CONFIG).is_file():
        raise CheckpointError("it holds a LoRA adapter alone. Set model.lora_rank to that of the run that saved it.")
    saved, missing = read_model(replace(state.source, path=str(folder)), state.kind)
    if missing:
        raise CheckpointError(f"its weights lack {', '.join(sorted(missing))}.")
    return saved.state_dict()


def _read_training(folder: Path, state: TrainingState) -> Training:
    file = folder / OPTIMIZER_FILE
    if not file.is_file():
        raise CheckpointError(f"it has no {OPTIMIZER_FILE}; it was written by an engine that does not train.")
    training: Training = torch.load(file, weights_only=True, map_location="cpu")
    expected = {
        name.replace(FSDP1_PREFIX, "") for name, parameter in state.model.named_parameters() if parameter.requires_grad
    }
    if training["num_steps"] and expected != set(training["moments"]):
        differing = expected ^ set(training["moments"])
        raise CheckpointError(f"its optimizer belongs to another model (they differ in {min(differing)}).")
    return training


def named_full_tensors(
    state: TrainingState, whole: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's state dict by Hugging Face's names, each tensor whole. One at a time is gathered; collective.

    `whole` makes a tensor whole; without it, it is gathered.
    """
    tensors, whole = _state_dict(state.root), whole or full_tensor
    if has_adapter(state.model):
        return merged_tensors(state.model, tensors, whole)
    return ((name, whole(value)) for name, value in tensors.items())


def named_adapter_tensors(
    state: TrainingState, whole: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """A and B of all adapted layers, whole, under the names of peft's file; otherwise as `named_full_tensors`."""
    return adapter_tensors(_state_dict(state.root), whole or full_tensor)


def _state_dict(root: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state dict as the backend holds it."""
    tensors = cast(dict[str, torch.Tensor], get_model_state_dict(root))
    return {_hf_name(name): tensor.detach() for name, tensor in tensors.items()}


def full_tensor(value: torch.Tensor) -> torch.Tensor:
    """The whole of what ranks hold shares of. Collective."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def shape_alone(value: torch.Tensor) -> torch.Tensor:
    """A tensor like the whole of what ranks hold shares of, without memory. Not collective."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def set_weights(root: nn.Module, weights: Weights, *, from_rank0: bool, partial: bool = False) -> None:
    """Put a Hugging Face state dict into the model under `root`. With `from_rank0`, only rank 0 need have it.

    With `partial`, what it lacks stays as it is.
    """
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank0, strict=not partial)
    set_model_state_dict(root, _root_names(weights), options=options)


def in_main_memory(tensors: Iterable[tuple[str, torch.Tensor]], *, keep: bool) -> dict[str, torch.Tensor]:
    """Copies of all, if they are to be kept; else what is gathered is dropped one by one."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors if keep}


def _hf_name(name: str) -> str:
    return name.removeprefix(_ROOT_PREFIX)


def _root_names(values: Mapping[str, T]) -> dict[str, T]:
    return {_ROOT_PREFIX + name: value for name, value in values.items()}


def _tied_duplicates(model: PreTrainedModel) -> set[str]:
    """Second names of parameters that have several."""
    all_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return all_names - {name for name, _ in model.named_parameters()}
