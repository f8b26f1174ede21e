"""What a run will do, said before it starts: batch sizes, placement, memory, and settings that may surprise."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.config import PPOConfig
from paceline.config.checks import unused_settings
from paceline.trainer.device import detect_device
from paceline.trainer.ppo.memory import memory_table, memory_warning, plan_memory
from paceline.trainer.ppo.model_size import available_memory
from paceline.trainer.ppo.placement import batch_table, idle_devices, placement_picture


def plan_text(cfg: PPOConfig) -> str:
    """What the batch sizes come to, and which roles go where."""
    return f"{batch_table(cfg)}\n\n{placement_picture(cfg)}\n\n"


def dry_run_text(cfg: PPOConfig) -> str:
    """The plan, and what it needs of memory."""
    memory = memory_table(plan_memory(cfg), available_memory(cfg.trainer.device or detect_device()))
    return f"{plan_text(cfg)}{memory}\n"


def plan_warnings(cfg: PPOConfig) -> Iterator[str]:
    """What is allowed, but hardly meant: idle devices, too little memory, settings without effect."""
    if idle := idle_devices(cfg):
        yield (
            f"algorithm.adv_estimator={cfg.algorithm.adv_estimator} has no critic, so the {idle} devices of "
            "critic_pool are not used; set trainer.placement.name=colocated to use them."
        )
    if shortage := memory_warning(plan_memory(cfg), available_memory(cfg.trainer.device or detect_device())):
        yield shortage
    yield from unused_settings(cfg)
