"""What agents want of one rollout engine, and who gets what was sampled.

A *session* is the conversations of one step: a call of the driver serves it to its end, so weights change between
sessions only. A streaming schedule has one session that goes on as long as the run: it is served between calls, or by
calls that end when some of its conversations have. In either case the order of calls is the driver's alone.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, suppress
from typing import Any

from paceline.agents.wire import Wanted
from paceline.errors import PacelineError
from paceline.rollout import Completion, Request, RolloutEngine, SamplingParams
from paceline.workers.mailbox import Mail, Mailbox, Peer

Answers = dict[Peer, dict[str, list[list[object]]]]


class AgentSession:
    """The requests of some agents. Names of requests begin with the session's number in the engine."""

    def __init__(self, number: int, engine: RolloutEngine, sampling: dict[str, Any], num_agents: int) -> None:
        self._number, self._engine, self._sampling = number, engine, sampling
        self.not_done = set(range(num_agents))
        self.silent = set(range(num_agents))
        """Agents from which no word came yet."""
        self.peers: set[Peer] = set()
        self.ended: set[str] = set()
        """Conversations of which an agent said so."""
        self.is_open = False
        """What comes is admitted at once."""
        self._first: list[tuple[int, Request]] = []
        self._peer_of: dict[str, Peer] = {}
        self._watched: dict[str, tuple[Request, int]] = {}
        """Requests whose tokens are sent as they come, and how many were sent."""

    def open(self) -> None:
        """Admit what came, in the order of the conversations: so what is decoded together first does not depend on
        which agent was faster."""
        self._engine.submit([request for _, request in sorted(self._first, key=lambda pair: pair[0])])
        self.is_open = True
        for peer in self.peers:
            peer.send({})  # it has begun

    def act_on(self, peer: Peer, message: dict[str, Any]) -> None:
        """A message of an agent."""
        if peer not in self.peers:
            self.peers.add(peer)
            if self.is_open:
                peer.send({})
        if message.get("done"):
            self.not_done.discard(peer.agent)
            self.silent.discard(peer.agent)
            self._forget([name for name, owner in self._peer_of.items() if owner is peer])
        elif "abort" in message:
            names = [self._own(name) for name in message["abort"]]
            self._forget([name for name in names if self._peer_of.get(name) is peer])
        elif "over" in message:
            self.ended.update(message["over"])
        else:
            self._submit(peer, [Wanted(**wanted) for wanted in message["submit"]])

    def _own(self, name: str) -> str:
        return f"{self._number}/{name}"

    def _submit(self, peer: Peer, wanted: list[Wanted]) -> None:
        samplings = [SamplingParams(one.max_tokens, **(one.sampling or self._sampling)) for one in wanted]
        requests = [
            Request(self._own(one.id), one.prompt_ids, sampling, one.seed)
            for one, sampling in zip(wanted, samplings, strict=True)
        ]
        if known := [one.id for one in wanted if self._own(one.id) in self._peer_of]:
            raise PacelineError(f"agent {peer.agent} asked twice for {known[:10]}.")
        self._peer_of |= {self._own(one.id): peer for one in wanted}
        pairs = list(zip(wanted, requests, strict=True))
        self._watched |= {self._own(one.id): (request, 0) for one, request in pairs if one.is_watched}
        self.silent.discard(peer.agent)
        if not self.is_open:
            self._first += [(one.order, request) for one, request in pairs]
        elif requests:
            self._engine.submit(requests)

    def add_ended(self, answers: Answers, name: str, completion: Completion) -> None:
        """A request of this session has ended."""
        self._watched.pop(name, None)
        answer = answers.setdefault(self._peer_of.pop(name), {})
        short = name.partition("/")[2]
        ended = [short, completion.token_ids, completion.log_probs, completion.finished_by_eos, completion.versions]
        answer.setdefault("ended", []).append(ended)

    def add_news(self, answers: Answers) -> None:
        """What a step sampled of the requests that are watched."""
        for name, (request, known) in self._watched.items():
            sampled = self._engine.sampled_so_far(request)
            if (count := len(sampled.token_ids)) > known:
                self._watched[name] = (request, count)
                new = [sampled.token_ids[known:], sampled.log_probs[known:], self._engine.version]
                answer = answers.setdefault(self._peer_of[name], {})
                answer.setdefault("sampled", []).append([name.partition("/")[2], *new])

    def _forget(self, names: list[str]) -> None:
        """Requests that nobody waits for."""
        if self.is_open:
            self._engine.abort(list(names))
        else:
            self._first = [pair for pair in self._first if pair[1].id not in names]
        for name in names:
            del self._peer_of[name]
            self._watched.pop(name, None)

    def drop_all(self) -> None:
        """Nothing of a session outlives it. After an error the engine may have lost some already."""
        for name in list(self._peer_of):
            with suppress(PacelineError):
                self._forget([name])


