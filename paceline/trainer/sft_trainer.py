"""Supervised fine-tuning: `python -m paceline.trainer.sft_trainer data.train_files=chats.parquet model.path=model`."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from paceline.config import SFTConfig
from paceline.trainer.supervised_run import SupervisedRunner, run_from_hydra, supervised_cli


class SFTRunner(SupervisedRunner):
    """Drives supervised fine-tuning from inside Ray."""

    root = SFTConfig


@hydra.main(config_path="config", config_name="sft_trainer", version_base=None)
def main(config: DictConfig) -> None:
    """Train as Hydra's configuration says."""
    run_from_hydra(config, SFTRunner)


def cli() -> None:
    """The command line."""
    supervised_cli(main, SFTConfig, "sft", "python -m paceline.trainer.sft_trainer")


if __name__ == "__main__":
    cli()
