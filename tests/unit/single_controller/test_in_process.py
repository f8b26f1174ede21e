from __future__ import annotations

from paceline.single_controller.base import Dispatch, Worker, register
from paceline.single_controller.in_process import InProcessWorkerGroup
from paceline.single_controller.ray import RayClassWithInitArgs, RayResourcePool


class Looker(Worker):
    @register(Dispatch.ONE_TO_ALL)
    def look(self) -> dict[str, str]:
        return InProcessWorkerGroup.running_calls()


def test_it_is_known_what_runs() -> None:
    pool = RayResourcePool([1], use_gpu=False, name_prefix="pool")
    group = InProcessWorkerGroup(pool, RayClassWithInitArgs(Looker), "looker")
    assert group.look() == [{"looker": "look"}]
    assert InProcessWorkerGroup.running_calls() == {}
