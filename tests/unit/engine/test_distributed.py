from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from paceline.engine.distributed import ensure_process_group


@pytest.mark.parametrize(("seconds", "timeout"), [(None, None), (3600, timedelta(hours=1))])
def test_a_collective_may_take_as_long_as_was_asked(
    monkeypatch: pytest.MonkeyPatch, seconds: float | None, timeout: timedelta | None
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **kwargs: asked.update(kwargs, backend=backend))
    ensure_process_group("cpu", seconds)
    assert asked == {"backend": "gloo", "timeout": timeout}
