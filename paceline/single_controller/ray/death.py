"""Why a process died: the cause, its memory, and the end of its stderr."""

from __future__ import annotations

import glob
import os
import re
import time

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from paceline.private_apis.ray_private import actor_entry, death_message, logs_folder
from paceline.single_controller.ray.heartbeat import Beat, Place

DEATHS = (RayActorError, OutOfMemoryError)
"""What Ray raises when a process of ours has died."""
LAST_LINES = 20
SETTLE_SECONDS = 10.0
"""How long to wait for Ray to find out why a process can't be reached."""
LOG_SECONDS = 10.0
"""How long to wait for the end of the stderr of a process on another node."""

MEMORY_ADVICE = (
    "Memory was short, so the kernel or Ray probably killed it: give each device less to do at a time, put fewer "
    "workers on a node, or give the node more memory. RAY_memory_usage_threshold, set where Ray is started, moves "
    "Ray's own limit."
)


def explain_death(error: RayError, place: Place | None, beat: Beat | None) -> tuple[str, str]:
    """(why the process ended and how much memory it had, the last lines of its stderr)."""
    stderr = _end_of_stderr(place) if place else ""
    sentences = [f"its process{f' ({place})' if place else ''} {_cause(error, stderr)}"]
    if beat is not None:
        sentences[0] += f"; {beat}"
    if isinstance(error, OutOfMemoryError) or (beat is not None and beat.is_memory_short):
        sentences.append(MEMORY_ADVICE)
    return ". ".join(sentences), f"last lines of its stderr:\n{stderr}" if stderr else ""


def place_of_actor(actor_id: str) -> Place | None:
    """Where an actor runs or ran; None if it never did."""
    entry = actor_entry(actor_id)
    if not entry.get("Pid"):
        return None
    return Place(entry["Address"]["NodeID"], entry["Address"]["IPAddress"], entry["Pid"])


def _cause(error: RayError, stderr: str) -> str:
    text = _death_report(error)
    if isinstance(error, OutOfMemoryError):
        reason = re.search(r"OOM kill reason: (.*)", text)
        return f"was killed by Ray's memory monitor: {reason[1] if reason else text.splitlines()[0]}"
    if found := re.search(r"\*\*\* (SIG\w+) received", stderr):
        return f"was ended by {found[1]}"
    if found := re.search(r"exit code (\d+)\.(.*SIGTERM)?", text):
        return f"ended with exit code {found[1]}{' after SIGTERM' if found[2] else ''}"
    if "connection error code 2. End of file" in text:  # neither it nor Ray had time to report more
        return "was killed by SIGKILL, or ended itself by os._exit"
    return f"is gone: {text}"


def _death_report(error: RayError) -> str:
    """Ray's report. Of an actor that can't be reached, e.g. because its node is gone, it has one a moment later."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while isinstance(error, ActorUnavailableError) and time.monotonic() < deadline:
        entry = actor_entry(error.actor_id)
        if entry.get("State") == "DEAD":
            return death_message(entry) or str(error)
        time.sleep(0.2)
    return str(error)


def _end_of_stderr(place: Place) -> str:
    if place.node_id == ray.get_runtime_context().get_node_id():
        return _end_of_log(place.pid)
    if not any(node["NodeID"] == place.node_id and node["Alive"] for node in ray.nodes()):
        return ""
    there = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
    read = ray.remote(_end_of_log).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    try:
        return ray.get(read.remote(place.pid), timeout=LOG_SECONDS)
    except RayError:  # the node is shutting down as well
        return ""


def _end_of_log(pid: int) -> str:
    """The end of the stderr of a process of this node."""
    for path in glob.glob(os.path.join(logs_folder(), f"worker-*-{pid}.err")):
        with open(path, errors="replace") as file:
            # Ray's own marks begin with a colon.
            return "".join(line for line in file.readlines()[-LAST_LINES:] if not line.startswith(":"))
    return ""
