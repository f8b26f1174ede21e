"""Several roles in one process."""

from __future__ import annotations

from paceline.single_controller.ray.group import ColocatedClasses, RayClassWithInitArgs


def create_colocated_worker_cls(class_dict: dict[str, RayClassWithInitArgs]) -> RayClassWithInitArgs:
    """One class that holds a worker of every role of `class_dict`, for pools that several roles share.

    The workers live in one process per device and run one call at a time; they are constructed in the order of
    `class_dict`. `RayWorkerGroup(pool, colocated).spawn(roles)` gives a group for each role.
    """
    if not class_dict:
        raise ValueError("create_colocated_worker_cls got no classes; give it at least one role.")
    return ColocatedClasses(class_dict)
