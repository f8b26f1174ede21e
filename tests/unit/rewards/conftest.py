from __future__ import annotations

import pytest

from paceline.errors import SandboxUnavailableError
from paceline.rewards.sandbox import LocalSandbox


@pytest.fixture(scope="session")
def isolation() -> None:
    """Skips a test on a machine where programs can't be isolated."""
    try:
        LocalSandbox().check()
    except SandboxUnavailableError as error:
        pytest.skip(f"no isolation to be had here: {error}")
