"""What the tests of the page share."""

from __future__ import annotations

import psutil
import pytest

from paceline.report.page import processes


@pytest.fixture(autouse=True)
def named_as_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that run side by side give their process a name of its own; those of runs are named after Python or Ray."""
    monkeypatch.setattr(processes, "OUR_NAMES", (psutil.Process().name(),))
