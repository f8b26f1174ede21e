"""The run: devices, placement, steps, logging, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from paceline.config.field_rules import (
    Count,
    CountOrAll,
    LocalPath,
    NotNegative,
    OnlyWith,
    Positive,
    Range,
    WholeNumber,
)


@dataclass(frozen=True)
class PlacementConfig:
    """Which roles share devices."""

    name: Literal["colocated", "split"] = "colocated"
    """colocated: every role on global_pool. split: actor, rollout and reference on actor_rollout_ref_pool,
    critic and reward model on critic_pool, side by side."""
    critic_devices: Count | None = None
    """The share of critic_pool in split placement, >= 1: devices if nnodes is 1, else nodes. The rest is the
    actor's. null: half."""
    rollout_devices: Count | None = None
    """Devices (nodes, if nnodes is more than 1) of rollout_pool, which does nothing but generate, >= 1; the other pools
    share the rest. null: there is no such pool."""
    rollout_on: list[str] | None = None
    """Pools that generate, such as [actor_rollout_ref_pool,critic_pool]: the actor's and at most one more. They share
    the responses by their devices. null: rollout_pool if there is one, else the actor's."""


@dataclass(frozen=True)
class TrainerConfig:
    """The run."""

    nnodes: Annotated[int, Range(1, 10_000)] = 1
    """Nodes, in [1, 10000]."""
    n_gpus_per_node: Annotated[int, Range(1, 1_024)] = 1
    """Devices per node, in [1, 1024]: GPUs, or worker processes on a CPU."""
    device: Literal["cuda", "npu", "cpu"] | None = None
    """What a device is. null: what this machine has."""
    cpus_per_device: NotNegative = 1
    """Ray CPUs that one device takes, >= 0; more than 0 on a CPU, where nothing else counts devices."""
    threads_per_worker: Count | None = None
    """Compute threads of a worker, >= 1. null: the node's cores divided by its workers."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """Which roles share devices."""
    overlap: Literal["full", "updates", "none"] = "full"
    """What may run side by side on different pools. full: all that does not need each other, the critic's update behind
    the next rollout too; updates: only the actor's and the critic's; none. The results are the same."""
    balance_batch: bool = True
    """Share responses out so that all devices of a role have about as many tokens."""
    total_epochs: Count = 30
    """Passes over the training data, >= 1, unless total_training_steps says less or more."""
    total_training_steps: Count | None = None
    """Steps in all, >= 1. null: as many as total_epochs give."""
    critic_warmup: WholeNumber = 0
    """The step from which on the actor trains, >= 0; in those before it the critic learns alone. 0 and 1: the first."""
    seed: WholeNumber = 1
    """One seed (>= 0), one result."""
    val_before_train: bool = True
    """Validate before the first step."""
    val_only: bool = False
    """Validate once and stop."""
    test_freq: CountOrAll | None = None
    """Validate every so many steps, >= 1, and at the end; or -1: never (but see val_before_train). null: at the end."""
    save_freq: CountOrAll | None = None
    """Save a checkpoint every so many steps, >= 1, and at the end; or -1: never. null: at the end."""
    max_actor_ckpt_to_keep: Count | None = None
    """Newest checkpoints that keep the actor, >= 1; older ones lose it, and can't be resumed from. null: all."""
    max_critic_ckpt_to_keep: Annotated[Count | None, OnlyWith.CRITIC] = None
    """The same for the critic, >= 1; a checkpoint with neither is deleted."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto: go on from the latest checkpoint in the run's folder; disable: start anew;
    resume_path: go on from resume_from_path."""
    resume_from_path: LocalPath | None = None
    """Folder of one checkpoint (.../global_step_N), for resume_mode=resume_path."""
    default_local_dir: LocalPath | None = None
    """The run's folder. null: runs/<project_name>/<experiment_name>."""
    project_name: str = "paceline"
    """Groups runs in trackers."""
    experiment_name: str = "ppo"
    """Names the run in trackers."""
    logger: list[str] = field(default_factory=lambda: ["console", "tensorboard"])
    """Where metrics go besides metrics.jsonl, which is always written: console, tensorboard, wandb; one name or a
    list."""
    live_view: bool | None = None
    """Show step, phases, scores and the time left in the terminal that started the run, below its lines. null: if it is
    a terminal."""
    log_train_samples: WholeNumber = 1
    """Training responses shown with their scores in the log of every step, >= 0."""
    log_val_generations: WholeNumber = 0
    """Validation responses shown in the log, in tensorboard and in wandb at every validation, >= 0."""
    keep_samples: WholeNumber = 4
    """Responses of every step, and of every validation, kept with prompt and score in samples/<step>.jsonl of the run's
    folder, >= 0. Long texts are cut."""
    rollout_data_dir: LocalPath | None = None
    """Folder for all training responses with their scores, a file <step>.jsonl for every step. null: none."""
    validation_data_dir: LocalPath | None = None
    """The same for the responses of every validation."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """NaN or infinity in log-probs, values, scores or advantages: stop ends the run; skip leaves the step out, so that
    it updates nothing. In a loss or gradient: skip leaves that optimizer step of that role out. Metrics count both."""
    max_restarts: WholeNumber = 0
    """How often a run starts again by itself from its last checkpoint when a process of it dies, >= 0. Needs
    save_freq."""
    save_on_interrupt: bool = False
    """On Ctrl-C or SIGTERM, finish the step and save a checkpoint before the run ends; again: stop at once."""
    heartbeat_timeout_seconds: Positive = 120.0
    """A worker that was silent for so long counts as dead, > 0."""
    dry_run: bool = False
    """Print the derived batch sizes, the placement and an estimate of the memory, and stop."""


@dataclass(frozen=True)
class RayConfig:
    """Ray itself."""

    ray_init: dict[str, Any] = field(default_factory=dict)
    """Passed straight to ray.init, such as num_cpus, address or runtime_env."""
    timeline_json_file: LocalPath | None = None
    """Write Ray's own timeline there at the end."""


@dataclass(frozen=True)
class TransferQueueConfig:
    """The TransferQueue data plane."""

    enable: bool = False
    """Put TRANSFER_QUEUE_ENABLE=1 into the workers' environment."""
