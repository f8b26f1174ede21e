"""Which kind of device a run computes on."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from paceline.config import PPOConfig


def detect_device() -> str:
    """What workers compute on: cuda, npu or cpu. In a Ray cluster its nodes tell, else this machine.

    The node that a command is typed on may have no accelerator, while those that run workers do.
    """
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return device_of(ray.cluster_resources())
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None and accelerator.type in ("cuda", "npu") else "cpu"


def device_of(resources: Mapping[str, float]) -> str:
    """The device that a cluster with these resources has.

    >>> device_of({"CPU": 64.0, "GPU": 8.0})
    'cuda'
    """
    return next((device for name, device in (("GPU", "cuda"), ("NPU", "npu")) if resources.get(name)), "cpu")


def joins_cluster(cfg: PPOConfig) -> bool:
    """Whether the run will join a cluster, so that only then its devices are known."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return False
    return cfg.ray_kwargs.ray_init.get("address", os.environ.get("RAY_ADDRESS", "local")) != "local"
