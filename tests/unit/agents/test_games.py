from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.agents.conversation import Conversation, ConversationLimits, Sampled, Turn
from paceline.agents.environment_loop import Environment, EnvironmentLoop
from paceline.agents.games import GuessTheNumber
from paceline.agents.loops import AgentContext, AgentRequest
from paceline.agents.parsers import ToolCall, ToolFormat
from paceline.agents.search import Search
from paceline.agents.template import Message
from paceline.agents.tools import Toolbox
from paceline.errors import DataError, PacelineError
from tests.unit.agents.chats import chat_template

CONTEXT = AgentContext(
    chat_template("blocks"),
    ConversationLimits(200, 200),
    Toolbox([], max_characters=100, side="left"),
    ToolFormat.named("hermes"),
    1,
)


def played(loop: EnvironmentLoop, *turns: str, row: dict[str, Any] | None = None) -> Conversation:
    """A conversation in which the model says these."""
    said = iter(turns)

    async def generate(conversation: Conversation, *_: object) -> Turn | None:
        if not conversation.room:
            return None
        ids = [*CONTEXT.template.encode(next(said)), 1]
        return conversation.add_turn(Sampled(ids, [0.0] * len(ids), True))

    return asyncio.run(loop.run(AgentRequest(row or {}, [5], 3, CONTEXT), generate))


def test_a_number_is_found_by_what_is_said_of_the_guesses() -> None:
    game = GuessTheNumber(largest=50)
    first = game.reset({}, seed=3)
    assert first == [{"role": "user", "content": "Guess a number from 1 to 50."}]
    low, high, turns = 1, 50, 0
    while True:
        guess, turns = (low + high) // 2, turns + 1
        said, reward, is_over = game.step(f"is it {guess}?")
        if is_over:
            break
        low, high = (guess + 1, high) if said == "Higher." else (low, guess - 1)
    assert (said, reward) == ("Yes.", 1.0)
    assert turns <= 6


def test_turns_of_the_loop_earn_what_the_game_says() -> None:
    loop = EnvironmentLoop(
        CONTEXT, environment="paceline.agents.games.GuessTheNumber", largest=1, tries=3, penalty=0.25
    )
    talk = played(loop, "hm", "2", "1", row={"raw_prompt": [{"role": "user", "content": "Go."}]})
    assert [turn.reward for turn in talk.turns] == [-0.25, 0.0, 1.0]
    assert [message["content"] for message in talk.messages] == ["Go.", "hm", "Say a number.", "2", "Lower.", "1"]


class Sleepy(Environment):
    """Asleep in one of its methods; a conversation with it must end all the same."""

    def __init__(self, asleep: str) -> None:
        self._asleep = asleep

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        self._sleep("reset")
        return [{"role": "user", "content": "?"}]

    def step(self, text: str) -> tuple[str, float, bool]:
        self._sleep("step")
        return "", 0.0, True

    def close(self) -> None:
        self._sleep("close")

    def _sleep(self, method: str) -> None:
        if method == self._asleep:
            threading.Event().wait(60)


@pytest.mark.parametrize("method", ["reset", "step"])
def test_an_environment_that_hangs_is_named_in_time(method: str) -> None:
    loop = EnvironmentLoop(CONTEXT, environment=f"{__file__}:Sleepy", timeout_seconds=0.3, asleep=method)
    with pytest.raises(PacelineError, match=rf"Sleepy.{method} gave no answer within 0.3 s"):
        played(loop, "a")


class Loud(Sleepy):
    """Says more than anybody reads, and is slow."""

    def __init__(self, count: int, seconds: float = 0.0) -> None:
        super().__init__("")
        self._count, self._seconds = count, seconds

    def step(self, text: str) -> tuple[str, float, bool]:
        time.sleep(self._seconds)
        return "x" * self._count, 0.0, False


def test_an_environment_that_floods_is_named_and_not_read() -> None:
    loop = EnvironmentLoop(CONTEXT, environment=f"{__file__}:Loud", count=2_000_000)
    with pytest.raises(PacelineError, match=r"Loud said 2,000,000 characters; 1,048,576 are the most"):
        played(loop, "a")


def test_no_more_methods_run_together_than_a_loop_allows() -> None:
    loop = EnvironmentLoop(CONTEXT, environment=f"{__file__}:Loud", max_concurrent=2, count=0, seconds=0.1)
    environments = [Loud(0, 0.1) for _ in range(4)]

    async def ask() -> float:
        started = time.monotonic()
        await asyncio.gather(*(loop._asked(one.step, "") for one in environments))
        return time.monotonic() - started

    assert asyncio.run(ask()) >= 0.19


def test_an_environment_that_does_not_close_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    loop = EnvironmentLoop(CONTEXT, environment=f"{__file__}:Sleepy", timeout_seconds=0.3, asleep="close")
    assert played(loop, "a").turns[0].text == "a"
    assert "could not be closed" in caplog.text


GYM = """
import gymnasium

class Echo(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Text(50)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"seed {seed}, row {options['row']['index']}", {}
    def step(self, action):
        return action[::-1], float(len(action)), action == "end", False, {}

gymnasium.register("Echo-v0", entry_point=Echo, disable_env_checker=True)
"""


def test_a_text_environment_of_gymnasium_is_the_other_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium")
    (tmp_path / "echo_of_tests.py").write_text(GYM)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    target = "paceline.agents.games.GymnasiumText"
    loop = EnvironmentLoop(CONTEXT, environment=target, env_id="echo_of_tests:Echo-v0")
    talk = played(loop, "abc", "end", row={"index": 7})
    assert [message["content"] for message in talk.messages] == ["seed 3, row 7", "abc", "cba", "end"]
    assert [turn.reward for turn in talk.turns] == [3.0, 3.0]


def test_a_search_gives_the_texts_that_fit_best(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    corpus = tmp_path / "corpus.jsonl"
    texts = [{"title": "Paris", "text": "capital of France"}, {"text": "Berlin is a town"}, {"text": "fish swim"}]
    corpus.write_text("\n".join(map(json.dumps, texts)) + "\n\n")
    tool = Search(corpus=str(corpus), top_k=2)

    def search(query: str) -> str:
        return asyncio.run(tool.execute({}, ToolCall("search", {"query": query}).arguments, {}))

    assert search("the capital of France?") == "Paris: capital of France"
    assert search("volcano") == "nothing found"
    assert search("") == "nothing found"
    corpus.write_text('{"title": "x"}')
    with pytest.raises(DataError, match=r"corpus.jsonl:1 has no `text`"):
        Search(corpus=str(corpus))
