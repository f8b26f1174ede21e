"""`paceline quickstart`: from nothing to a model that PPO has taught, in a few minutes on a CPU.

Makes a character-level Qwen2 of about one million parameters, pre-trains it on sums that it then answers in two
formats and with mistakes, writes GSM8K-style parquet, and runs PPO with critic and reference. What it reports are the
accuracies that the run measured on held-out sums.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli import make_parser
from paceline.cli.quickstart.task import DATA_SOURCE, split_sums, write_parquet
from paceline.command_line import errors_as_exit_codes
from paceline.files import replacing_folder
from paceline.log_file import configure_logging
from paceline.run_folder import METRICS_FILE, default_run_dir

if TYPE_CHECKING:
    from omegaconf import DictConfig

logger = logging.getLogger(__name__)

ACCURACY = f"val-core/{DATA_SOURCE}/acc/mean@"
NUM_DEVICES = {"colocated": 1, "split": 2}

PRESET = (
    "data.train_batch_size=320",
    "data.max_prompt_length=8",
    "data.max_response_length=10",
    "actor_rollout_ref.actor.strategy=local",
    "actor_rollout_ref.actor.ppo_mini_batch_size=160",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=160",
    "actor_rollout_ref.actor.optim.lr=3e-4",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=linear",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.001",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=320",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=320",
    "critic.strategy=local",
    "critic.ppo_micro_batch_size_per_gpu=160",
    "critic.forward_micro_batch_size_per_gpu=320",
    "critic.optim.lr=1e-3",
    "trainer.device=cpu",
    # The same in both placements, so that both give the same numbers.
    "trainer.threads_per_worker=1",
    "trainer.total_training_steps=50",
    "trainer.test_freq=10",
    "trainer.project_name=quickstart",
)
"""The run's configuration, as one would type it; what the user types comes after it and wins."""


def main(argv: Sequence[str]) -> int:
    """Prepare, train, and print one line with the accuracy before and after. Gives the exit code."""
    arguments = _parser().parse_intermixed_args(argv)

    configure_logging()
    with errors_as_exit_codes():
        line = run(arguments.placement, arguments.overrides)
    if line is not None:
        print(line)
    return 0


def run(placement: str, overrides: Sequence[str]) -> str | None:
    """Run the quickstart to its end. Gives its last line, or None for a dry run, which measures nothing."""
    from paceline.config.load import load_config
    from paceline.trainer.main_ppo import complete_config, run_ppo

    # As a key it means the same as the option, the number of devices included.
    keys = dict(override.lstrip("+").split("=", 1) for override in overrides if "=" in override)
    chosen = keys.get("trainer.placement.name")
    placement = chosen if chosen in NUM_DEVICES else placement
    config = compose_config(placement, overrides)
    load_config(config)  # an unknown key or a wrong type ends it here, before a file is written
    run_dir = run_folder(config)
    config.trainer.default_local_dir = str(run_dir)
    material = run_dir / f"material-seed{config.trainer.seed}"
    _fill_data(config, material)
    makes_model = config.actor_rollout_ref.model.path is None
    if makes_model:
        # Stands for the model until there is one, so that a bad configuration is found before it is trained.
        config.actor_rollout_ref.model.path = "quickstart"
    complete_config(config)
    if config.trainer.dry_run:
        with tempfile.TemporaryDirectory() as folder:
            if makes_model:
                model = prepare_model(Path(folder) / "model", seed=config.trainer.seed, pretrained=False)
                config.actor_rollout_ref.model.path = str(model)
            run_ppo(config)
        return None

    logger.info("quickstart: %s placement, run folder %s", placement, run_dir)
    if makes_model:
        config.actor_rollout_ref.model.path = str(prepare_model(material / "model", seed=config.trainer.seed))
    run_ppo(config)
    return last_line(run_dir)


def compose_config(placement: str, overrides: Sequence[str]) -> DictConfig:
    """The shipped defaults, with the quickstart's preset and then the user's overrides on top."""
    from hydra import compose, initialize_config_dir

    import paceline.trainer
    from paceline.config.overrides import check_overrides

    preset = [
        *PRESET,
        f"trainer.placement.name={placement}",
        f"trainer.n_gpus_per_node={NUM_DEVICES[placement]}",
        f"trainer.experiment_name={placement}",
    ]
    config_dir = Path(paceline.trainer.__file__).parent / "config"
    with initialize_config_dir(str(config_dir), version_base=None):
        return compose("ppo_trainer", overrides=check_overrides([*preset, *overrides]))


def run_folder(config: DictConfig) -> Path:
    """The run's folder, absolute: the user's, or a new one by placement and time."""
    if config.trainer.default_local_dir is not None:
        return Path(config.trainer.default_local_dir).expanduser().absolute()
    name = f"quickstart-{config.trainer.placement.name}"
    return default_run_dir(name, time.strftime("%Y%m%d-%H%M%S")).absolute()


def prepare_model(folder: Path, seed: int, *, pretrained: bool = True) -> Path:
    """Make and pre-train the model in `folder`, unless an earlier run in the same folder did. Gives the folder.

    A dry run only looks at it: it needs no pre-training.
    """
    if folder.exists():
        logger.info("quickstart: the pre-trained model in %s is used again", folder)
        return folder

    from transformers.utils import logging as transformers_logging

    from paceline.cli.quickstart.model import build_model, build_tokenizer, pretrain

    transformers_logging.disable_progress_bar()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed)
    training, _ = split_sums(seed)
    if pretrained:
        logger.info("quickstart: pre-training a model of %.2f million parameters", model.num_parameters() / 1e6)
        pretrain(model, tokenizer, training, seed=seed)
    with replacing_folder(folder) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
    return folder


def last_line(run_dir: Path) -> str:
    """What the run achieved, by its own metrics.

    quickstart: accuracy 0.48 -> 0.97 in 50 steps (runs/quickstart-split/20250131-120000)
    """
    from paceline.report.trackers import read_metrics

    lines = read_metrics(run_dir / METRICS_FILE)
    steps = lines[-1]["step"] if lines else 0
    measured = [(line["step"], value) for line in lines for name, value in line.items() if name.startswith(ACCURACY)]
    if len(measured) > 1:
        result = f"accuracy {measured[0][1]:.2f} -> {measured[-1][1]:.2f} in {measured[-1][0] - measured[0][0]} steps"
    elif measured:
        result = f"accuracy {measured[0][1]:.2f} at step {measured[0][0]}, not measured again in {steps} steps"
    else:
        result = f"accuracy not measured in {steps} steps"
    return f"quickstart: {result} ({run_dir})"


def _fill_data(config: DictConfig, material: Path) -> None:
    """Write the task's files and name them in the config, where the user did not name others."""
    training, validation = split_sums(config.trainer.seed)
    for key, sums, split in (("train_files", training, "train"), ("val_files", validation, "test")):
        if config.data[key] is None:
            config.data[key] = str(material / f"{split}.parquet")
            write_parquet(sums, split, Path(config.data[key]))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "quickstart",
        "Make a tiny model and a task, and teach it with PPO: a few minutes on a CPU.",
        ("", "--placement split", "trainer.total_training_steps=4 trainer.seed=11"),
    )
    parser.add_argument(
        "--placement",
        choices=list(NUM_DEVICES),
        default="colocated",
        help="one process for all roles, or the critic beside the actor in a process of its own (default: colocated)",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="any key of the configuration, such as trainer.total_training_steps=4 or trainer.seed=11",
    )
    return parser
