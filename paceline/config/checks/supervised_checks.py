"""Values that no training on given texts can have; as for PPO, all of them are found before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.catalog import BACKENDS
from paceline.config import SFTConfig, SupervisedConfig
from paceline.config.checks import check_loggers, check_ranges
from paceline.config.checks.model_checks import (
    backend_problems,
    check_tensor_parallelism,
    cpu_problems,
    lora_problems,
    model_and_tokenizer_problems,
)
from paceline.config.checks.run_checks import check_course
from paceline.config.derived import GLOBAL_POOL, num_devices, with_backend
from paceline.config.dialect.choices import refused_choice
from paceline.config.keys import value_of
from paceline.config.path_checks import data_files, readable_head, table_problems
from paceline.config.supervised import DPOConfig, PairDataConfig, RewardModelTrainingConfig


def check_supervised(cfg: SupervisedConfig) -> list[str]:
    """All problems of a complete configuration; none is an empty list."""
    cfg = with_backend(cfg)
    out_of_range = list(check_ranges(cfg))
    problems = [*out_of_range, *check_loggers(cfg.trainer.logger), *_check_files(cfg), *_check_model(cfg)]
    problems += check_course(cfg)
    if not out_of_range:
        problems += _check_devices(cfg)
    return problems


def wanted_columns(cfg: SupervisedConfig) -> list[list[str]]:
    """Keys of the columns that a file must have: one of these lists."""
    if isinstance(cfg, SFTConfig):
        return [["data.messages_key"], ["data.prompt_key", "data.response_key"]]
    return [["data.prompt_key", "data.chosen_key", "data.rejected_key"]]


def _check_files(cfg: SupervisedConfig) -> Iterator[str]:
    data = cfg.data
    if not data.train_files:
        yield "data.train_files is not set; set it to a data file (parquet, JSON lines, CSV) or a list of them."
    names = ["data.prompt_key", *(key for keys in wanted_columns(cfg) for key in keys)]
    empty = [key for key in dict.fromkeys(names) if not value_of(cfg, key)]
    for key in empty:
        yield f"{key} is empty; set it to the name of a column."
    for key in ("data.train_files", "data.val_files"):
        files = data_files(value_of(cfg, key))
        for file in files:
            yield from table_problems(key, file)
        heads = {file: head for file in files if (head := readable_head(file))}
        for file, (_, columns) in heads.items() if not empty else ():
            if not any(all(value_of(cfg, name) in columns for name in names) for names in wanted_columns(cfg)):
                wanted = " or ".join(
                    " and ".join(f"{value_of(cfg, name)!r} ({name})" for name in names) for names in wanted_columns(cfg)
                )
                yield f"{key}: {file} wants the columns {wanted}, and has {', '.join(columns) or 'none'}."
        rows = sum(rows for rows, _ in heads.values())
        if heads and not rows:
            yield f"{key}: there are no rows in {', '.join(heads)}. Set it to files that have some."
        elif key == "data.train_files" and heads and data.drop_last:
            most = rows if data.train_max_samples < 0 else min(rows, data.train_max_samples)
            if most < data.train_batch_size:
                yield (
                    f"data.drop_last=True leaves nothing to train on: there are {most} rows, less than one batch of "
                    f"data.train_batch_size={data.train_batch_size}. Set data.drop_last=False or a smaller batch."
                )
    if isinstance(data, PairDataConfig) and data.truncation == "right":
        yield (
            "data.truncation=right would cut the replies of pairs, by which they differ. Set it to left, which cuts "
            "the prompt, or to drop."
        )


def _check_model(cfg: SupervisedConfig) -> Iterator[str]:
    model, engine = cfg.model, cfg.engine
    if model.path is None:
        yield "model.path is not set; set it to a folder of a Hugging Face model or a hub id."
    yield from model_and_tokenizer_problems("model", model)
    if isinstance(cfg, RewardModelTrainingConfig) and model.lora_rank > 0:
        yield (
            f"model.lora_rank={model.lora_rank}: a reward model has a new score head, which adapters leave untrained. "
            "Set it to 0."
        )
    if isinstance(cfg, DPOConfig) and cfg.loss.form == "ipo" and cfg.loss.label_smoothing > 0:
        yield "loss.label_smoothing is not of loss.form=ipo. Set it to 0, or loss.form to sigmoid or sigmoid_norm."
    strategy = str(engine.strategy)
    if BACKENDS.get(strategy) is None:
        yield refused_choice("engine.strategy", strategy, BACKENDS.built_in)
    yield from lora_problems("model", model, "engine", strategy)
    yield from backend_problems(cfg, "engine", "model", ["engine.fsdp_config."])
    yield from cpu_problems(cfg)


def _check_devices(cfg: SupervisedConfig) -> Iterator[str]:
    devices = num_devices(cfg)
    strategy = str(cfg.engine.strategy)
    yield from check_tensor_parallelism(cfg, [("engine", strategy, GLOBAL_POOL)], {GLOBAL_POOL: [devices]})
    backend = BACKENDS.get(strategy)
    if backend is not None and not backend.many_devices and devices > 1:
        yield (
            f"engine.strategy={strategy} works on one device, and there are {devices}. Set engine.strategy=fsdp2 or "
            "trainer.n_gpus_per_node=1."
        )
    if (rows := cfg.data.train_batch_size) < devices:
        yield f"data.train_batch_size={rows} leaves some of {devices} devices idle. Set it to at least {devices}."
