"""Names of a trainer that code written for verl knows: subclasses and copies of its `fit` find them here."""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from paceline.config import PPOConfig
from paceline.config.load import to_dictconfig
from paceline.errors import ConfigError
from paceline.protocol import DataProto
from paceline.single_controller.ray import RayWorkerGroup
from paceline.trainer.ppo.dealing import balanced_order, even_sizes
from paceline.trainer.ppo.saving import Checkpoints


def check_device_name(cfg: PPOConfig, device_name: str | None) -> None:
    if device_name not in (None, cfg.trainer.device):
        raise ConfigError(f"device_name={device_name}, but trainer.device={cfg.trainer.device}. Set that alone.")


def readable_config(cfg: PPOConfig) -> DictConfig:
    """The configuration of a trainer as code written for OmegaConf reads it: complete, and not to be changed."""
    config = to_dictconfig(cfg)
    OmegaConf.set_readonly(config, True)
    return config


class _Trainer(Protocol):
    cfg: PPOConfig
    global_step: int
    use_reference: bool
    use_reward_model: bool
    actor_rollout_wg: RayWorkerGroup
    checkpoints: Checkpoints

    def validate(self) -> dict[str, float]: ...
    def finish_checkpoint(self) -> None: ...


class KnownNames:
    """Other names of what a RayPPOTrainer has."""

    @cached_property
    def config(self: _Trainer) -> DictConfig:
        """`cfg` as code written for OmegaConf reads it; made when it is first asked for, which takes time."""
        return readable_config(self.cfg)

    @property
    def global_steps(self: _Trainer) -> int:
        """The step that runs, or ran last: `global_step`."""
        return self.global_step

    @property
    def use_reference_policy(self: _Trainer) -> bool:
        """Whether a KL term needs the reference: `use_reference`."""
        return self.use_reference

    @property
    def use_rm(self: _Trainer) -> bool:
        """Whether a reward model scores: `use_reward_model`."""
        return self.use_reward_model

    def _validate(self: _Trainer) -> dict[str, float]:
        """`validate`."""
        return self.validate()

    def _save_checkpoint(self: _Trainer) -> None:
        """Save this step, and wait until it is on disk. `fit` saves by itself, and does not wait."""
        self.checkpoints.begin(self.global_step)
        self.finish_checkpoint()

    def _balance_batch(
        self: _Trainer, batch: DataProto, metrics: dict[str, float], logging_prefix: str = "global_seqlen"
    ) -> None:
        """Change the rows' places in `batch` so that all workers of the actor get about as many tokens.

        `fit` needs no call: rows are dealt so, and answers come in the rows' order (trainer.balance_batch).
        """
        lengths = batch.batch["attention_mask"].sum(dim=-1).numpy()
        sizes = even_sizes(len(batch), self.actor_rollout_wg.world_size)
        order = balanced_order(lengths, sizes)
        batch.reorder(torch.from_numpy(order))
        loads = [int(part.sum()) for part in np.split(lengths[order], np.cumsum(sizes)[:-1])]
        metrics[f"{logging_prefix}/balanced_min"] = min(loads)
        metrics[f"{logging_prefix}/balanced_max"] = max(loads)
