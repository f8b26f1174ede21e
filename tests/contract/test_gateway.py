"""The openai package's own client, in a program that knows nothing of paceline, has conversations that train."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.agents.conversation import Conversation, Sampled, Turn
from paceline.agents.gateway import ProgramLoop
from paceline.agents.link import Watch
from paceline.agents.loops import AgentRequest, Choices
from paceline.agents.runner import Ended
from paceline.config import AgentConfig
from paceline.errors import PacelineError
from paceline.workers.agent_rows import rows_to_batch
from tests.contract.test_conversations import PROMPT, RESPONSE, have, make_jobs, model, recomputed, runner, serving
from tests.unit.agents.chats import chat_template
from tests.unit.agents.test_games import CONTEXT

pytest.importorskip("openai")
pytest.importorskip("aiohttp")
assert model  # a fixture

CHAT = """
import json, sys
from openai import OpenAI

row = json.load(sys.stdin)
client = OpenAI()
messages = row["raw_prompt"]
for turn in range(2):
    answer = client.chat.completions.create(model="any", messages=messages, max_tokens=7, logprobs=True)
    choice = answer.choices[0]
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    messages = [*messages, choice.message.model_dump(exclude_none=True), {"role": "user", "content": f"{turn}"}]
print(json.dumps({"reward": 0.5}))
"""


def program(folder: Path, text: str, **settings: Any) -> ProgramLoop:
    file = folder / "program.py"
    file.write_text(text)
    return ProgramLoop(CONTEXT, command=[sys.executable, str(file)], **settings)


def scripted(loop: ProgramLoop, *turns: str) -> Conversation:
    """A conversation in which the model says these."""
    said = iter(turns)

    def sampled(watch: Watch | None, max_tokens: int | None) -> Sampled:
        ids = [*CONTEXT.template.encode(next(said)), 1][: max_tokens or 99]
        count = len(ids) - (ids[-1] == 1)
        for place, token in enumerate(ids[:count]):
            if watch is not None and watch(token, -0.25):
                return Sampled(ids[: place + 1], [-0.25] * (place + 1), False, is_stopped=True)
        return Sampled(ids, [-0.25] * len(ids), ids[-1] == 1)

    async def generate(
        conversation: Conversation, max_tokens: int | None = None, choices: Choices | None = None
    ) -> Turn | None:
        if not conversation.room:
            return None
        found = [sampled(watch, max_tokens) for watch in (choices or Choices()).watches]
        return conversation.add_turn(*found) if len(found) == 1 else conversation.add_choices(found)[-1]

    chat = [{"role": "user", "content": "row's"}]
    prompt_ids = CONTEXT.template.encode(CONTEXT.template.render(chat))
    request = AgentRequest({"raw_prompt": chat}, prompt_ids, 3, CONTEXT)
    return asyncio.run(loop.run(request, generate))


@pytest.mark.slow
def test_what_a_program_samples_trains_with_the_models_own_log_probs(model: Any, tmp_path: Path) -> None:
    (tmp_path / "chat.py").write_text(CHAT)
    target = {"name": "program", "_target_": "paceline.agents.gateway.ProgramLoop"}
    loops = [{**target, "command": [sys.executable, str(tmp_path / "chat.py")]}]
    (tmp_path / "loops.yaml").write_text(json.dumps(loops))
    agent = AgentConfig(
        default_agent_loop="program", agent_loop_config_path=str(tmp_path / "loops.yaml"), timeout_seconds=120
    )
    template = chat_template("blocks")
    with serving(model, 1) as (engines, _):
        ended: list[Ended] = have(engines, [(runner(agent, template), make_jobs(template, 4))])
    assert [one.problem for one in ended] == [""] * 4
    assert [(len(one.turns), one.turns[-1].reward, len(one.rows)) for one in ended] == [(2, 0.5, 1)] * 4
    batch = rows_to_batch(ended, PROMPT, RESPONSE, 0).batch
    mask = batch["response_mask"].bool()
    expected = recomputed(model, batch["input_ids"], batch["attention_mask"], RESPONSE)
    assert (batch["rollout_log_probs"] - expected)[mask].abs().max() < 1e-4


TOOLS = """
import json, sys
from openai import BadRequestError, OpenAI

json.load(sys.stdin)
client = OpenAI()
tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
messages = [{"role": "system", "content": [{"type": "text", "text": "own"}]}, {"role": "user", "content": "2+3"}]
choice = client.chat.completions.create(model="any", messages=messages, tools=tools).choices[0]
(call,) = choice.message.tool_calls
assert (choice.finish_reason, call.function.name) == ("tool_calls", "add")
assert json.loads(call.function.arguments) == {"a": 2}
messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
stream = client.chat.completions.create(model="any", messages=messages, tools=tools, stream=True)
said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
assert said == "it is 5", said
done = client.completions.create(model="any", prompt="once", max_tokens=3, logprobs=1)
assert (done.choices[0].text, done.choices[0].finish_reason) == ("upo", "length")
assert done.choices[0].logprobs.token_logprobs == [-0.25] * 3
for wrong in ({"response_format": {"type": "json_object"}}, {"top_logprobs": 3, "logprobs": True}):
    try:
        client.chat.completions.create(model="any", messages=messages, **wrong)
    except BadRequestError as error:
        assert next(iter(wrong)) in str(error)
    else:
        raise AssertionError(wrong)
assert [item.id for item in client.models.list()] == ["policy"]
"""


@pytest.mark.slow
def test_tool_calls_streams_and_plain_texts_are_turns_of_one_conversation(tmp_path: Path) -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    talk = scripted(program(tmp_path, TOOLS), call, "it is 5", "upon a time")
    decode = CONTEXT.template.decode
    assert [turn.text for turn in talk.turns] == [call, "it is 5", "upo"]
    first, second = talk.rows
    assert decode(first.prompt_ids) == "[system]own<eos>\n[user]2+3<eos>\n[assistant]"
    assert decode(first.response_ids) == f"{call}<eos>\n[tool]5<eos>\n[assistant]it is 5<eos>"
    assert (decode(second.prompt_ids), decode(second.response_ids)) == ("once", "upo")
    assert talk.counts == {"restarts": 1, "cut_turns": 1}


RAW = """
import json, os, sys, urllib.request

def ask(key, body):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", data=body,
        headers={"Authorization": "Bearer " + key, "Content-Type": "application/json"})
    try:
        return urllib.request.urlopen(request).status
    except urllib.error.HTTPError as error:
        return error.code

own = os.environ["OPENAI_API_KEY"]
found = [ask("another", b"{}"), ask(own, b"[]"), ask(own, b"{"), ask(own, b'{"messages": []}'),
    ask(own, b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}')]
assert found == [401, 400, 400, 400, 400], found
"""


def test_who_has_no_key_or_asks_for_nonsense_is_told_so(tmp_path: Path) -> None:
    talk = scripted(program(tmp_path, RAW))
    assert talk.turns == []


@pytest.mark.parametrize(
    ("text", "settings", "said"),
    [
        ("import sys; sys.exit('no luck')", {}, "exit code 1: no luck"),
        ("import time; time.sleep(60)", {"timeout_seconds": 0.5}, "did not end within 0.5 s"),
    ],
)
def test_a_program_that_fails_or_hangs_is_named(tmp_path: Path, text: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(PacelineError, match=said):
        scripted(program(tmp_path, text, **settings))


def test_output_without_end_is_not_kept(tmp_path: Path) -> None:
    flood = 'print("x" * 3_000_000); print(\'{"reward": 1}\')'
    assert scripted(program(tmp_path, flood)).turns == []
