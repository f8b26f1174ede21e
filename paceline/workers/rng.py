"""A role's own random state, so that roles in one process do not depend on each other's draws."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch


def _capture() -> dict[str, Any]:
    name, keys, position, has_gauss, cached = cast(tuple[str, np.ndarray, int, int, float], np.random.get_state())
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
    }
    for name, module in _accelerators():
        state[name] = module.get_rng_state()
    return state


def _accelerators() -> Iterator[tuple[str, Any]]:
    """Kind and torch's module of this process's accelerator, if it has one: cuda, npu or any other."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        yield accelerator.type, torch.get_device_module(accelerator)


def _restore(state: dict[str, Any]) -> None:
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, numpy_keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(numpy_keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    for kind, module in _accelerators():
        if kind in state:
            module.set_rng_state(state[kind])


class RoleRng:
    """Python's, numpy's and torch's random state of one role on one rank, seeded from (seed, role, rank).

    Torch has one on the CPU and one on the accelerator.
    """

    def __init__(self, seed: int, role: str, rank: int) -> None:
        words = np.random.SeedSequence([seed, zlib.crc32(role.encode()), rank]).generate_state(3)
        outside = _capture()
        random.seed(int(words[0]))
        np.random.seed(int(words[1]))
        torch.manual_seed(int(words[2]))
        self._state = _capture()
        self._is_swapped_in = False
        _restore(outside)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Run a block on this role's state; the state outside is as it was afterwards."""
        outside = _capture()
        _restore(self._state)
        self._is_swapped_in = True
        try:
            yield
        finally:
            self._is_swapped_in = False
            self._state = _capture()
            _restore(outside)

    def save(self, path: Path) -> None:
        torch.save(_capture() if self._is_swapped_in else self._state, path)

    def load(self, path: Path) -> None:
        self._state = torch.load(path, weights_only=True)
        if self._is_swapped_in:
            _restore(self._state)
