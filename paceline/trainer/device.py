"""Which kind of device a run computes on."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Literal

from paceline.config import AnyRunConfig

Device = Literal["cuda", "npu", "cpu"]


def detect_device() -> Device:
    """What workers compute on: cuda, npu or cpu. In a Ray cluster its nodes decide, else this machine.

    The node that a command is typed on may have no accelerator, while those that run workers do.
    """
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return device_of(ray.cluster_resources())
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if accelerator is None else accelerator.type
    return "cuda" if kind == "cuda" else "npu" if kind == "npu" else "cpu"


def device_of(resources: Mapping[str, float]) -> Device:
    """The device that a cluster with these resources has.

    >>> device_of({"CPU": 64.0, "GPU": 8.0})
    'cuda'
    """
    return "cuda" if resources.get("GPU") else "npu" if resources.get("NPU") else "cpu"


def joins_cluster(cfg: AnyRunConfig) -> bool:
    """Whether the run will join a cluster, so that only then its devices are known."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return False
    return cfg.ray_kwargs.ray_init.get("address", os.environ.get("RAY_ADDRESS", "local")) != "local"
