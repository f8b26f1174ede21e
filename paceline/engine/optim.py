"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from torch import nn
from torch.optim import AdamW

from paceline.config import OptimConfig
from paceline.errors import ConfigError
from paceline.text import unknown_choice

LearningRate = Callable[[int], float]
"""The learning rate of an optimizer step, by its number from 0."""


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimConfig) -> AdamW:
    """AdamW over all parameters that train."""
    return AdamW(
        [parameter for parameter in parameters if parameter.requires_grad],
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,  # one pass over parameters and moments, without temporary copies of them
    )


def make_schedule(config: OptimConfig, total_steps: int | None) -> LearningRate:
    """Linear warm-up to `lr`, then constant, or linear or cosine decay to `lr * min_lr_ratio` at step `total_steps`.

    With w steps of warm-up, step k < w takes lr * (k + 1) / w: no step is wasted on a learning rate of 0. A function of
    the step's number alone: to resume, the number is all that must be known.
    """
    if config.lr_scheduler_type not in _DECAYS:
        raise ConfigError(unknown_choice("optim.lr_scheduler_type", config.lr_scheduler_type, sorted(_DECAYS)))
    decay = _DECAYS[config.lr_scheduler_type]
    if total_steps is None and (decay is not _constant or _warmup_is_a_share(config)):
        raise ConfigError(
            f"optim.lr_scheduler_type={config.lr_scheduler_type} with lr_warmup_steps={config.lr_warmup_steps} and "
            f"lr_warmup_steps_ratio={config.lr_warmup_steps_ratio} needs the total number of optimizer steps, which is "
            "not known; set trainer.total_training_steps, or lr_scheduler_type=constant and lr_warmup_steps=0."
        )
    warmup = round(config.lr_warmup_steps_ratio * (total_steps or 0))
    if config.lr_warmup_steps >= 0:
        warmup = config.lr_warmup_steps

    def learning_rate(step: int) -> float:
        if step < warmup:
            return config.lr * (step + 1) / warmup
        progress = (step - warmup) / max((total_steps or 0) - warmup, 1)
        share = decay(min(progress, 1.0))
        return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)

    return learning_rate


def _warmup_is_a_share(config: OptimConfig) -> bool:
    return config.lr_warmup_steps < 0 and config.lr_warmup_steps_ratio > 0


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


# From 1 at progress 0 to 0 at progress 1, but for the constant one.
_DECAYS: dict[str, Callable[[float], float]] = {"constant": _constant, "linear": _linear, "cosine": _cosine}
