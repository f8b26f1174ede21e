"""What a worker, a dispatch mode and a worker group are; imports no Ray."""

from paceline.single_controller.base.calls import CallRecord, call_tag
from paceline.single_controller.base.dispatch import (
    Dispatch,
    DispatchMode,
    RankCall,
    make_mesh_dispatch,
    register_dispatch_mode,
)
from paceline.single_controller.base.worker import Execute, MeshRank, Worker, WorkerContext, register
from paceline.single_controller.base.worker_group import WorkerGroup

__all__ = [
    "CallRecord",
    "Dispatch",
    "DispatchMode",
    "Execute",
    "MeshRank",
    "RankCall",
    "Worker",
    "WorkerContext",
    "WorkerGroup",
    "call_tag",
    "make_mesh_dispatch",
    "register",
    "register_dispatch_mode",
]
