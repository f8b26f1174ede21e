"""OpenAI's own client against the server: in training, for a program that has the conversation, and for a model."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from transformers import PreTrainedModel

from paceline.agents.conversation import Conversation, Sampled, Turn
from paceline.agents.gateway import Gateway, ServedProgram
from paceline.agents.link import EngineLink
from paceline.agents.loops import AgentLoop, AgentRequest, Choices, Generate
from paceline.agents.openai_server import OpenAIServer
from paceline.agents.parsers import ToolFormat
from paceline.agents.runner import Ended
from paceline.agents.served_model import ServedModel, ServingLimits
from paceline.config import AgentConfig
from paceline.workers.agent_rows import rows_to_batch
from tests.contract.test_conversations import PROMPT, RESPONSE, have, make_jobs, model, recomputed, runner, serving
from tests.unit.agents.chats import BLOCKS, chat_template
from tests.unit.agents.test_games import CONTEXT

openai = pytest.importorskip("openai")
pytest.importorskip("aiohttp")
assert model  # a fixture

CHAT = [{"role": "user", "content": "row's"}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
Client = Callable[[Any], Coroutine[Any, Any, None]]


class Script:
    """A model that says these texts, a token whenever it `may`; without, at once."""

    def __init__(self, *texts: str) -> None:
        self.texts = iter(texts)
        self.may = asyncio.Semaphore(10**9)

    async def __call__(
        self, conversation: Conversation, max_tokens: int | None = None, choices: Choices | None = None
    ) -> Turn:
        found = []
        for watch in (choices or Choices()).watches:
            ids = [*CONTEXT.template.encode(next(self.texts)), 1][: max_tokens or 999]
            for place, token in enumerate(ids):
                await self.may.acquire()
                if watch is not None and token != 1 and watch(token, -0.25):
                    found.append(Sampled(ids[: place + 1], [-0.25] * (place + 1), False, is_stopped=True))
                    break
            else:
                found.append(Sampled(ids, [-0.25] * len(ids), ids[-1] == 1))
        return conversation.add_turn(*found) if len(found) == 1 else conversation.add_choices(found)[-1]


def talk(script: Script, client: Client) -> Conversation:
    """What a client makes of a conversation with this script."""
    ids = CONTEXT.template.encode(CONTEXT.template.render(CHAT))
    request = AgentRequest({"raw_prompt": CHAT}, ids, 3, CONTEXT)
    served = ServedProgram(request, script, request.begin())

    async def run() -> None:
        async with Gateway().serving(served) as (url, key), openai.AsyncOpenAI(base_url=url, api_key=key) as program:
            async with asyncio.timeout(60):
                await client(program.with_options(max_retries=0))

    asyncio.run(run())
    served.conversation.end()
    return served.conversation


def texts_of(conversation: Conversation) -> list[tuple[str, str]]:
    decode = CONTEXT.template.decode
    return [(decode(row.prompt_ids), decode(row.response_ids)) for row in conversation.rows]


def trained(conversation: Conversation) -> list[str]:
    """Of each row, the tokens that train."""
    return [
        CONTEXT.template.decode([token for token, own in zip(row.response_ids, row.mask, strict=True) if own])
        for row in conversation.rows
    ]


def test_tokens_are_streamed_as_they_are_sampled() -> None:
    script = Script("abcd")
    script.may = asyncio.Semaphore(1)

    async def client(program: Any) -> None:
        said = []
        stream = await program.chat.completions.create(
            model="m", messages=CHAT, stream=True, logprobs=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            if not chunk.choices:
                assert (chunk.usage.prompt_tokens, chunk.usage.completion_tokens) == (24, 5)
                continue
            choice = chunk.choices[0]
            if choice.delta.content:
                said.append((choice.delta.content, [item.logprob for item in choice.logprobs.content]))
                script.may.release()  # the next token is sampled only now
        assert said == [(letter, [-0.25]) for letter in "abcd"]
        assert choice.finish_reason == "stop"

    assert trained(talk(script, client)) == ["abcd<eos>"]


def test_of_several_answers_all_train_and_the_chat_goes_on_with_the_one_that_was_taken() -> None:
    async def client(program: Any) -> None:
        answer = await program.chat.completions.create(model="m", messages=CHAT, n=3)
        assert [choice.message.content for choice in answer.choices] == ["one", "two", "six"]
        taken = answer.choices[1].message.model_dump(exclude_none=True)
        answer = await program.chat.completions.create(
            model="m", messages=[*CHAT, taken, {"role": "user", "content": "?"}]
        )
        assert answer.choices[0].message.content == "end"

    conversation = talk(Script("one", "two", "six", "end"), client)
    start = "[user]row's<eos>\n[assistant]"
    assert texts_of(conversation) == [
        (start, "one<eos>"), (start, "six<eos>"), (start, "two<eos>\n[user]?<eos>\n[assistant]end<eos>"),
    ]  # fmt: skip
    assert trained(conversation) == ["one<eos>", "six<eos>", "two<eos>end<eos>"]
    assert [turn.text for turn in conversation.turns] == ["one", "six", "two", "end"]
    assert conversation.counts == {"branches": 2}


def test_several_answers_later_in_a_chat_train_once_each_behind_what_was_said() -> None:
    async def client(program: Any) -> None:
        first = await program.chat.completions.create(model="m", messages=CHAT)
        said = [*CHAT, first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "?"}]
        await program.chat.completions.create(model="m", messages=said, n=2)

    conversation = talk(Script("hm", "yes", "no"), client)
    assert trained(conversation) == ["hm<eos>yes<eos>", "no<eos>"]
    assert [text for _, text in texts_of(conversation)] == [
        f"hm<eos>\n[user]?<eos>\n[assistant]{last}<eos>" for last in ("yes", "no")
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_an_answer_and_is_not_shown(stream: bool) -> None:
    async def client(program: Any) -> None:
        asked = {"model": "m", "messages": CHAT, "stop": ["STOP", "##"]}
        if stream:
            pieces = [chunk.choices[0] async for chunk in await program.chat.completions.create(**asked, stream=True)]
            text, finish = "".join(piece.delta.content or "" for piece in pieces), pieces[-1].finish_reason
        else:
            [choice] = (await program.chat.completions.create(**asked)).choices
            text, finish = choice.message.content, choice.finish_reason
        assert (text, finish) == ("ab #STO ", "stop")
        said = [*CHAT, {"role": "assistant", "content": text}, {"role": "user", "content": "on"}]
        await program.chat.completions.create(model="m", messages=said)

    conversation = talk(Script("ab #STO STOP and more", "."), client)
    assert trained(conversation) == ["ab #STO STOP.<eos>"]  # what was sampled, and nothing behind it
    assert "cut_turns" not in conversation.counts
    assert "restarts" not in conversation.counts


def test_tool_calls_are_streamed_behind_the_text_before_them() -> None:
    async def client(program: Any) -> None:
        asked = {"model": "m", "messages": CHAT, "tools": TOOLS, "stream": True}
        chunks = [chunk.choices[0] async for chunk in await program.chat.completions.create(**asked)]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == "so "
        [call] = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2})
        assert chunks[-1].finish_reason == "tool_calls"
        given = {
            "role": "assistant",
            "content": "so ",
            "tool_calls": [{"id": call.id, "type": "function", "function": call.function.model_dump()}],
        }
        messages = [*CHAT, given, {"role": "tool", "tool_call_id": call.id, "content": "2"}]
        stream = await program.chat.completions.create(**{**asked, "messages": messages})
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "<tool_call>{broken"

    conversation = talk(Script(f"so {CALL}", "<tool_call>{broken"), client)
    assert trained(conversation) == [f"so {CALL}<eos><tool_call>{{broken<eos>"]
    assert "restarts" in conversation.counts or len(conversation.rows) == 1


def test_who_hangs_up_and_asks_again_goes_on_where_it_was() -> None:
    script = Script("a", "lost", "b")

    async def client(program: Any) -> None:
        first = await program.chat.completions.create(model="m", messages=CHAT)
        said = [*CHAT, first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "?"}]
        script.may = asyncio.Semaphore(0)
        with pytest.raises(openai.APITimeoutError):
            await program.with_options(timeout=0.3).chat.completions.create(model="m", messages=said)
        script.may = asyncio.Semaphore(99)
        answer = await program.chat.completions.create(model="m", messages=said)
        assert answer.choices[0].message.content == "b"

    assert texts_of(talk(script, client))[0][1] == "a<eos>\n[user]?<eos>\n[assistant]b<eos>"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"n": 0}, "`n` must be a whole number from 1 on"),
        ({"n": 1000}, "64 are the most"),
        ({"response_format": {"type": "json_object"}}, "response_format: not supported"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs: not supported"),
        ({"tools": TOOLS, "tool_choice": "required"}, "no call can be forced"),
        ({"stop": ["x"] * 17}, "`stop` must be a text"),
        ({"seed": "x"}, "`seed` must be a whole number"),
        ({"messages": []}, "at least one message"),
    ],
)
def test_what_can_not_be_given_is_refused_by_name(asked: dict[str, Any], said: str) -> None:
    async def client(program: Any) -> None:
        for stream in ({}, {"stream": True}):
            with pytest.raises(openai.BadRequestError, match=said):
                await program.chat.completions.create(**{"model": "m", "messages": CHAT, **asked, **stream})

    assert talk(Script(), client).turns == []


# ------------------------------------------------------------------------------------------------- with a real engine


class ProgramInside(AgentLoop):
    """Has the conversation by the client, in this process."""

    gateway: Gateway

    async def run(self, request: AgentRequest, generate: Generate) -> Conversation:
        conversation = request.begin()
        messages = request.row["raw_prompt"]
        async with self._program(ServedProgram(request, generate, conversation)) as program:
            first = await program.chat.completions.create(model="m", messages=messages, n=2, max_tokens=9, seed=5)
            again = await program.chat.completions.create(model="m", messages=messages, n=2, max_tokens=9, seed=5)
            said = [choice.message.content for choice in first.choices]
            assert said == [choice.message.content for choice in again.choices]
            assert said[0] != said[1]
            taken = again.choices[0].message.model_dump(exclude_none=True)
            messages = [*messages, taken, {"role": "user", "content": "go on"}]
            stream = await program.chat.completions.create(model="m", messages=messages, stream=True, stop=["a", "e"])
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert "a" not in text
            assert "e" not in text
            await program.completions.create(model="m", prompt="once", max_tokens=5)
        return conversation

    @asynccontextmanager
    async def _program(self, served: ServedProgram) -> AsyncIterator[Any]:
        async with self.gateway.serving(served) as (url, key), openai.AsyncOpenAI(base_url=url, api_key=key) as program:
            yield program


def test_what_a_client_samples_in_any_way_trains_with_the_models_own_log_probs(
    model: PreTrainedModel, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loops.yaml").write_text(json.dumps([{"name": "inside", "_target_": f"{__file__}:ProgramInside"}]))
    loops = AgentConfig(
        default_agent_loop="inside", agent_loop_config_path=str(tmp_path / "loops.yaml"), timeout_seconds=60
    )
    template = chat_template("blocks")
    # The loop's class is imported by its path: one gateway for both of its names.
    monkeypatch.setattr(AgentLoop, "gateway", Gateway(), raising=False)
    with serving(model, 1) as (engines, _):
        ended: list[Ended] = have(engines, [(runner(loops, template), make_jobs(template, 3))])
    assert [one.problem for one in ended] == [""] * 3
    assert all(len(one.turns) == 6 for one in ended)
    batch = rows_to_batch(ended, PROMPT, RESPONSE, 0).batch
    mask = batch["response_mask"].bool()
    expected = recomputed(model, batch["input_ids"], batch["attention_mask"], RESPONSE)
    assert (batch["rollout_log_probs"] - expected)[mask].abs().max() < 1e-4
    assert mask.sum() == sum(turn.num_tokens for one in ended for turn in one.turns)


def test_a_chat_that_the_template_refuses_is_refused_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('begin with a user') }}{% endif %}"
    monkeypatch.setattr(CONTEXT.template._tokenizer, "chat_template", template + BLOCKS)

    async def client(program: Any) -> None:
        with pytest.raises(openai.BadRequestError, match="can't write a chat of tool: begin with a user"):
            await program.chat.completions.create(model="m", messages=[{"role": "tool", "content": "x"}])

    assert talk(Script(), client).turns == []


def served(model: PreTrainedModel, client: Client, answers: int = 8) -> None:
    """A client of a model that is served as it is by `paceline serve`."""
    limits = ServingLimits(context_tokens=80, max_tokens=12, temperature=1.0, top_p=1.0, top_k=-1, answers=answers)

    async def run(engines: Any) -> None:
        link = EngineLink(1, 0)
        await link.connect(engines)
        link.begin()
        own = ServedModel(link, chat_template("blocks"), ToolFormat.named("hermes"), limits, seed=0)
        server = OpenAIServer({"the key": own}.get, "mine")
        url = await server.start()
        try:
            async with asyncio.timeout(60), openai.AsyncOpenAI(base_url=url, api_key="the key") as program:
                await client(program.with_options(max_retries=0))
        finally:
            await link.close()
            await server.close()

    with serving(model, 1) as (engines, _):
        asyncio.run(run(engines))


def test_a_served_model_answers_each_request_for_itself(model: PreTrainedModel) -> None:
    async def client(program: Any) -> None:
        assert [item.id async for item in await program.models.list()] == ["mine"]

        async def ask(**asked: Any) -> list[str]:
            answer = await program.chat.completions.create(model="mine", messages=CHAT, **asked)
            assert all(
                math.isfinite(item.logprob)
                for choice in answer.choices
                for item in (choice.logprobs.content if choice.logprobs else ())
            )
            return [choice.message.content for choice in answer.choices]

        seeded = await asyncio.gather(*(ask(seed=7, n=2, logprobs=True) for _ in range(3)))
        assert seeded[0] == seeded[1] == seeded[2]
        assert seeded[0][0] != seeded[0][1]
        assert await ask(temperature=0) == await ask(temperature=0)
        assert await ask() != await ask()
        stream = await program.chat.completions.create(model="mine", messages=CHAT, stream=True, seed=7)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == seeded[0][0]
        done = await program.completions.create(model="mine", prompt="on", max_tokens=3, logprobs=1, seed=1)
        assert len(done.choices[0].logprobs.tokens) <= 3
        assert done.usage.prompt_tokens == 2

    served(model, client)


def test_a_served_model_takes_no_more_than_it_has_room_for(model: PreTrainedModel) -> None:
    async def client(program: Any) -> None:
        with pytest.raises(openai.RateLimitError, match="0 of 2 places for answers are taken"):
            await program.chat.completions.create(model="m", messages=CHAT, n=3)
        with pytest.raises(openai.BadRequestError, match=r"the prompt has 119 tokens; .* as the model reads 80"):
            await program.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 100}])
        with pytest.raises(openai.BadRequestError, match="top_p is 0"):
            await program.chat.completions.create(model="m", messages=CHAT, top_p=0)
        with pytest.raises(openai.AuthenticationError):
            await program.with_options(api_key="another").chat.completions.create(model="m", messages=CHAT)
        await program.chat.completions.create(model="m", messages=CHAT, n=2)

    served(model, client, answers=2)
