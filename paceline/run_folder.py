"""The layout of a run's folder: what its files are called, how its checkpoints are found, which of them are complete.

    <run>/
      config.yaml  environment.json  status.json  metrics.jsonl  timeline.json  ledger.jsonl
      samples/     logs/             tensorboard/ mlflow/  swanlab/  wandb_run_id.txt and the like
      records/     alarms.jsonl      bundles of the flight recorder; steps that were far from the run
      model/                         the trained model, of sft, reward-model and dpo
      validation/                    the same files, of a look (trainer.val_only) at a run that has records
      stop                           asks the run to end after its step
      checkpoint                     asks it for a checkpoint after its step
      checkpoints/
        global_step_20/              actor/  critic/  rollouts/  trainer.json  manifest.json
        global_step_10/              critic/  trainer.pruned.json     one that lost a part: not to be resumed from
        latest_checkpointed_iteration.txt                             the step of the newest complete one

Nothing is written here. `paceline.trainer.ppo.checkpoint` writes checkpoints and verifies what is in them.
"""

from __future__ import annotations

import re
from pathlib import Path

RUNS_FOLDER = Path("runs")
"""Has the runs that name no folder, where they are started."""
CONFIG_FILE = "config.yaml"
ENVIRONMENT_FILE = "environment.json"
STATUS_FILE = "status.json"
METRICS_FILE = "metrics.jsonl"
TIMELINE_FILE = "timeline.json"
LEDGER_FILE = "ledger.jsonl"
ALARMS_FILE = "alarms.jsonl"
LOCK_FILE = ".lock"
STOP_FILE = "stop"
"""A file of this name in the run's folder asks the run to end after its step, with a checkpoint."""
CHECKPOINT_FILE = "checkpoint"
"""A file of this name asks the run for a checkpoint after its step; the run goes on."""
SAMPLES_FOLDER = "samples"
LOGS_FOLDER = "logs"
RECORDS_FOLDER = "records"
TENSORBOARD_FOLDER = "tensorboard"
MLFLOW_FOLDER = "mlflow"
SWANLAB_FOLDER = "swanlab"
VALIDATION_FOLDER = "validation"
CHECKPOINTS_FOLDER = "checkpoints"
MODEL_FOLDER = "model"
"""The trained model of a run on given texts, as a Hugging Face folder, adapters merged."""

LATEST = "latest_checkpointed_iteration.txt"
STATE = "trainer.json"
"""There as long as the checkpoint can be resumed from."""
PRUNED_STATE = "trainer.pruned.json"
MANIFEST = "manifest.json"
ACTOR = "actor"
CRITIC = "critic"
ROLLOUTS = "rollouts"
"""Responses of steps that were sampled before the checkpoint and train after it."""

CHECKPOINT_PREFIX = "global_step_"
_CHECKPOINT = re.compile(rf"{CHECKPOINT_PREFIX}(\d+)")


def default_run_dir(project: str, experiment: str) -> Path:
    """Where a run is kept that names no folder."""
    return RUNS_FOLDER / project / experiment


def records_folder(run_dir: Path, *, only_looks: bool) -> Path:
    """Where a run writes what it records. Who only looks at a run that has records leaves them: it may be going on."""
    return run_dir / VALIDATION_FOLDER if only_looks and (run_dir / METRICS_FILE).exists() else run_dir


def run_id_file(tracker: str) -> str:
    """The file that keeps the id which a run has with a tracker.

    >>> run_id_file("wandb")
    'wandb_run_id.txt'
    """
    return f"{tracker}_run_id.txt"


def checkpoint_name(step: int) -> str:
    """The name of a checkpoint's folder.

    >>> checkpoint_name(20)
    'global_step_20'
    """
    return f"{CHECKPOINT_PREFIX}{step}"


def step_of(folder: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None of any other folder, also of one that was set aside.

    >>> step_of(Path("checkpoints/global_step_20")), step_of(Path("checkpoints/global_step_20.1"))
    (20, None)
    """
    match = _CHECKPOINT.fullmatch(folder.name)
    return int(match[1]) if match else None


def list_checkpoints(checkpoints: Path) -> dict[int, Path]:
    """Step to folder, oldest first; those that were set aside or are being written are left out."""
    found = {step: path for path in checkpoints.glob(f"{CHECKPOINT_PREFIX}*") if (step := step_of(path)) is not None}
    return dict(sorted(found.items()))


def can_be_resumed(checkpoint: Path) -> bool:
    """Whether a checkpoint was completed and not pruned since. Its files are not looked at."""
    return (checkpoint / STATE).exists()


def is_pruned(checkpoint: Path) -> bool:
    """Whether the actor's or the critic's part was deleted, to save room."""
    return (checkpoint / PRUNED_STATE).exists()


def latest_step(checkpoints: Path) -> int | None:
    """The step of the checkpoint that was completed last, as the pointer says."""
    try:
        return int((checkpoints / LATEST).read_text())
    except (OSError, ValueError):
        return None
