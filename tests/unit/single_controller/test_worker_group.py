"""Methods of a group: those of its workers, and those by name."""

from __future__ import annotations

import pytest

from paceline.single_controller.base import Worker, register
from tests.unit.single_controller.test_dispatch import LocalGroup
from tests.unit.single_controller.test_worker import Plain


def test_any_method_is_called_by_name():
    group = LocalGroup(Plain, 2)
    assert group.execute_all_sync("where", "ho") == [("ho", 0), ("ho", 1)]
    assert group.execute_all_async("where", greeting=["a", "b"]).get() == [("a", 0), ("b", 1)]
    assert group.execute_rank_zero_sync("where", ["a", "b", "c"]) == (["a", "b", "c"], 0)
    assert group.execute_rank_zero_async("where").get() == ("hi", 0)


def test_a_method_that_hides_one_of_the_group_is_refused():
    class Bad(Worker):
        @register()
        def submit(self) -> None: ...

    with pytest.raises(ValueError, match=r"Bad.submit hides LocalGroup.submit"):
        LocalGroup(Bad, 1)
