"""A worker process of `benchmarks.scale`: sleeps as long as it is told, and answers with references. Imports no torch.

What it answers are recipes: they become the real objects (answers, records) where they are unpickled, in the driver.
"""

from __future__ import annotations

import importlib
import os
import pickle
import time
from typing import Any

import numpy as np
import ray

ROWS_STARTED_AT = 7919


class Recipe:
    """Pickles as a call of `module.name(*args)`, and so comes out as its result."""

    def __init__(self, module: str, name: str, *args: Any) -> None:
        self.parts = (module, name, args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _cook, self.parts


def _cook(module: str, name: str, args: tuple[Any, ...]) -> Any:
    return getattr(importlib.import_module(module), name)(*args)


class LightShell:
    """What the driver talks to in place of a WorkerShell: the same calls, in order, one at a time."""

    def __init__(self, process_roles: str, rank: int, heartbeat_key: str) -> None:
        del heartbeat_key  # the driver of the benchmark waits for none
        self._process_roles = process_roles
        self._rank = rank
        self._pool = ""

    def prepare(self, modules: object, secrets: object) -> Recipe:
        del modules, secrets
        place = (ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid(), 0)
        return Recipe("paceline.single_controller.ray.shell", "Location", *place)

    def setup(self, pool: str) -> Recipe:
        self._pool = pool
        return self._record(self._process_roles, "__init__", time.time(), {})

    @ray.method(num_returns=2)
    def execute(self, packed: bytes, told: bytes, refs: object) -> tuple[object, Recipe]:
        """Sleep, then answer for so many rows; the call itself and `refs`, its arguments, are read by nobody."""
        del packed, refs
        role, method, tag, rows, seconds, widths = pickle.loads(told)
        start = time.time()
        time.sleep(seconds)
        answer = Recipe("benchmarks.scale", "answer", method, self._parts(role, method, rows, widths))
        return answer, self._record(role, method, start, tag)

    def _parts(self, role: str, method: str, rows: int, widths: tuple[int, int]) -> dict[str, Any]:
        """Lengths of the responses, and references to what stands for the pieces of each column that stays."""
        prompt, response = widths
        stays = {
            "generate_sequences": {"prompts": 8 * prompt, "responses": 8 * response, "rollout_log_probs": 4 * response}
            | {"input_ids": 8 * (prompt + response)},
            "compute_ref_log_prob": {"ref_log_prob": 4 * response},
        }.get(method, {})
        pieces = {name: -(-rows // max(1, 100_000 // row)) for name, row in stays.items()}
        lengths = np.random.default_rng(ROWS_STARTED_AT + self._rank).integers(response // 10, response + 1, rows)
        return {
            "rows": rows,
            "lengths": lengths,
            "widths": widths,
            "maker": (role, self._rank, method),
            "refs": {name: [ray.put(b"rows") for _ in range(count)] for name, count in pieces.items()},
        }

    def _record(self, role: str, method: str, start: float, tag: dict[str, object]) -> Recipe:
        about = (self._pool, self._process_roles, role, self._rank, os.getpid(), ray.util.get_node_ip_address())
        return Recipe("paceline.single_controller.base.calls", "CallRecord", *about, method, start, time.time(), tag)
