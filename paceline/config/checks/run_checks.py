"""What a run reads and writes: data files, reward functions, checkpoints, folders."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

from paceline.config import AnyRunConfig, PPOConfig
from paceline.config.keys import value_of
from paceline.config.machine_problems import MachineProblem
from paceline.config.path_checks import (
    checkpoint_problems,
    data_files,
    python_file_problems,
    readable_head,
    table_problems,
    writable_problems,
)
from paceline.config.reward import read_weights
from paceline.errors import ConfigError
from paceline.external import is_installed
from paceline.text import did_you_mean

TRANSFER_QUEUE_PACKAGE = "transfer_queue"
OTLP_PACKAGE = "opentelemetry.exporter.otlp.proto.http"
RECORDS = ("never", "every", "on_anomaly")


def check_data(cfg: PPOConfig) -> Iterator[str]:
    data = cfg.data
    if not data.train_files:
        yield "data.train_files is not set; set it to a data file (parquet, JSON lines, CSV) or a list of them."
    for key in ("data.train_files", "data.val_files") if data.custom_cls.path is None else ():
        for file in data_files(value_of(cfg, key)):
            yield from table_problems(key, file)
    yield from _check_classes(cfg)
    for key in ("data.prompt_key", "data.reward_fn_key"):
        if not value_of(cfg, key):
            yield f"{key} is empty; set it to the name of a column."
    if data.drop_last and 0 < data.train_max_samples < data.train_batch_size:
        yield (
            f"data.drop_last=True leaves nothing to train on: data.train_max_samples={data.train_max_samples} is less "
            f"than one batch of data.train_batch_size={data.train_batch_size}. Set data.drop_last=False."
        )


def _check_classes(cfg: PPOConfig) -> Iterator[str]:
    """A dataset and a sampler of the user's own."""
    custom, sampler = cfg.data.custom_cls, cfg.data.sampler
    for path_key, path, name_key, name in (
        ("data.custom_cls.path", custom.path, "data.custom_cls.name", custom.name),
        ("data.sampler.class_path", sampler.class_path, "data.sampler.class_name", sampler.class_name),
    ):
        if path is not None and name is not None:
            yield from python_file_problems(path_key, path, name_key, name, "class")
        elif path is not None:
            yield f"{name_key} is not set; set it to the name of a class in {path}."
        elif name is not None:
            yield f"{name_key}={name} has no file to be in; set {path_key}."
    if sampler.class_path is not None and (schedule := cfg.trainer.schedule.name) != "sync":
        yield (
            f"data.sampler.class_path with trainer.schedule.name={schedule}: prompts drawn ahead are drawn again after "
            "a resume, and a sampler may give others. Set trainer.schedule.name=sync."
        )


def check_columns(cfg: PPOConfig) -> Iterator[str]:
    """What the footers of the data files say: no row, no prompts, less than a batch, no such column to keep."""
    data = cfg.data
    if data.custom_cls.path is not None:
        return
    seen: set[str] = set()
    all_read = True
    for key in ("data.train_files", "data.val_files"):
        files = data_files(value_of(cfg, key))
        footers = {file: footer for file in files if (footer := readable_head(file))}
        all_read = all_read and len(footers) == len(files)
        seen.update(name for _, columns in footers.values() for name in columns)
        lacking = [file for file, (_, columns) in footers.items() if data.prompt_key not in columns]
        if lacking and data.prompt_key:
            columns = footers[lacking[0]][1]
            yield (
                f"data.prompt_key={data.prompt_key}: {lacking[0]} has no such column. Set it to one of those that it "
                f"has: {', '.join(columns)}."
            )
        rows = sum(rows for rows, _ in footers.values())
        if footers and not rows:
            yield f"{key}: there are no rows in {', '.join(footers)}. Set it to files that have some."
        elif key == "data.train_files" and footers and data.drop_last and rows < data.train_batch_size:
            yield (
                f"data.drop_last=True leaves nothing to train on: {key} has {rows} rows, less than one batch of "
                f"data.train_batch_size={data.train_batch_size}. Set data.drop_last=False or a smaller batch."
            )
    if seen and all_read and (missing := sorted(set(data.keep_columns or ()) - seen)):
        yield (
            f"data.keep_columns has {', '.join(missing)}, and no file has such a column; they have "
            f"{', '.join(sorted(seen))}."
        )


def check_rewards(cfg: PPOConfig) -> Iterator[str]:
    """Reward functions, weights, the sandbox and the penalty of long responses."""
    rewards, sandbox = cfg.reward_model, cfg.reward_model.sandbox
    custom = cfg.custom_reward_function
    if not custom.name.isidentifier():
        yield f"custom_reward_function.name={custom.name!r} is not a function's name. Set it to one, as compute_score."
    elif custom.path is not None:
        yield from python_file_problems(
            "custom_reward_function.path", custom.path, "custom_reward_function.name", custom.name
        )
    if custom.reward_kwargs and custom.path is None:
        yield "custom_reward_function.reward_kwargs has no function to go to; set custom_reward_function.path."
    try:
        read_weights(rewards.weights)
    except ConfigError as error:
        yield from error.problems
    if rewards.weights and not rewards.enable:
        yield (
            "reward_model.weights has no part without a reward model; set reward_model.enable=True and "
            "reward_model.model.path, or leave it empty."
        )
    if sandbox.url is not None and not re.match(r"https?://[^/]", sandbox.url):
        yield f"reward_model.sandbox.url={sandbox.url!r} is no address of a service; set one such as http://sandbox:8080."
    if sandbox.url is not None and sandbox.timeout_seconds < sandbox.wall_seconds:
        yield (
            f"reward_model.sandbox.timeout_seconds={sandbox.timeout_seconds:g} is shorter than a program may run "
            f"(reward_model.sandbox.wall_seconds={sandbox.wall_seconds:g}); raise it or lower that."
        )
    buffer = rewards.reward_kwargs.overlong_buffer_cfg
    max_len = rewards.reward_kwargs.max_resp_len or cfg.data.max_response_length
    if buffer.enable and buffer.len > max_len:
        yield (
            f"reward_model.reward_kwargs.overlong_buffer_cfg.len={buffer.len} is more than a response may have: "
            f"{max_len} tokens (reward_model.reward_kwargs.max_resp_len, or else data.max_response_length). Lower it."
        )


