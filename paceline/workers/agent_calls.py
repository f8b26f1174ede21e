"""What the driver asks of a rollout with which agents have conversations."""

from __future__ import annotations

from typing import Any

import ray

from paceline.single_controller.base import Dispatch
from paceline.workers.mailbox import Mailbox
from paceline.workers.request_calls import RequestCalls
from paceline.workers.role_worker import built, role_method

LOOPBACK = "127.0.0.1"


class AgentCalls(RequestCalls):
    """The part of a worker whose rollout agents reach: by its mailbox, and while `serve_agents` runs alone."""

    leaves_inputs_alone = True

    mailbox: Mailbox | None = None

    @role_method(Dispatch.ONE_TO_ALL)
    def open_mailbox(self, key: str, is_local: bool = True) -> tuple[str, int]:
        """Where agents with this key may leave requests. `is_local`: only those of this machine can."""
        if self.mailbox is not None:
            self.mailbox.close()
        host = LOOPBACK if is_local or not ray.is_initialized() else ray.util.get_node_ip_address()
        self.mailbox = Mailbox(host, key)
        return self.mailbox.address

    @role_method(Dispatch.ONE_TO_ALL)
    def serve_agents(self, session: int, num_agents: int, sampling: dict[str, Any], version: int | None = None) -> None:
        """Sample for the conversations of a session with weights of this version, until all of its agents have what
        they want."""
        rollout = built(self.rollout)
        with self.rollout_on_device(version), rollout.decoding():
            built(self.mailbox).serve(rollout, sampling, session, num_agents)
        rollout.sleep()
