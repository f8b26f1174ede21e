"""The store of answers' columns, without Ray: what is said of columns that are lost, and of a queue without CPUs."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import ray
import torch

from paceline.errors import ResourceError
from paceline.single_controller.ray import queue_store
from paceline.single_controller.ray.column_store import Maker
from paceline.single_controller.ray.queue_store import QueueRows, QueueSession, QueueStore

MAKER = Maker("critic", 3, "compute_values")


def test_what_is_lost_is_an_error_of_the_call_that_made_it():
    error = MAKER.lost("OwnerDiedError: gone")
    assert (error.role, error.rank, error.method) == ("critic", 3, "compute_values")
    assert "can't be fetched any more: OwnerDiedError: gone" in str(error)


def test_rows_of_a_queue_travel_as_their_keys():
    rows = pickle.loads(pickle.dumps(QueueRows("run/3", "abc", 4, 2, torch.bfloat16, (5,), MAKER)))
    assert rows.keys(np.array([1, 0])) == ["abc/5", "abc/4"]
    assert (len(rows), rows.partition, rows.dtype, rows.row_shape, rows.maker) == (
        2,
        "run/3",
        torch.bfloat16,
        (5,),
        MAKER,
    )


def test_a_queue_is_not_started_without_enough_cpus(monkeypatch):
    monkeypatch.setattr(queue_store, "_exists", lambda: False)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 1.0})
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})
    with pytest.raises(ResourceError, match=r"wants 3 CPUs.*1 of the 2 that Ray has are free.*num_cpus higher"):
        QueueSession(QueueStore("run"), 2)
