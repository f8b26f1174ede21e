"""The entry of a run that trains on given texts: checks everything, starts Ray, and runs a SupervisedRunner to its end.

Ray, torch and transformers are imported where they are needed: a bad configuration and --help answer at once.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import DictConfig

from paceline.command_line import errors_as_exit_codes, hydra_errors_as_ours, shown_without_our_frames
from paceline.config import SupervisedConfig
from paceline.config.derived import num_devices, run_dir_of, with_backend
from paceline.config.describe import render_help
from paceline.config.load import SupervisedSource, read_config_of
from paceline.config.overrides import check_overrides
from paceline.config.path_checks import data_files
from paceline.config.tables import table_head
from paceline.errors import ConfigError, PacelineError
from paceline.external import import_external
from paceline.log_file import configure_logging, log_process, terminal_lines
from paceline.run_folder import LOGS_FOLDER
from paceline.trainer.complete import complete_supervised
from paceline.trainer.launch import run_with_restarts, running_ray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from paceline.single_controller.ray import RayWorkerGroup
    from paceline.trainer.supervised_trainer import SupervisedTrainer

logger = logging.getLogger(__name__)


class SupervisedRunner:
    """Drives a run from inside Ray. A subclass says of which kind; `build_trainer` may be changed, too."""

    root: ClassVar[type[SupervisedConfig]]

    def run(self, config: DictConfig) -> None:
        """Train to the end."""
        from paceline.single_controller.ray.heartbeat import start_actor_heartbeat

        log_process("driver")
        start_actor_heartbeat()
        import_external(config.model.external_lib)
        trainer = self.build_trainer(config)
        trainer.init_workers()
        trainer.fit()

    def build_trainer(
        self, config: SupervisedSource, group_cls: type[RayWorkerGroup] | None = None
    ) -> SupervisedTrainer:
        """The trainer of the configuration; its workers are not started."""
        from paceline.single_controller.ray import RayWorkerGroup
        from paceline.trainer.objectives import OBJECTIVES
        from paceline.trainer.supervised_trainer import SupervisedTrainer

        cfg = read_config_of(self.root, config).cfg
        return SupervisedTrainer(cfg, _tokenizer(cfg), OBJECTIVES[self.root], group_cls or RayWorkerGroup)


def run_supervised(config: SupervisedSource, runner: type[SupervisedRunner]) -> Path:
    """Check `config`, then run it in Ray to its end: in the Ray that is running, or in one for this run alone.

    `config` is Hydra's, `OmegaConf.load(...)` of any subset of the keys, a dict or a dataclass. Gives the run's folder.
    """
    try:
        cfg = complete_supervised(read_config_of(runner.root, config))
        look_at_texts(cfg)
    except ConfigError as error:
        shown_without_our_frames(error)
        raise error.with_traceback(None) from None

    from paceline.report.live import closing_text, live_view

    run_dir = run_dir_of(cfg.trainer)
    sys.stdout.write(plan_of(cfg))
    sys.stdout.flush()
    if cfg.trainer.dry_run:
        return run_dir
    with running_ray(cfg) as session, live_view(run_dir, cfg.trainer.live_view), terminal_lines(run_dir / LOGS_FOLDER):
        run_with_restarts(runner, session, cfg)
    if not cfg.trainer.val_only:
        sys.stdout.write(closing_text(run_dir))
    return run_dir


def plan_of(cfg: SupervisedConfig) -> str:
    """What the batch sizes come to."""
    data, trainer = cfg.data, cfg.trainer
    rows = sum(table_head(file)[0] for file in data_files(data.train_files))
    rows = rows if data.train_max_samples < 0 else min(rows, data.train_max_samples)
    per_epoch = rows // data.train_batch_size if data.drop_last else -(-rows // data.train_batch_size)
    steps = trainer.total_training_steps or per_epoch * trainer.total_epochs
    devices, strategy = num_devices(cfg), with_backend(cfg).engine.strategy
    kind = trainer.device or "of the cluster"
    return (
        f"{rows:,} rows, {min(data.train_batch_size, rows):,} an optimizer step: {per_epoch:,} steps an epoch, "
        f"{steps:,} in all\n{devices} device{'s' if devices > 1 else ''} ({kind}), engine.strategy={strategy}\n"
    )


def look_at_texts(cfg: SupervisedConfig) -> None:
    """Raise what is wrong with the model and the texts before Ray starts; all problems together."""
    from paceline.trainer.preflight import crowded_cores, login_problems, quiet_reading, together
    from paceline.trainer.unloaded_models import config_of, hub_problems, max_positions, vocabulary_problems

    if remark := crowded_cores(cfg):
        logger.warning("%s", remark)
    model = cfg.model
    named = {"model.path": str(model.path)}
    asked = named if model.tokenizer_path is None else {**named, "model.tokenizer_path": model.tokenizer_path}
    problems: list[PacelineError] = list(map(ConfigError, login_problems(cfg)))
    if unread := list(map(ConfigError, hub_problems(asked))):  # without the model there is no tokenizer
        raise together([*problems, *unread])
    limit = model.max_position_embeddings or max_positions(config_of(str(model.path)))
    if limit is not None and cfg.data.max_length > limit:
        problems.append(
            ConfigError(
                f"data.max_length={cfg.data.max_length}, but the model of model.path has {limit} positions "
                "(max_position_embeddings in its config.json). Lower it, or set model.max_position_embeddings."
            )
        )
    try:
        tokenizer = _tokenizer(cfg)
    except PacelineError as error:
        raise together([*problems, error]) from error
    largest = -1
    for key in ("train", "val"):
        try:
            with quiet_reading():
                largest = max(largest, _read_some(cfg, tokenizer, key))
        except PacelineError as error:
            problems.append(error)
    where = str(model.tokenizer_path or model.path)
    problems += map(ConfigError, vocabulary_problems(named, tokenizer, largest, "model.tokenizer_path", where))
    if problems:
        raise together(problems)


def _tokenizer(cfg: SupervisedConfig) -> PreTrainedTokenizerBase:
    from paceline.data.tokenizer import load_tokenizer

    model = cfg.model
    return load_tokenizer(str(model.tokenizer_path or model.path), trust_remote_code=model.trust_remote_code)


def _read_some(cfg: SupervisedConfig, tokenizer: PreTrainedTokenizerBase, which: str) -> int:
    """Tokenise small data as a whole, of large data the first rows of each file; gives the largest token."""
    from paceline.trainer.objectives import OBJECTIVES
    from paceline.trainer.preflight import SAMPLED, SMALL

    data = cfg.data
    files = data_files(data.train_files if which == "train" else data.val_files)
    if not files:
        return -1
    most = data.train_max_samples if which == "train" else data.val_max_samples
    total = sum(table_head(file)[0] for file in files)
    rows = OBJECTIVES[type(cfg)].rows
    if (total if most < 0 else min(most, total)) <= SMALL:
        read = [rows(files, tokenizer, data, most)]
    else:  # only all rows show whether a filter leaves anything
        sampled = dataclasses.replace(data, truncation="left") if data.truncation == "drop" else data
        read = [rows(file, tokenizer, sampled, max(1, SAMPLED // len(files))) for file in files]
    if which == "train" and not any(one.ends_with_eos for one in read):
        logger.warning(
            "no text ends with the tokenizer's end-of-sequence token %r, by which a rollout ends: a model would not "
            "learn to stop. Give a tokenizer (model.tokenizer_path) whose eos_token the chat template writes",
            tokenizer.eos_token,
        )
    return max(one.largest_token() for one in read)


def supervised_cli(hydra_main: Callable[[], Any], root: type[SupervisedConfig], kind: str, command: str) -> None:
    """The command line of a `@hydra.main` function: --help at once, and all bad overrides in one message."""
    arguments = sys.argv[1:]
    if {"--help", "-h"} & set(arguments):
        sys.stdout.write(render_help(command, kind))
        return
    with errors_as_exit_codes(), hydra_errors_as_ours(getattr(hydra_main, "__wrapped__", None)):
        sys.argv[1:] = check_overrides(arguments, root)
        hydra_main()


def run_from_hydra(config: DictConfig, runner: type[SupervisedRunner]) -> None:
    """What the function that Hydra calls does."""
    configure_logging()
    with errors_as_exit_codes():
        run_supervised(config, runner)
