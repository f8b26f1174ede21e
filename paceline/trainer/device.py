"""Which kind of device a run computes on."""

from __future__ import annotations


def detect_device() -> str:
    """What this machine computes on: cuda, npu or cpu."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None and accelerator.type in ("cuda", "npu") else "cpu"
