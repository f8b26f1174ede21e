from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.rewards.score.math import shared_grader


@pytest.fixture(scope="session", autouse=True)
def _end_processes() -> Iterator[None]:
    """The grader is shared by all files here: its processes load sympy."""
    yield
    shared_grader().close()
