"""Worker groups and resource pools on Ray."""

from paceline.single_controller.ray.group import RayWorkerGroup
from paceline.single_controller.ray.pool import ProcessPool, RayResourcePool
from paceline.single_controller.ray.shell import RayClassWithInitArgs, create_colocated_worker_cls
from paceline.single_controller.ray.watch import drain_call_records, joint_calls, limited_wait

__all__ = [
    "ProcessPool",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "create_colocated_worker_cls",
    "drain_call_records",
    "joint_calls",
    "limited_wait",
]
