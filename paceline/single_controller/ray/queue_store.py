"""TransferQueue as the place where large columns of answers stay: in storage processes of its own, row by row.

Its controller has one name in a Ray, so runs that share a Ray share it: each has partitions of its own, one for each
step, and clears these alone. Who fetches rows gets those rows and no others.
"""

from __future__ import annotations

import importlib
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self, cast

import numpy as np
import ray
import torch
from omegaconf import OmegaConf
from ray.exceptions import RayError
from torch import Tensor

from paceline.errors import ResourceError
from paceline.protocol.held import StoredRows, rows_of, tensordict_of
from paceline.single_controller.base.calls import call_tag
from paceline.single_controller.ray.column_store import SMALLEST_BYTES, ColumnStore, Maker

logger = logging.getLogger(__name__)

PACKAGE = "transfer_queue"
TRIED_WITH = "0.1.11"
CONTROLLER = "TransferQueueController"
"""The name of its actor, in the namespace of its package's name."""
FIELD = "rows"


def _queue() -> Any:
    return importlib.import_module(PACKAGE)


class QueueRows(StoredRows):
    """Rows of a column in the queue: numbers `first` to `first + rows` under the column's name."""

    def __init__(
        self,
        partition: str,
        column: str,
        first: int,
        rows: int,
        dtype: torch.dtype,
        row_shape: tuple[int, ...],
        maker: Maker,
    ) -> None:
        self.partition = partition
        self.column = column
        self.first = first
        self.rows = rows
        self.dtype = dtype
        self.row_shape = row_shape
        self.maker = maker

    def __len__(self) -> int:
        return self.rows

    def __reduce__(self) -> tuple[object, ...]:
        about = (self.partition, self.column, self.first, self.rows, self.dtype, self.row_shape, self.maker)
        return QueueRows, about

    def keys(self, rows: np.ndarray) -> list[str]:
        return [_key(self.column, self.first + row) for row in rows.tolist()]

    @classmethod
    def fetch(cls, wanted: Sequence[tuple[Self, np.ndarray]]) -> list[Tensor]:
        alike: dict[object, list[int]] = {}
        for place, (one, _) in enumerate(wanted):
            alike.setdefault((one.partition, one.dtype, one.row_shape), []).append(place)
        found: dict[int, Tensor] = {}
        for places in alike.values():
            found |= zip(places, _fetch_alike([wanted[place] for place in places]), strict=True)
        return [found[place] for place in range(len(wanted))]


def _key(column: str, row: int) -> str:
    return f"{column}/{row}"


def _fetch_alike(wanted: Sequence[tuple[QueueRows, np.ndarray]]) -> list[Tensor]:
    """Rows of one partition, dtype and shape, in one request that names each once."""
    first, _ = wanted[0]
    keys = [one.keys(rows) for one, rows in wanted]
    places = {key: place for place, key in enumerate(dict.fromkeys(chain(*keys)))}
    try:
        rows = _queue().kv_batch_get(keys=list(places), partition_id=first.partition, select_fields=[FIELD])[FIELD]
    except Exception as error:  # it is told by many kinds of them
        raise first.maker.lost(f"TransferQueue has no such rows: {type(error).__name__}: {error}") from error
    # Rows of equal length may come as a nested tensor.
    flat = torch.cat([row.reshape(1, -1) for row in rows.unbind()])
    whole = flat.view(first.dtype).view(len(places), *first.row_shape)
    return [cast(Tensor, rows_of(whole, np.array([places[key] for key in own]))) for own in keys]


@dataclass(frozen=True)
class QueueStore(ColumnStore):
    """The partitions of one run in the queue. Works in every process of the Ray that has the queue."""

    run: str
    max_staleness: int = 0
    min_bytes: int = SMALLEST_BYTES

    def keep(self, tensors: list[Tensor], maker: Maker) -> Sequence[StoredRows]:
        partition = self.partition(cast(int, call_tag.get({}).get("step", 0)))
        column = uuid.uuid4().hex
        whole = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        dtype, row_shape = whole.dtype, tuple(whole.shape[1:])
        # Bytes: the queue then has nothing to know of dtypes, and single numbers have a row shape as well.
        raw = whole.contiguous().view(len(whole), -1).view(torch.uint8)
        keys = [_key(column, row) for row in range(len(whole))]
        _queue().kv_batch_put(keys=keys, partition_id=partition, fields=tensordict_of({FIELD: raw}, (len(whole),)))
        pieces, first = [], 0
        for tensor in tensors:
            pieces.append(QueueRows(partition, column, first, len(tensor), dtype, row_shape, maker))
            first += len(tensor)
        return pieces

    def partition(self, step: int) -> str:
        return f"{self.run}/{step}"

    def step_closed(self, step: int) -> None:
        """What was stored so many steps before is of no batch any more: responses wait for `max_staleness` at most."""
        self._clear([self.partition(step - 2 - self.max_staleness)])

    def _clear(self, partitions: Sequence[str]) -> None:
        queue = _queue()
        for partition in partitions:
            if keys := list(queue.kv_list(partition).get(partition, {})):
                queue.kv_clear(keys, partition)

    def close(self) -> None:
        """Clear the run's own partitions."""
        mine = [name for name in _queue().kv_list() if name.startswith(f"{self.run}/")]
        self._clear(mine)


class QueueSession:
    """The queue for a run: started if this Ray has none, and then ended; one that is there is joined, and stays."""

    def __init__(self, store: QueueStore, num_storage_units: int) -> None:
        self.store = store
        self._is_ours = not _exists()
        if self._is_ours:
            _require_cpus(1 + num_storage_units)
        units = {"SimpleStorage": {"num_data_storage_units": num_storage_units}}
        _queue().init(OmegaConf.create({"backend": units}))
        started = f"started with {num_storage_units} storage units" if self._is_ours else "joined, as it was there"
        logger.info("TransferQueue: %s; partitions %s/*", started, store.run)

    def close(self) -> None:
        """Clear what is this run's. The queue ends with the run that started it, unless others have rows in it."""
        try:
            self.store.close()
            others = [name for name, rows in _queue().kv_list().items() if rows]  # those that were cleared stay named
        except Exception as error:  # its processes may be what failed
            logger.warning("TransferQueue could not be cleared: %s", error)
            others = []
        if not self._is_ours:
            return
        if others:
            logger.warning("TransferQueue stays: other runs have rows in it (%s).", ", ".join(sorted(others)[:3]))
            return
        _queue().close()


def _exists() -> bool:
    try:
        ray.get_actor(CONTROLLER, namespace=PACKAGE)
    except (ValueError, RayError):
        return False
    return True


def _require_cpus(wanted: int) -> None:
    """Its start would wait for ever."""
    free, total = (counted.get("CPU", 0.0) for counted in (ray.available_resources(), ray.cluster_resources()))
    if free < wanted:
        raise ResourceError(
            f"transfer_queue.enable=True wants {wanted} CPUs, one for its controller and one for each storage unit; "
            f"{free:g} of the {total:g} that Ray has are free. Set ray_kwargs.ray_init.num_cpus higher, or "
            "transfer_queue.num_storage_units lower."
        )
