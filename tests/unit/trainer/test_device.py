"""The device of a run is what torch finds."""

from __future__ import annotations

import pytest

from paceline.trainer.device import detect_device


@pytest.mark.parametrize(("accelerator", "device"), [("cuda", "cuda"), ("npu", "npu"), ("mps", "cpu"), (None, "cpu")])
def test_the_device_is_what_torch_finds(accelerator: str | None, device: str, monkeypatch: pytest.MonkeyPatch):
    import torch

    class Found:
        type = accelerator

    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: Found if accelerator else None
    )
    assert detect_device() == device