def _check_port(cfg: AnyRunConfig) -> Iterator[str]:
    """Whether the port is free, where the driver will be on this machine."""
    port = cfg.trainer.prometheus_port
    if port is None or cfg.ray_kwargs.ray_init.get("address"):
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            yield MachineProblem(
                f"trainer.prometheus_port={port} can't be served on here: {error}. Set another, or null."
            )


def _check_collector(endpoint: str | None) -> Iterator[str]:
    if endpoint is None:
        return
    if not re.match(r"https?://[^/]", endpoint):
        yield f"trainer.otlp_endpoint={endpoint!r} is no address; set it to one such as http://127.0.0.1:4318."
        return
    if not is_installed(OTLP_PACKAGE):
        yield MachineProblem(
            "trainer.otlp_endpoint needs the exporter of OpenTelemetry, which is not installed: "
            'pip install "paceline[otel]"'
        )


def _check_queue(cfg: PPOConfig) -> Iterator[str]:
    if not cfg.transfer_queue.enable:
        return
    if cfg.trainer.columns_stay_bytes is None:
        yield (
            "transfer_queue.enable=True with trainer.columns_stay_bytes=null: no column stays that it could keep; "
            "give columns_stay_bytes a number, such as 32000, or leave transfer_queue.enable out."
        )
    elif not is_installed(TRANSFER_QUEUE_PACKAGE):
        yield MachineProblem(
            "transfer_queue.enable=True needs TransferQueue, which is not installed: "
            'pip install "paceline[transfer-queue]"'
        )


def _check_record(record: str | list[int]) -> Iterator[str]:
    if isinstance(record, str) and record not in RECORDS:
        hint = did_you_mean(record, RECORDS)
        yield (
            f"trainer.record={record} is neither {', '.join(RECORDS)} nor a list of steps; set it to one of them, such "
            f"as [1,50].{hint}"
        )
    elif isinstance(record, list) and (not record or min(record) < 1):
        yield f"trainer.record={record} names no steps from 1 on; set it to such as [1,50], or never."


def check_run(cfg: PPOConfig) -> Iterator[str]:
    """Validation, resuming, restarts, folders."""
    trainer = cfg.trainer
    yield from check_course(cfg)
    yield from _check_record(trainer.record)
    yield from _check_queue(cfg)
    if not cfg.data.val_files:
        if trainer.log_val_generations > 0:
            yield (
                f"trainer.log_val_generations={trainer.log_val_generations} has nothing to validate on; set "
                "data.val_files or 0."
            )
        if trainer.validation_data_dir is not None:
            yield "trainer.validation_data_dir has nothing to validate on; set data.val_files or leave it null."
    for key in ("trainer.rollout_data_dir", "trainer.validation_data_dir"):
        if folder := value_of(cfg, key):
            yield from writable_problems(key, folder)
    if trainer.rollout_data_dir is not None and trainer.rollout_data_dir == trainer.validation_data_dir:
        yield (
            f"trainer.validation_data_dir={trainer.validation_data_dir} is trainer.rollout_data_dir too: both write "
            "<step>.jsonl there. Set it to another folder."
        )


def check_course(cfg: AnyRunConfig) -> Iterator[str]:
    """What runs of all kinds have: validation, resuming, restarts, a folder."""
    trainer = cfg.trainer
    if not cfg.data.val_files:
        if trainer.val_only:
            yield "trainer.val_only=True has nothing to validate on; set data.val_files."
        if trainer.test_freq not in (None, -1):
            yield f"trainer.test_freq={trainer.test_freq} has nothing to validate on; set data.val_files or -1."
    if trainer.resume_mode == "resume_path":
        if trainer.resume_from_path is None:
            yield "trainer.resume_from_path is not set, but trainer.resume_mode=resume_path; set it to a checkpoint."
        else:
            yield from checkpoint_problems("trainer.resume_from_path", trainer.resume_from_path)
    elif trainer.resume_from_path is not None:
        yield (
            f"trainer.resume_from_path has no part in trainer.resume_mode={trainer.resume_mode}; set "
            "trainer.resume_mode=resume_path or leave it null."
        )
    if trainer.max_restarts > 0 and trainer.save_freq in (None, -1):
        yield (
            f"trainer.max_restarts={trainer.max_restarts} with trainer.save_freq={trainer.save_freq}: there would be "
            "no checkpoint to start again from. Set trainer.save_freq, or trainer.max_restarts=0."
        )
    yield from _check_port(cfg)
    yield from _check_collector(trainer.otlp_endpoint)
    for key in ("trainer.project_name", "trainer.experiment_name"):
        if not value_of(cfg, key):
            yield f"{key} is empty; set it to a name."
    if trainer.default_local_dir:
        yield from writable_problems("trainer.default_local_dir", trainer.default_local_dir)
    timeline = cfg.ray_kwargs.timeline_json_file
    if timeline and Path(timeline).expanduser().is_dir():
        yield f"ray_kwargs.timeline_json_file: {timeline} is a folder. Set it to a file in it."
    elif timeline:
        yield from writable_problems("ray_kwargs.timeline_json_file", str(Path(timeline).parent))
