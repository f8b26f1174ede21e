"""Environments that come with paceline: a game of several turns, and any text environment of gymnasium.

- {name: guess, _target_: paceline.agents.EnvironmentLoop, environment: paceline.agents.games.GuessTheNumber}
- name: gym
  _target_: paceline.agents.EnvironmentLoop
  environment: paceline.agents.games.GymnasiumText
  env_id: my_package:MyTextGame-v0
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from paceline.agents.environment import Environment
from paceline.agents.template import Message
from paceline.errors import PacelineError


class GuessTheNumber(Environment):
    """The model has `tries` turns to find a number from 1 to `largest`; each says whether it is higher or lower.

    The prompt's text comes first, if the row has a chat. Finding it earns 1, and a turn without a number `penalty`.
    """

    def __init__(self, largest: int = 100, tries: int = 7, penalty: float = 0.0) -> None:
        self._largest, self._left, self._penalty = largest, tries, penalty
        self._secret = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        self._secret = random.Random(seed).randint(1, self._largest)
        chat = row.get("raw_prompt")
        if isinstance(chat, list) and chat:
            return [dict(message) for message in chat]
        return [{"role": "user", "content": f"Guess a number from 1 to {self._largest}."}]

    def step(self, text: str) -> tuple[str, float, bool]:
        self._left -= 1
        found = re.search(r"\d+", text)
        is_over = self._left == 0
        if found is None:
            return "Say a number.", -self._penalty, is_over
        guess = int(found.group()[:9])
        if guess == self._secret:
            return "Yes.", 1.0, True
        return "Higher." if guess < self._secret else "Lower.", 0.0, is_over


class GymnasiumText(Environment):
    """An environment of gymnasium whose observations are texts and whose actions are the model's turns.

    `env_id` is as for `gymnasium.make`, which gets the further settings. Needs gymnasium: `pip install
    "paceline[agents]"`.
    """

    def __init__(self, *, env_id: str, **settings: Any) -> None:
        import gymnasium

        self._environment: Any = gymnasium.make(env_id, **settings)

    def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        observation, _ = self._environment.reset(seed=seed % 2**31, options={"row": dict(row)})
        chat = row.get("raw_prompt")
        before = [dict(message) for message in chat] if isinstance(chat, list) else []
        return [*before, {"role": "user", "content": _as_text(observation)}]

    def step(self, text: str) -> tuple[str, float, bool]:
        observation, reward, terminated, truncated, _ = self._environment.step(text)
        return _as_text(observation), float(reward), bool(terminated or truncated)

    def close(self) -> None:
        self._environment.close()


def _as_text(observation: Any) -> str:
    if not isinstance(observation, str):
        raise PacelineError(f"an observation is a {type(observation).__name__}; a text environment gives texts")
    return observation
