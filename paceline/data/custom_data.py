"""Datasets and samplers of the user's own: classes in a file that the configuration names, or objects that he gives."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sized
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from paceline.config import DataConfig
from paceline.config.load import section_dictconfig
from paceline.data.prompt_images import PromptImages
from paceline.data.rl_dataset import RLHFDataset
from paceline.errors import ConfigError, DataError
from paceline.external import import_file

PROMPT_COLUMNS = ("input_ids", "attention_mask", "position_ids")


def make_dataset(
    files: str | list[str],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    *,
    max_samples: int,
    processor: object = None,
    images: PromptImages | None = None,
) -> Any:
    """The prompts of `files`: an RLHFDataset, or one of the class that data.custom_cls names.

    That class is called by keyword, with those of data_files (or files), tokenizer, config, processor and max_samples
    that it takes. `config` is the section `data`: a DataConfig for a subclass of RLHFDataset, else a DictConfig.
    """
    custom = data.custom_cls
    if custom.path is None:
        return RLHFDataset(files, tokenizer, data, max_samples=max_samples, images=images)
    cls = load_class("data.custom_cls.path", custom.path, "data.custom_cls.name", custom.name)
    is_ours = isinstance(cls, type) and issubclass(cls, RLHFDataset)
    names = [files] if isinstance(files, str) else list(files)
    offered = {
        "data_files": names,
        "files": names,
        "tokenizer": tokenizer,
        "processor": processor,
        "images": images,
        "config": data if is_ours else section_dictconfig(data),
        "max_samples": max_samples,
    }
    dataset = _called(cls, "data.custom_cls.name", offered)
    check_items(dataset, data.max_prompt_length, type(dataset).__name__)
    return dataset


def make_sampler(dataset: Any, data: DataConfig) -> Iterable[int] | None:
    """The order of training prompts that data.sampler names, called with data_source and data_config; None if it names
    none."""
    settings = data.sampler
    if settings.class_path is None:
        return None
    cls = load_class("data.sampler.class_path", settings.class_path, "data.sampler.class_name", settings.class_name)
    offered = {"data_source": dataset, "data_config": section_dictconfig(data)}
    return _called(cls, "data.sampler.class_name", offered)


def load_class(path_key: str, path: str, name_key: str, name: str | None) -> Any:
    """A class of a user's file. What is wrong with it is a ConfigError that names the keys."""
    try:
        module = import_file(Path(path), "paceline_data")
    except Exception as error:  # it is the user's code
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path_key}={path} can't be imported: {reason}. Correct it, or leave it out.") from error
    if name is None or not hasattr(module, name):
        raise ConfigError(f"{name_key}={name}: {path} has no such class. Set it to one that it has.")
    return getattr(module, name)


def _called(cls: Any, key: str, offered: dict[str, object]) -> Any:
    """An object of the class, made by keyword with what it takes of `offered`."""
    parameters = inspect.signature(cls).parameters.values()
    taken = {one.name for one in parameters if one.kind is not one.VAR_KEYWORD}
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        taken |= offered.keys() - {"files"}
    needed = [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    if unknown := [name for name in needed if name not in offered]:
        raise ConfigError(
            f"{key}={getattr(cls, '__name__', cls)} needs the argument {unknown[0]}. It is called with those of "
            f"{', '.join(offered)} that it takes; give others a default."
        )
    return cls(**{name: value for name, value in offered.items() if name in taken})


def check_items(dataset: Any, max_prompt_length: int, name: str) -> None:
    """Raise for a dataset whose first item is no prompt: what each item must have stands in docs/data.md."""
    try:
        size, item = len(dataset), dataset[0]
    except (IndexError, TypeError, KeyError) as error:
        raise DataError(f"The dataset {name} has no length or no item 0: {error!r}.") from error
    if not isinstance(item, dict):
        raise DataError(f"Item 0 of the dataset {name} is a {type(item).__name__}; it must be a dict.")
    for column in PROMPT_COLUMNS:
        tensor = item.get(column)
        if not isinstance(tensor, torch.Tensor) or tensor.shape != (max_prompt_length,):
            found = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise DataError(
                f"Item 0 of {size} of the dataset {name} has {column}: {found}. It must be a tensor of "
                f"data.max_prompt_length={max_prompt_length} whole numbers, padded on the left; a subclass of "
                "paceline.data.RLHFDataset has it."
            )


def epoch_order(sampler: Iterable[int], epoch: int, num_prompts: int) -> list[int]:
    """The rows of one epoch, as the sampler gives them. One with `set_epoch` is told which it is."""
    size = epoch_size(sampler, num_prompts)
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    order: list[int] = []
    for row in sampler:
        if not 0 <= int(row) < num_prompts:
            raise DataError(
                f"The sampler gives row {row}, and there are {num_prompts} prompts, 0 to {num_prompts - 1}."
            )
        order.append(int(row))
        if len(order) >= size:
            break
    if not order or len(order) < size:
        raise DataError(
            f"The sampler gives {len(order)} rows in epoch {epoch}, and an epoch has {size}: its length, or that of "
            "the dataset. It must give as many in each epoch, and at least one."
        )
    return order


def epoch_size(sampler: Iterable[int], num_prompts: int) -> int:
    """Prompts in an epoch: the sampler's length if it has one."""
    return len(sampler) if isinstance(sampler, Sized) else num_prompts
