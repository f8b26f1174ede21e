"""Hugging Face models by what they are for: next tokens, a value per token, a score per sequence.

All are float32, with sdpa attention and without dropout: a forward pass must give the same log-probabilities in the
rollout, in the update and in every micro-batch.
"""

from __future__ import annotations

import logging
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.utils import logging as transformers_logging

from paceline.config import ModelConfig, TrainedModelConfig
from paceline.errors import ConfigError
from paceline.speedups import recompute_contexts

logger = logging.getLogger(__name__)

ModelKind = Literal["causal_lm", "value", "sequence_classification"]

_AUTO_CLASSES = {
    "causal_lm": AutoModelForCausalLM,
    "value": AutoModelForTokenClassification,
    "sequence_classification": AutoModelForSequenceClassification,
}


def read_model(model: ModelConfig, kind: ModelKind) -> tuple[PreTrainedModel, set[str]]:
    """A model in main memory as transformers gives it, and the names of parameters that its weights lack.

    Those are drawn from torch's global random state.
    """
    path = _checked_path(model)
    with quiet_transformers(), _config_error_on_failure(path):
        built, info = _AUTO_CLASSES[kind].from_pretrained(
            path,
            config=_read_config(model, kind),
            dtype=torch.float32,
            attn_implementation="sdpa",
            trust_remote_code=model.trust_remote_code,
            output_loading_info=True,
        )
    return built, set(info["missing_keys"])


def build_model(model: ModelConfig, kind: ModelKind, *, train: bool) -> PreTrainedModel:
    """A model in main memory, ready for an engine.

    A value model may start from a causal LM: its head is then drawn from torch's global random state.
    """
    built, missing = read_model(model, kind)
    _check_missing(built, str(model.path), kind, missing, train=train)
    return prepare_model(built, model, kind, train=train)


def build_empty_model(model: ModelConfig, kind: ModelKind, *, train: bool) -> PreTrainedModel:
    """The same modules as `build_model` gives, for a rank that gets its weights from another.

    Parameters and buffers hold whatever the memory held; the system gives pages only when they are written to.
    """
    with quiet_transformers(), _config_error_on_failure(_checked_path(model)), torch.device("meta"):
        built = _AUTO_CLASSES[kind].from_config(
            _read_config(model, kind),
            dtype=torch.float32,
            attn_implementation="sdpa",
            trust_remote_code=model.trust_remote_code,
        )
    built = built.to_empty(device="cpu")
    built.tie_weights()
    return prepare_model(built, model, kind, train=train)


def prepare_model(built: PreTrainedModel, model: ModelConfig, kind: ModelKind, *, train: bool) -> PreTrainedModel:
    for module in built.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if kind == "sequence_classification":
        if not isinstance(getattr(built, "score", None), nn.Module):
            raise ConfigError(
                f"{type(built).__name__} of {model.path} has no head `score` over its hidden states; "
                "sequence classification needs a decoder model."
            )
        built.forward = types.MethodType(_score_every_token, built)
    if train and isinstance(model, TrainedModelConfig) and model.enable_gradient_checkpointing:
        # There is no dropout whose random state would have to be replayed.
        built.gradient_checkpointing_enable(
            {"use_reentrant": False, "preserve_rng_state": False, "context_fn": recompute_contexts}
        )
    built.requires_grad_(train)
    return built.eval()


def write_model(model: ModelConfig, kind: ModelKind, weights: dict[str, torch.Tensor], folder: Path) -> int:
    """A folder with the configuration of `model` and these weights, in their dtype. Gives the number of parameters."""
    built = filled_model(model, kind, weights)
    with quiet_transformers():
        nn.Module.to(built, next(iter(weights.values())).dtype)
        built.save_pretrained(folder)
    return sum(parameter.numel() for parameter in built.parameters())


