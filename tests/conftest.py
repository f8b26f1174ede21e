"""One compute thread per test process: tiny tensors gain nothing from more, and processes fight over the cores."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session", autouse=True)
def cache_outside_the_home_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For this process and all that it starts, Ray workers included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
