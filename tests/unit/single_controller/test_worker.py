"""Registered methods, and a worker's place in its group."""

from __future__ import annotations

import pytest

from paceline.single_controller.base import Dispatch, Execute, Worker, register
from paceline.single_controller.base.worker import registered_methods
from tests.unit.single_controller.test_dispatch import Adder, LocalGroup


class Plain(Worker):
    @register()
    def where(self, greeting: str = "hi") -> tuple[str, int]:
        return greeting, self.rank


def test_an_override_keeps_the_registration_of_its_base():
    class Shouter(Adder):
        def where(self, greeting: str) -> str:
            return greeting.upper()

    assert registered_methods(Shouter)["where"].dispatch_mode is Dispatch.ONE_TO_ALL
    assert LocalGroup(Shouter, 2).where("hi") == ["HI", "HI"]


def test_register_refuses_what_it_cannot_honour():
    with pytest.raises(TypeError, match="takes a dispatch mode"):

        @register  # type: ignore[arg-type]
        def without_brackets(self) -> None: ...


def test_register_without_arguments_reaches_every_rank():
    registration = registered_methods(Plain)["where"]
    assert (registration.dispatch_mode, registration.execute_mode, registration.blocking) == (
        Dispatch.ALL_TO_ALL,
        Execute.ALL,
        True,
    )
    group = LocalGroup(Plain, 2)
    assert group.where() == [("hi", 0), ("hi", 1)]
    assert group.where("ho") == [("ho", 0), ("ho", 1)]
    assert group.where(["a", "b"]) == [("a", 0), ("b", 1)]
    with pytest.raises(ValueError, match=r"local has 2 ranks, got 3 items.*use Dispatch.ONE_TO_ALL"):
        group.where(["a", "b", "c"])


def test_a_worker_outside_of_any_group_is_alone():
    worker = Adder()
    assert (worker.rank, worker.world_size, worker.local_rank) == (0, 1, 0)
