"""Agents and a rollout together: conversations by a real engine, over a mailbox, and what trains of them."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from paceline.agents import AgentLoop, AgentRequest, Conversation, Generate
from paceline.agents.link import EngineLink, LinkError
from paceline.agents.loops import AgentContext
from paceline.agents.runner import Ended, Job, Runner, make_context
from paceline.agents.template import ChatTemplate
from paceline.agents.wire import Engines
from paceline.config import AgentConfig, MultiTurnConfig
from paceline.rollout.native import NativeRollout
from paceline.workers.agent_rows import rows_to_batch
from paceline.workers.agent_sessions import AgentSessions
from paceline.workers.mailbox import Mailbox
from tests.contract.rollout_engines import TOLERANCE, build_vllm, save_peaked_model, start_vllm
from tests.tiny import build_tiny_model
from tests.unit.agents.chats import TEMPLATES, chat_template

EOS, HASH = 1, "#"
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": False}
KEY = "a key"
PROMPT, RESPONSE = 150, 60


class ChatterLoop(AgentLoop):
    """Answers every turn with a random text, which depends on the conversation alone."""

    def __init__(self, context: AgentContext, seconds: float = 0.0) -> None:
        super().__init__(context)
        self.seconds = seconds

    async def run(self, request: AgentRequest, generate: Generate) -> Conversation:
        generator = random.Random(request.seed)
        conversation = request.begin()
        if request.row.get("breaks"):
            await generate(conversation)
            raise ValueError("broken on purpose")
        while (turn := await generate(conversation)) and generator.random() < 0.8:
            conversation.reward(len(turn.text))
            await asyncio.sleep(self.seconds)
            text = "".join(generator.choices("abc #", k=generator.randint(0, 6)))
            if not conversation.observe([{"role": "user", "content": text}]):
                break
        return conversation


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    model = build_tiny_model(initializer_range=0.2).eval()
    # A model of random weights would never end its turn, nor say what makes a template forget.
    with torch.no_grad():
        model.model.embed_tokens.weight[EOS] *= 1.5
    return model


@pytest.fixture
def loops(tmp_path: Path) -> AgentConfig:
    path = tmp_path / "loops.yaml"
    path.write_text(f"- {{name: chatter, _target_: {__file__}:ChatterLoop}}\n")
    return AgentConfig(default_agent_loop="chatter", agent_loop_config_path=str(path), timeout_seconds=60)


def runner(loops: AgentConfig, template: ChatTemplate) -> Runner:
    multi_turn = MultiTurnConfig(max_tokens_per_turn=8)
    return Runner(loops, make_context(template, multi_turn, prompt_tokens=PROMPT, response_tokens=RESPONSE))


def make_jobs(template: ChatTemplate, count: int, **columns: object) -> list[Job]:
    jobs = []
    for order in range(count):
        chat = [{"role": "user", "content": f"q{order % 7}"}]
        prompt_ids = template.encode(template.render(chat))
        jobs.append(Job(order, 0, {"raw_prompt": chat, **columns}, prompt_ids, 1000 + order))
    return jobs


@contextmanager
def serving(model: PreTrainedModel, num_agents: int, session: int = 1) -> Iterator[tuple[Engines, list[BaseException]]]:
    """A rollout that serves one session in a thread."""
    mailbox = Mailbox("127.0.0.1", KEY)
    engine = NativeRollout(model, {EOS}, 0, max_num_seqs=64)
    errors: list[BaseException] = []

    def serve() -> None:
        try:
            AgentSessions(mailbox, engine).serve(SAMPLING, session, num_agents)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Engines((mailbox.address,), KEY), errors
    finally:
        thread.join(60)
        mailbox.close()
        assert not thread.is_alive()
        assert not engine.has_work


def have(engines: Engines, shares: list[tuple[Runner, list[Job]]], session: int = 1) -> list[Ended]:
    """All conversations, each share by an agent of its own."""

    async def one(agent: int, runner: Runner, jobs: list[Job]) -> list[Ended]:
        link = EngineLink(session, agent)
        await link.connect(engines)
        return await runner.run(jobs, link)

    async def everyone() -> list[Ended]:
        ended = await asyncio.gather(*(one(agent, *share) for agent, share in enumerate(shares)))
        return sorted((item for part in ended for item in part), key=lambda item: item.order)

    return asyncio.run(everyone())


def recomputed(model: PreTrainedModel, batch: torch.Tensor, attention: torch.Tensor, width: int) -> torch.Tensor:
    """Log-probs (rows, width) of the last tokens, by a plain forward pass over each row alone."""
    rows = []
    for ids, mask in zip(batch, attention.bool(), strict=True):
        with torch.no_grad():
            logits = model(input_ids=ids[mask][None]).logits[0].log_softmax(dim=-1)
        found = logits[:-1].gather(-1, ids[mask][1:, None])[:, 0]
        whole = torch.zeros(len(ids))
        whole[mask.nonzero()[1:, 0]] = found
        rows.append(whole[-width:])
    return torch.stack(rows)


@pytest.mark.parametrize("count", [30, pytest.param(340, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_trains_has_the_log_probs_that_the_model_gives_it_there(
    model: PreTrainedModel, loops: AgentConfig, name: str, count: int
) -> None:
    template = chat_template(name)
    with serving(model, 1) as (engines, _):
        ended = have(engines, [(runner(loops, template), make_jobs(template, count))])
    assert [one.ended_by for one in ended if one.problem] == []
    assert sum(len(one.turns) for one in ended) > 1.5 * count
    batch = rows_to_batch(ended, PROMPT, RESPONSE, 0).batch
    mask = batch["response_mask"].bool()
    expected = recomputed(model, batch["input_ids"], batch["attention_mask"], RESPONSE)
    assert (batch["rollout_log_probs"] - expected)[mask].abs().max() < 1e-4
    assert (batch["rollout_log_probs"][~mask] == 0).all()
    assert (mask & ~batch["attention_mask"][:, PROMPT:].bool()).sum() == 0
    own = [int(number) for number in mask.sum(dim=-1)]
    by_conversation = [0] * count
    for order, number in zip(batch["conversation"].tolist(), own, strict=True):
        by_conversation[order] += number
    assert by_conversation == [sum(turn.num_tokens for turn in one.turns) for one in ended]


def test_conversations_do_not_depend_on_the_number_of_agents(model: PreTrainedModel, loops: AgentConfig) -> None:
    """Tokens and rewards not at all; log-probs by their last bits, as other turns are decoded together."""
    template = chat_template("forgets")
    found = []
    for num_agents in (1, 2, 3):
        with serving(model, num_agents) as (engines, _):
            jobs = make_jobs(template, 20)
            shares = [(runner(loops, template), jobs[agent::num_agents]) for agent in range(num_agents)]
            found.append([row for one in have(engines, shares) for row in one.rows])
    one, *others = found
    for rows in others:
        for name in ("prompt_ids", "response_ids", "mask", "rewards"):
            assert [getattr(row, name) for row in rows] == [getattr(row, name) for row in one]
        for row, same in zip(rows, one, strict=True):
            assert row.log_probs == pytest.approx(same.log_probs, abs=1e-5)
    assert sum(sum(row.rewards) for row in one) > 0


def test_an_agent_may_begin_the_next_step_while_another_is_at_this_one(
    model: PreTrainedModel, loops: AgentConfig
) -> None:
    template = chat_template("blocks")
    mailbox, engine = Mailbox("127.0.0.1", KEY), NativeRollout(model, {EOS}, 0, max_num_seqs=64)
    engines, jobs = Engines((mailbox.address,), KEY), make_jobs(template, 4)

    def serve() -> None:
        sessions = AgentSessions(mailbox, engine)
        for session in (1, 2):
            sessions.serve(SAMPLING, session, 2)

    async def linked(session: int, agent: int) -> EngineLink:
        link = EngineLink(session, agent)
        await link.connect(engines)
        return link

    async def both() -> list[list[Ended]]:
        is_ahead = asyncio.Event()

        async def quick() -> list[Ended]:
            await runner(loops, template).run(jobs[:2], await linked(1, 0))
            second = asyncio.create_task(runner(loops, template).run(jobs[:2], await linked(2, 0)))
            await asyncio.sleep(0.2)
            is_ahead.set()
            return await second

        async def slow() -> list[Ended]:
            first = await linked(1, 1)
            first.begin()
            await is_ahead.wait()
            await first.close()
            return await runner(loops, template).run(jobs[2:], await linked(2, 1))

        async with asyncio.timeout(60):
            return await asyncio.gather(quick(), slow())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    ended = asyncio.run(both())
    thread.join(30)
    mailbox.close()
    assert [one.problem for part in ended for one in part] == [""] * 4


def test_in_a_stream_each_token_has_the_log_prob_of_the_weights_that_its_version_names(
    model: PreTrainedModel, loops: AgentConfig
) -> None:
    """The weights change while conversations are under way, between two calls that sample."""
    template = chat_template("forgets")
    by_version = [model, build_tiny_model(initializer_range=0.2, seed=5).eval()]
    own = copy.deepcopy(model)
    mailbox, engine = Mailbox("127.0.0.1", KEY), NativeRollout(own, {EOS}, 0, max_num_seqs=64)
    sessions = AgentSessions(mailbox, engine)
    stream = sessions.open_stream(SAMPLING, 1, 1)
    jobs = [replace(job, name=f"name-{job.order}") for job in make_jobs(template, 24)]
    ended: list[Ended] = []

    async def have() -> None:
        link = EngineLink(1, 0)
        await link.connect(Engines((mailbox.address,), KEY))
        link.begin()
        talks = runner(loops, template)

        async def one(job: Job) -> None:
            ended.append(await talks.stream(job, link))
            link.say_over(0, job.name)

        await asyncio.gather(*(one(job) for job in jobs))

    agents = threading.Thread(target=lambda: asyncio.run(have()), daemon=True)
    agents.start()
    names = [job.name for job in jobs]
    sessions.serve_until(stream, names, 5)
    engine.update_weights(by_version[1].state_dict().items(), version=1)
    sessions.serve_until(stream, names, len(names))
    agents.join(30)
    mailbox.close()
    assert [one.problem for one in ended] == [""] * 24
    batch = rows_to_batch(ended, PROMPT, RESPONSE, 0, with_versions=True)
    versions, mask = batch.batch["policy_versions"], batch.batch["response_mask"].bool()
    assert sorted(set(batch.non_tensor_batch["request_id"])) == sorted(names)
    whose = batch.batch["conversation"][:, None].expand_as(mask)
    found = [set(versions[mask & (whose == order)].tolist()) for order in range(24)]
    assert {0, 1} in found
    for version, weights in enumerate(by_version):
        expected = recomputed(weights, batch.batch["input_ids"], batch.batch["attention_mask"], RESPONSE)
        chosen = mask & (versions == version)
        assert chosen.any()
        assert (batch.batch["rollout_log_probs"] - expected)[chosen].abs().max() < 1e-4


def test_a_conversation_that_breaks_costs_no_other_one(model: PreTrainedModel, loops: AgentConfig) -> None:
    template = chat_template("blocks")
    jobs = make_jobs(template, 6)
    jobs[2] = make_jobs(template, 3, breaks=True)[2]
    with serving(model, 1) as (engines, _):
        ended = have(engines, [(runner(loops, template), jobs)])
    assert [one.problem for one in ended] == ["", "", "ValueError: broken on purpose", "", "", ""]
    assert (ended[2].ended_by, ended[2].rows[0].response_ids) == ("error", [])
    assert all(one.rows[0].response_ids for one in ended if not one.problem)


def test_an_agent_that_is_gone_ends_its_requests_and_not_the_session(
    model: PreTrainedModel, loops: AgentConfig
) -> None:
    template = chat_template("blocks")
    with serving(model, 2) as (engines, errors):
        lost = socket.create_connection(engines.addresses[0])
        asked = {"id": "x", "order": 99, "prompt_ids": [5, 6], "max_tokens": 50, "seed": 1}
        for message in ({"key": KEY, "agent": 1, "session": 1}, {"submit": [asked]}):
            lost.sendall(json.dumps(message).encode() + b"\n")
        lost.close()
        ended = have(engines, [(runner(loops, template), make_jobs(template, 4))])
    assert errors == []
    assert [one.problem for one in ended] == [""] * 4


def test_an_error_of_the_rollout_reaches_the_agents(model: PreTrainedModel, loops: AgentConfig) -> None:
    template = chat_template("blocks")
    broken = build_tiny_model().eval()
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    with serving(broken, 1) as (engines, errors), pytest.raises(LinkError, match="not finite"):
        have(engines, [(runner(loops, template), make_jobs(template, 4))])
    assert "not finite" in str(errors[0])


@pytest.mark.parametrize("hello", [b'{"key": "another", "agent": 0, "session": 1}\n', b"nonsense\n", b"[]\n"])
def test_who_has_not_the_key_is_sent_away(model: PreTrainedModel, loops: AgentConfig, hello: bytes) -> None:
    template = chat_template("blocks")
    with serving(model, 1) as (engines, _):
        stranger = socket.create_connection(engines.addresses[0])
        stranger.sendall(hello + b'{"done": true}\n')
        assert stranger.recv(1) == b""
        ended = have(engines, [(runner(loops, template), make_jobs(template, 2))])
    assert len(ended) == 2


def test_the_model_goes_on_while_others_wait_for_their_tools(model: PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "loops.yaml"
    path.write_text(f"- {{name: chatter, _target_: {__file__}:ChatterLoop, seconds: 0.3}}\n")
    slow = AgentConfig(default_agent_loop="chatter", agent_loop_config_path=str(path), timeout_seconds=60)
    template = chat_template("blocks")
    started = time.monotonic()
    with serving(model, 1) as (engines, _):
        ended = have(engines, [(runner(slow, template), make_jobs(template, 32))])
    waits = [len(one.turns) - 1 for one in ended]
    assert time.monotonic() - started < 0.5 * 0.3 * sum(waits)


@pytest.mark.slow
def test_conversations_with_vllm_have_the_log_probs_of_the_model(tmp_path: Path, loops: AgentConfig) -> None:
    pytest.importorskip("vllm")
    folder = save_peaked_model(tmp_path / "model", seed=0)
    engine = build_vllm(folder, max_num_seqs=64, max_prompt_length=PROMPT + RESPONSE)
    template, mailbox = chat_template("forgets"), Mailbox("127.0.0.1", KEY)
    ended: list[Ended] = []

    def agent() -> None:
        ended.extend(have(Engines((mailbox.address,), KEY), [(runner(loops, template), make_jobs(template, 20))]))

    agents = threading.Thread(target=agent, daemon=True)
    agents.start()
    with engine.decoding():
        AgentSessions(mailbox, engine).serve(SAMPLING, 1, 1)
    agents.join(30)
    mailbox.close()
    assert [one.problem for one in ended] == [""] * 20
    assert sum(len(one.turns) for one in ended) > 30
    batch = rows_to_batch(ended, PROMPT, RESPONSE, 0).batch
    mask = batch["response_mask"].bool()
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = recomputed(reference, batch["input_ids"], batch["attention_mask"], RESPONSE)
    assert (batch["rollout_log_probs"] - expected)[mask].abs().max() < TOLERANCE
    start_vllm.cache_clear()