def filled_model(model: ModelConfig, kind: ModelKind, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    """The model with other weights, all of them."""
    built, _ = read_model(model, kind)
    built.load_state_dict(weights)
    return built


def _score_every_token(self: PreTrainedModel, **inputs: Any) -> TokenClassifierOutput:
    """Takes the place of a sequence classifier's `forward`, which finds the last token by comparing with pad_token_id.

    That fails where the padding token also ends sequences. The engine picks the last token by the attention mask.
    """
    score: nn.Module = self.get_submodule("score")
    return TokenClassifierOutput(logits=score(self.base_model(**inputs).last_hidden_state))


def _read_config(model: ModelConfig, kind: ModelKind) -> PretrainedConfig:
    config = AutoConfig.from_pretrained(_checked_path(model), trust_remote_code=model.trust_remote_code)
    if kind != "causal_lm":
        config.num_labels = 1
    if model.max_position_embeddings is not None:
        text = config.get_text_config()
        if not getattr(text, "rope_parameters", None):
            raise ConfigError(
                f"model.max_position_embeddings={model.max_position_embeddings}: {model.path} ({config.model_type}) "
                "has no rotary embeddings, and as many positions as it was trained with. Leave it null."
            )
        text.max_position_embeddings = model.max_position_embeddings
    for part in (config, config.get_text_config()):
        # Token classifiers have dropout by default where the configuration names none.
        part.classifier_dropout = 0.0
        for name, value in part.to_dict().items():
            if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
                setattr(part, name, 0.0)
    return config


def _checked_path(model: ModelConfig) -> str:
    """The path with `~` expanded; what is meant as a folder must be one, with a model in it."""
    if not model.path:
        raise ConfigError("model.path is not set; set it to the folder or the hub id of a Hugging Face model.")
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
            raise ConfigError(
                f"model.path={model.path} is a folder without config.json (found: {found}); "
                "set it to a folder that `save_pretrained` wrote."
            )
        return str(folder)
    # A hub id is `name` or `owner/name`.
    if model.path.startswith(("/", "~", ".")) or model.path.count("/") > 1:
        raise ConfigError(
            f"model.path={model.path}: there is no such folder; set it to a Hugging Face model's folder or to a hub id."
        )
    return model.path


@contextmanager
def _config_error_on_failure(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"model.path={path} could not be read as a Hugging Face model: {error} "
            "Set it to a folder with config.json and the weights as safetensors, or to a hub id that can be reached."
        ) from error


def _check_missing(built: PreTrainedModel, path: str, kind: ModelKind, missing: set[str], *, train: bool) -> None:
    """Only the head of a classifier may be missing from the weights, and only where a fresh one makes sense."""
    head = {name for name in missing if not name.startswith(f"{built.base_model_prefix}.")}
    if kind == "causal_lm" or missing - head:
        if missing:
            raise ConfigError(
                f"the weights in model.path={path} lack {len(missing)} parameters of {type(built).__name__} "
                f"(such as {min(missing)}); set it to a folder with a complete model."
            )
        return
    if head and kind == "sequence_classification" and not train:
        raise ConfigError(
            f"model.path={path} has no score head ({', '.join(sorted(head))}), so its scores would be random; "
            f"set it to a model that was trained as {type(built).__name__}."
        )
    if head:
        logger.info("%s has no %s: drawn from the random state of this process.", path, ", ".join(sorted(head)))


class _Quiet:
    """State of `quiet_transformers`: the first thread in it switches the output off, the last one switches it on."""

    lock = threading.Lock()
    depth = 0
    verbosity = 0
    progress_bars = False


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars, and no warnings about heads that are new on purpose. For any number of threads."""
    with _Quiet.lock:
        if _Quiet.depth == 0:
            _Quiet.verbosity = transformers_logging.get_verbosity()
            _Quiet.progress_bars = transformers_logging.is_progress_bar_enabled()
            transformers_logging.set_verbosity_error()
            transformers_logging.disable_progress_bar()
        _Quiet.depth += 1
    try:
        yield
    finally:
        with _Quiet.lock:
            _Quiet.depth -= 1
            if _Quiet.depth == 0:
                transformers_logging.set_verbosity(_Quiet.verbosity)
                if _Quiet.progress_bars:
                    transformers_logging.enable_progress_bar()
