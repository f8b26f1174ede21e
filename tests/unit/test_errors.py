from __future__ import annotations

import pickle

import pytest

from paceline.errors import ConfigError, DataError, PacelineError, RemoteCause, StorageError, WorkerError
from paceline.trainer.launch import _may_pass


class FullDiskError(StorageError):
    """A class that the reader of the error need not know."""


def failure(error: Exception) -> WorkerError:
    found = WorkerError("actor", 1, "save", f"{type(error).__name__}: {error}", "Traceback ...", RemoteCause.of(error))
    return pickle.loads(pickle.dumps(found))


def test_the_type_of_a_remote_exception_and_its_bases_are_carried():
    error = failure(FullDiskError("no room"))
    assert error.caused_by(FullDiskError)
    assert error.caused_by(StorageError)
    assert error.caused_by(PacelineError)
    assert not error.caused_by(DataError)
    assert error.remote_cause.message == "no room"
    assert failure(ConfigError(["a", "b"])).caused_by(ValueError)


def test_a_text_that_looks_like_a_type_is_none():
    error = failure(RuntimeError("StorageError: said someone else"))
    assert not error.caused_by(StorageError)
    assert not WorkerError("actor", 0, "save", "StorageError: the process died").caused_by(StorageError)


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        (failure(RuntimeError("CUDA error")), True),
        (failure(FullDiskError("no room")), False),
        (failure(DataError("bad row")), False),
        (WorkerError("actor", 0, "save", "its process was killed"), True),
        (WorkerError("actor", 0, "save", "DataError: words, not a type"), True),
    ],
)
def test_what_paceline_raises_on_purpose_is_not_tried_again(error, may_pass):
    assert _may_pass(error) is may_pass
