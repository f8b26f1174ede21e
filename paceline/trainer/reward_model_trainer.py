"""Training of a reward model on pairs: `paceline reward-model data.train_files=pairs.parquet model.path=model`."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from paceline.config import RewardModelTrainingConfig
from paceline.trainer.supervised_run import SupervisedRunner, run_from_hydra, supervised_cli


class RewardModelRunner(SupervisedRunner):
    """Drives the training of a reward model from inside Ray."""

    root = RewardModelTrainingConfig


@hydra.main(config_path="config", config_name="reward_model_trainer", version_base=None)
def main(config: DictConfig) -> None:
    """Train as Hydra's configuration says."""
    run_from_hydra(config, RewardModelRunner)


def cli() -> None:
    """The command line."""
    supervised_cli(main, RewardModelTrainingConfig, "reward_model", "python -m paceline.trainer.reward_model_trainer")


if __name__ == "__main__":
    cli()