class AgentSessions:
    """The sessions of one engine; of an engine with agents alone, it is what a sampling thread decodes with."""

    def __init__(self, mailbox: Mailbox, engine: RolloutEngine) -> None:
        self._mailbox, self._engine = mailbox, engine
        self._sessions: dict[int, AgentSession] = {}
        self._early: list[Mail] = []
        """Of sessions that have not begun: an agent may be done with one while others are not."""
        self._newest = 0
        """The session that began last."""

    def serve(self, sampling: dict[str, Any], session: int, num_agents: int) -> None:
        """Sample what the agents of a session ask for, until all have said that they need no more.

        The first requests of all agents are admitted together.
        """
        own = self._begin(session, sampling, num_agents)
        try:
            while own.silent:
                self._take(block=True)
            own.open()
            while own.not_done:
                self._take(block=not self._engine.has_work)
                self._sample()
        finally:
            del self._sessions[session]
            own.drop_all()

    def open_stream(self, sampling: dict[str, Any], session: int, num_agents: int) -> AgentSession:
        """Take requests of this session from now on, whenever there is a step."""
        own = self._begin(session, sampling, num_agents)
        own.open()
        return own

    def serve_until(self, stream: AgentSession, names: Collection[str], count: int) -> None:
        """Sample until so many of these conversations have ended, or an agent is gone."""
        stream.ended &= set(names)
        num_agents = len(stream.not_done)
        while len(stream.ended) < count and len(stream.not_done) == num_agents:
            self._take(block=not self._engine.has_work)
            self._sample()

    def _begin(self, session: int, sampling: dict[str, Any], num_agents: int) -> AgentSession:
        own = self._sessions[session] = AgentSession(session, self._engine, sampling, num_agents)
        self._newest = session
        early, self._early = self._early, []
        for mail in early:
            self._act_on(*mail)
        return own

    def _take(self, *, block: bool) -> None:
        for mail in self._mailbox.take(block=block):
            self._act_on(*mail)

    def _act_on(self, peer: Peer, message: dict[str, Any]) -> None:
        if peer.session in self._sessions:
            self._sessions[peer.session].act_on(peer, message)
        elif peer.session > self._newest:
            self._early.append((peer, message))

    def _sample(self) -> None:
        """One step of the engine, if there is anything to do, and its answers."""
        if not self._engine.has_work:
            return
        answers: Answers = {}
        try:
            self._engine.step()
            collected = self._engine.collect()
        except BaseException as error:
            for session in self._sessions.values():
                for peer in session.peers:
                    peer.send({"error": f"{type(error).__name__}: {error}"})
            raise
        for name, completion in collected:
            number = int(str(name).partition("/")[0])
            self._sessions[number].add_ended(answers, str(name), completion)
        for session in self._sessions.values():
            session.add_news(answers)
        for peer, answer in answers.items():
            peer.send(answer)

    # For a sampling thread

    @property
    def has_work(self) -> bool:
        return self._engine.has_work or self._mailbox.has_mail

    @property
    def version(self) -> int:
        return self._engine.version

    def decoding(self) -> AbstractContextManager[None]:
        return self._engine.decoding()

    def step(self) -> None:
        """Read what came, and sample one more token of each request."""
        self._take(block=False)
        self._sample()
