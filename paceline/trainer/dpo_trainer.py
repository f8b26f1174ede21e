"""Direct preference optimisation: `paceline dpo data.train_files=pairs.parquet model.path=model`."""

from __future__ import annotations

import hydra
from omegaconf import DictConfig

from paceline.config import DPOConfig
from paceline.trainer.supervised_run import SupervisedRunner, run_from_hydra, supervised_cli


class DPORunner(SupervisedRunner):
    """Drives direct preference optimisation from inside Ray."""

    root = DPOConfig


@hydra.main(config_path="config", config_name="dpo_trainer", version_base=None)
def main(config: DictConfig) -> None:
    """Train as Hydra's configuration says."""
    run_from_hydra(config, DPORunner)


def cli() -> None:
    """The command line."""
    supervised_cli(main, DPOConfig, "dpo", "python -m paceline.trainer.dpo_trainer")


if __name__ == "__main__":
    cli()
