"""From what a user gave to the complete configuration of a run: checked, with the device and the run's folder."""

from __future__ import annotations

from typing import TypeVar

from omegaconf import DictConfig, OmegaConf

from paceline.config import PPOConfig, SupervisedConfig
from paceline.config.checks import all_problems, without_unread
from paceline.config.checks.model_checks import check_device
from paceline.config.checks.supervised_checks import check_supervised
from paceline.config.derived import Root, run_dir_of, with_trainer_keys
from paceline.config.load import Config, Reading, read_config
from paceline.errors import ConfigError
from paceline.external import import_external
from paceline.trainer.device import detect_device, joins_cluster

AnyConfig = TypeVar("AnyConfig", DictConfig, PPOConfig)
SupervisedRoot = TypeVar("SupervisedRoot", bound=SupervisedConfig)


def complete_config(config: Config) -> PPOConfig:
    """`config` over the defaults, checked, with the device and the run's folder filled in."""
    return complete_reading(read_config(config))


def complete_reading(reading: Reading[PPOConfig]) -> PPOConfig:
    """The same of a configuration that was read already; a ConfigError has the problems of reading, too."""
    cfg = with_run_dir(reading.cfg)
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


def complete_supervised(reading: Reading[SupervisedRoot]) -> SupervisedRoot:
    """The same of the configuration of a run that trains on given texts."""
    cfg = with_run_dir(reading.cfg)
    problems: list[str] = []
    try:
        import_external(cfg.model.external_lib)
    except ConfigError as error:
        problems = error.problems
    problems += without_unread(check_supervised(cfg), reading.problems)
    if problems:
        raise ConfigError(problems)
    if joins_cluster(cfg) or cfg.trainer.device is not None:
        return cfg
    cfg = with_trainer_keys(cfg, device=detect_device())
    if problems := check_supervised(cfg):  # what depends on the device
        raise ConfigError(problems)
    return cfg


def with_run_dir(cfg: Root) -> Root:
    """With the run's folder, absolute, because the TaskRunner may run in another one."""
    return with_trainer_keys(cfg, default_local_dir=str(run_dir_of(cfg.trainer).absolute()))


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
        return with_trainer_keys(config, device=detect_device())
    if OmegaConf.select(config, "trainer.device") is None:
        OmegaConf.update(config, "trainer.device", detect_device(), force_add=True)
    return config
