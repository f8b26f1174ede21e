"""What is said of a death, from what Ray, the process and its heartbeat left."""

from __future__ import annotations

import time

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError

from paceline.single_controller.ray.death import MEMORY_ADVICE, explain_death
from paceline.single_controller.ray.heartbeat import Beat

KILLED = "Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes"
RAYS_OWN = "1 worker(s) were killed\nOOM kill reason: Memory usage 9B exceeded threshold of 8B (95%)\nObject store ..."


def beat(free: float) -> Beat:
    return Beat(time.time() - 2, int(3.2e9), int(free), int(24e9))


def test_a_kill_with_memory_to_spare_is_a_kill() -> None:
    message, _ = explain_death(RayActorError(error_msg=KILLED), None, beat(12e9))
    assert message == (
        "its process was killed by SIGKILL, or ended itself by os._exit; last seen 2 s before: 3.2 GB resident, node "
        "12.0 of 24.0 GB free"
    )


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RayActorError(error_msg=KILLED), "was killed by SIGKILL"),
        (
            OutOfMemoryError(RAYS_OWN),
            "was killed by Ray's memory monitor: Memory usage 9B exceeded threshold of 8B (95%)",
        ),
    ],
)
def test_a_kill_without_memory_says_what_to_set(error: Exception, cause: str) -> None:
    message, _ = explain_death(error, None, beat(1.1e9))
    assert cause in message
    assert "node 1.1 of 24.0 GB free" in message
    assert message.endswith(MEMORY_ADVICE)


@pytest.mark.parametrize(
    ("detail", "cause"),
    [
        ("Worker exits unexpectedly. Worker exits with an exit code 4.", "ended with exit code 4"),
        (
            "Worker exits unexpectedly. Worker exits with an exit code 1. The process receives a SIGTERM.",
            "ended with exit code 1 after SIGTERM",
        ),
    ],
)
def test_an_exit_code_is_named(detail: str, cause: str) -> None:
    message, _ = explain_death(
        RayActorError(error_msg=f"Worker exit type: SYSTEM_ERROR Exit detail: {detail}"), None, None
    )
    assert message == f"its process {cause}"


def test_what_is_not_understood_is_told_in_the_words_of_ray() -> None:
    message, _ = explain_death(RayActorError(error_msg="The actor died because its node has died."), None, None)
    assert message == "its process is gone: The actor died because its node has died."
