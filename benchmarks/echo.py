"""The light worker of `benchmarks.controller`: gives back what it gets; its process has no torch before a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.single_controller.base import Dispatch, Worker, register

if TYPE_CHECKING:
    from paceline.protocol import DataProto


class Echo(Worker):
    leaves_inputs_alone = True  # as paceline's own workers

    @register(Dispatch.ONE_TO_ALL)
    def ping(self, number: int) -> int:
        return number

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def send_back(self, data: DataProto) -> DataProto:
        return data
