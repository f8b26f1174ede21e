"""From what a user gave to the complete configuration of a run: checked, with the device and the run's folder."""

from __future__ import annotations

import dataclasses
import os
from typing import TypeVar

from omegaconf import DictConfig, OmegaConf

from paceline.config import PPOConfig
from paceline.config.checks import all_problems, check_device
from paceline.config.load import Config, Reading, read_config
from paceline.errors import ConfigError
from paceline.external import import_external
from paceline.run_folder import default_run_dir
from paceline.trainer.device import detect_device, joins_cluster

AnyConfig = TypeVar("AnyConfig", DictConfig, PPOConfig)


def complete_config(config: Config) -> PPOConfig:
    """`config` over the defaults, checked, with the device and the run's folder filled in."""
    return complete_reading(read_config(config))


def complete_reading(reading: Reading) -> PPOConfig:
    """The same of a configuration that was read already; a ConfigError has the problems of reading, too."""
    cfg = reading.cfg
    trainer = cfg.trainer
    # Absolute here, because the TaskRunner may run in another folder.
    run_dir = trainer.default_local_dir or os.path.abspath(
        default_run_dir(trainer.project_name, trainer.experiment_name)
    )
    cfg = dataclasses.replace(cfg, trainer=dataclasses.replace(trainer, default_local_dir=run_dir))
    problems: list[str] = []
    try:
        import_external(cfg.actor_rollout_ref.model.external_lib)
    except ConfigError as error:
        problems = error.problems
    problems += all_problems(cfg, reading.problems)
    if problems:
        raise ConfigError(problems)
    # Asked last, because it loads torch: a bad configuration is answered without it.
    return cfg if joins_cluster(cfg) else with_device(cfg)


def with_device(cfg: PPOConfig) -> PPOConfig:
    """`cfg` with the device that it runs on. Where it named none, what depends on the device is checked now."""
    if cfg.trainer.device is not None:
        return cfg
    filled = auto_set_device(cfg)
    if problems := list(check_device(filled)):
        raise ConfigError(problems)
    return filled


def auto_set_device(config: AnyConfig) -> AnyConfig:
    """Fill trainer.device where it is null: in a DictConfig in place, of a PPOConfig in the copy that is returned."""
    if isinstance(config, PPOConfig):
        if config.trainer.device is not None:
            return config
        return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, device=detect_device()))
    if OmegaConf.select(config, "trainer.device") is None:
        OmegaConf.update(config, "trainer.device", detect_device(), force_add=True)
    return config
