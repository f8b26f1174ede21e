"""The private names of Ray that we use: they are there, and take and give what we take them to.

What needs a running Ray is tried by `tests/ray/test_single_controller_failures.py`.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version

import psutil
import ray
from ray._private import ray_constants, state, worker
from ray._private.node import Node
from ray._private.services import ProcessInfo, canonicalize_bootstrap_address
from ray.actor import ActorHandle
from ray.core.generated.common_pb2 import ActorDeathCause
from ray.experimental import internal_kv

from paceline.private_apis import ray_private


def test_they_were_tried_with_this_version() -> None:
    assert version("ray") == ray_private.TRIED_WITH


def test_the_class_behind_an_actor_class_is_found() -> None:
    class Counter:
        def count(self) -> int:
            return 1

    assert ray_private.class_of_actor(ray.remote(Counter)) is Counter


def test_memory_is_counted_in_bytes() -> None:
    free, total = ray_private.node_memory()
    assert 0 < free < total <= psutil.virtual_memory().total


def test_clusters_are_known_by_their_addresses() -> None:
    assert all(":" in address for address in ray_private.clusters_of_this_machine())


def test_the_cause_of_a_death_has_a_message() -> None:
    cause = ActorDeathCause()
    assert ray_private.death_message({"State": "DEAD", "DeathCause": cause}) == ""
    cause.actor_died_error_context.error_message = "it ran away"
    assert ray_private.death_message({"State": "DEAD", "DeathCause": cause}) == "it ran away"


def test_what_needs_a_running_ray_has_the_names_and_arguments_that_we_use() -> None:
    for function, argument in {
        internal_kv._internal_kv_put: "namespace",
        internal_kv._internal_kv_get: "namespace",
        internal_kv._internal_kv_del: "del_by_prefix",
        state.actors: "actor_id",
        canonicalize_bootstrap_address: "addr",
    }.items():
        assert argument in inspect.signature(function).parameters
    assert callable(state.available_resources_per_node)
    assert callable(Node.get_logs_dir_path)
    assert callable(Node.get_session_dir_path)
    assert "process" in ProcessInfo._fields
    assert "self.all_processes" in inspect.getsource(Node.__init__)
    assert "return self._ray_actor_id" in inspect.getsource(ActorHandle._actor_id.fget)
    assert worker._global_node is None
    assert (ray_private.session_folder(), ray_private.started_processes()) == (None, {})


def test_a_ray_that_takes_no_other_nodes_is_a_switch() -> None:
    before = ray_constants.ENABLE_RAY_CLUSTER
    with ray_private.single_node():
        assert ray_constants.ENABLE_RAY_CLUSTER is False
    assert before == ray_constants.ENABLE_RAY_CLUSTER
