"""Private names of Ray: its key-value store, what it knows of actors and nodes, its processes, its start and end."""

from __future__ import annotations

import atexit
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray._common.utils import get_system_memory
from ray._private import ray_constants, services
from ray._private.utils import get_used_memory
from ray.actor import ActorClass, ActorHandle
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

TRIED_WITH = "2.60.0"

NAMESPACE = "paceline"
"""Of our keys in Ray's key-value store."""


def put_text(key: str, text: str) -> None:
    """Keep a text where every process of this Ray can read it."""
    _internal_kv_put(key, text, namespace=NAMESPACE)


def get_text(key: str) -> str | None:
    """What `put_text` was given last; None before."""
    text = _internal_kv_get(key, namespace=NAMESPACE)
    return text.decode() if text else None


def delete_texts(prefix: str) -> None:
    """Forget the texts whose keys begin so."""
    _internal_kv_del(prefix, del_by_prefix=True, namespace=NAMESPACE)


def node_memory() -> tuple[int, int]:
    """Free and total bytes of this node; a container's limit counts as the total."""
    total = get_system_memory()
    return total - get_used_memory(), total


def class_of_actor(actor_class: ActorClass) -> type:
    """The plain class that `ray.remote` was given."""
    found: type = vars(actor_class)["__ray_metadata__"].modified_class.__ray_actor_class__
    return found


def id_of_actor(actor: ActorHandle) -> str:
    """By which Ray's records name an actor, as `ray.get_runtime_context().get_actor_id()` gives it inside."""
    found: str = actor._actor_id.hex()
    return found


def actor_entry(actor_id: str) -> dict[str, Any]:
    """What Ray's records hold of an actor: `Pid`, `Address`, `State`, `DeathCause`; empty for an unknown one."""
    entry: dict[str, Any] = ray._private.state.actors(actor_id)
    return entry


def death_message(entry: dict[str, Any]) -> str:
    """Why an actor whose `State` is DEAD has ended, as Ray's records say; they may say nothing."""
    message: str = entry["DeathCause"].actor_died_error_context.error_message
    return message


def free_resources() -> dict[str, dict[str, float]]:
    """What is free on each node, by its id: amounts by name, such as CPU."""
    by_node: dict[str, dict[str, float]] = ray._private.state.available_resources_per_node()
    return by_node


def clusters_of_this_machine() -> set[str]:
    """The addresses of all Rays that have a process on this machine."""
    found: set[str] = services.find_gcs_addresses()
    return found


def logs_folder() -> str:
    """Where the processes of this node write their output."""
    folder: str = _node().get_logs_dir_path()
    return folder


def session_folder() -> str | None:
    """Where this Ray keeps its files; None if none runs."""
    return None if _node() is None else _node().get_session_dir_path()


def started_processes() -> dict[str, list[subprocess.Popen[bytes]]]:
    """Ray's own processes that this process started, by name, such as gcs_server."""
    by_name = {} if _node() is None else _node().all_processes
    return {name: [info.process for info in infos] for name, infos in by_name.items()}


def _node() -> Any:
    return ray._private.worker._global_node


def complete_address(address: str) -> str:
    """Host and port of the cluster at an address of `ray.init`, such as auto; ValueError if it means no cluster."""
    found = services.canonicalize_bootstrap_address(address)
    if found is None:
        raise ValueError(f"the address {address!r} names no cluster.")
    return found


@contextmanager
def single_node() -> Iterator[None]:
    """A Ray that starts inside is on this machine's loopback address and takes no other nodes.

    That is Ray's own switch. It is also read from the environment, but only once, when Ray is imported.
    """
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def cancel_shutdown_at_exit() -> None:
    """`ray.shutdown` is not called again when this process ends."""
    atexit.unregister(ray._private.worker.shutdown)
