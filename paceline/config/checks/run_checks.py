"""The run: validation, resuming, restarts, folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from paceline.config import PPOConfig
from paceline.config.keys import value_of
from paceline.config.path_checks import checkpoint_problems, writable_problems


def check_run(cfg: PPOConfig, device: str | None) -> Iterator[str]:
    trainer = cfg.trainer
    if device == "cpu" and trainer.cpus_per_device == 0:
        yield "trainer.cpus_per_device=0 on a CPU: a device would take nothing, and no pool could be full. Set it to 1."
    if cfg.data.val_files is None or cfg.data.val_files == []:
        if trainer.val_only:
            yield "trainer.val_only=True has nothing to validate on; set data.val_files."
        if trainer.test_freq not in (None, -1):
            yield f"trainer.test_freq={trainer.test_freq} has nothing to validate on; set data.val_files or -1."
        if trainer.log_val_generations > 0:
            yield (
                f"trainer.log_val_generations={trainer.log_val_generations} has nothing to validate on; set "
                "data.val_files or 0."
            )
        if trainer.validation_data_dir is not None:
            yield "trainer.validation_data_dir has nothing to validate on; set data.val_files or leave it null."
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
    for key in ("trainer.project_name", "trainer.experiment_name"):
        if not value_of(cfg, key):
            yield f"{key} is empty; set it to a name."
    for key in ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir"):
        if folder := value_of(cfg, key):
            yield from writable_problems(key, folder)
    if trainer.rollout_data_dir is not None and trainer.rollout_data_dir == trainer.validation_data_dir:
        yield (
            f"trainer.validation_data_dir={trainer.validation_data_dir} is trainer.rollout_data_dir too: both write "
            "<step>.jsonl there. Set it to another folder."
        )
    timeline = cfg.ray_kwargs.timeline_json_file
    if timeline and Path(timeline).expanduser().is_dir():
        yield f"ray_kwargs.timeline_json_file: {timeline} is a folder. Set it to a file in it."
    elif timeline:
        yield from writable_problems("ray_kwargs.timeline_json_file", str(Path(timeline).parent))
