"""What the driver asks of a rollout with which agents have conversations."""

from __future__ import annotations

from typing import Any

import ray

from paceline.rollout.rollout_interface import CachePolicy
from paceline.single_controller.base import Dispatch, call_tag
from paceline.workers.agent_sessions import AgentSession, AgentSessions
from paceline.workers.mailbox import Mailbox
from paceline.workers.request_calls import SAMPLED, RequestCalls
from paceline.workers.role_worker import built, role_method
from paceline.workers.sampling_thread import TURNS, SamplingThread

LOOPBACK = "127.0.0.1"


class AgentCalls(RequestCalls):
    """The part of a worker whose rollout agents reach: by its mailbox, and while `serve_agents` runs alone; in a
    streaming schedule beside the calls, or while `serve_until` runs."""

    leaves_inputs_alone = True

    mailbox: Mailbox | None = None
    sessions: AgentSessions | None = None
    stream: AgentSession | None = None

    @role_method(Dispatch.ONE_TO_ALL)
    def open_mailbox(self, key: str, is_local: bool = True) -> tuple[str, int]:
        """Where agents with this key may leave requests. `is_local`: only those of this machine can."""
        if self.mailbox is not None:
            self.mailbox.close()
        host = LOOPBACK if is_local or not ray.is_initialized() else ray.util.get_node_ip_address()
        self.mailbox = Mailbox(host, key)
        self.sessions = AgentSessions(self.mailbox, built(self.rollout))
        return self.mailbox.address

    @role_method(Dispatch.ONE_TO_ALL)
    def serve_agents(self, session: int, num_agents: int, sampling: dict[str, Any], version: int | None = None) -> None:
        """Sample for the conversations of a session with weights of this version, until all of its agents have what
        they want."""
        self.check_sampling()
        rollout = built(self.rollout)
        with self.rollout_on_device(version), rollout.decoding():
            built(self.sessions).serve(sampling, session, num_agents)
        rollout.sleep()

    @role_method(Dispatch.ONE_TO_ALL)
    def open_stream(
        self,
        session: int,
        num_agents: int,
        sampling: dict[str, Any],
        is_beside: bool,
        kv_cache: CachePolicy = "recompute",
    ) -> None:
        """Take the requests of a session that goes on; with `is_beside` a thread samples them from now on."""
        sessions = built(self.sessions)
        self.stream = sessions.open_stream(sampling, session, num_agents)
        if is_beside:
            self.kv_cache = kv_cache
            built(self.mailbox).when_mail = TURNS.look_again
            self.sampling = SamplingThread(sessions)

    @role_method(Dispatch.ALL_TO_ALL)
    def serve_until(self, names: list[str], count: int) -> None:
        """Sample in this call until so many of these conversations have ended."""
        rollout = built(self.rollout)
        with self.rollout_on_device(), rollout.decoding():
            call_tag.get({})["version"] = rollout.version
            built(self.sessions).serve_until(built(self.stream), names, count)
        rollout.sleep()

    @role_method(Dispatch.ONE_TO_ALL)
    def follow_stream(self) -> None:
        """Raise what ended the thread that samples; notes for the timeline when it sampled."""
        self.check_sampling()
        built(self.stream).ended.clear()  # nobody waits for them here
        call_tag.get({})[SAMPLED] = built(self.sampling).sampled()
