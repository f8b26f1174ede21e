"""A conversation as tokens: what the model sampled, as it came, and observations between, as the template writes them.

conversation = Conversation(template, limits, messages, prompt_ids)
conversation.add_turn(Sampled([7, 8, 2], [-0.1, -0.2, -0.1], finished_by_eos=True))
conversation.observe([{"role": "tool", "content": "12"}])   # False: a limit was met, and it is over
conversation.rows                                           # what trains
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.agents.template import ChatTemplate, Message
from paceline.errors import DataError

ANSWERED = "answer"
"""How a conversation ends that met no limit."""
FAILED = "error"
"""It broke: nothing of it trains."""


@dataclass(frozen=True)
class Limits:
    """How long a conversation may become, in tokens and turns; None is no limit."""

    prompt_tokens: int
    """Of a row's prompt."""
    response_tokens: int
    """Of a row behind its prompt, observations included."""
    turn_tokens: int | None = None
    """Of one turn of the model."""
    assistant_turns: int | None = None
    """Turns of the model."""
    user_turns: int | None = None
    """Observations: answers of tools, or of an environment."""


@dataclass(frozen=True)
class Sampled:
    """What an engine gave for one turn."""

    token_ids: list[int]
    log_probs: list[float]
    finished_by_eos: bool


@dataclass
class Turn:
    """One turn of the model."""

    text: str
    """Without the end-of-sequence token."""
    num_tokens: int
    finished_by_eos: bool
    reward: float = 0.0


@dataclass
class ConversationRow:
    """Tokens that train together: all lists but the prompt have an item for each response token."""

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    """1 on the model's tokens."""
    log_probs: list[float] = field(default_factory=list)
    """0 on observations."""
    rewards: list[float] = field(default_factory=list)
    """Of a turn, at its last token."""

    def add(self, token_ids: Sequence[int], log_probs: Sequence[float] | None = None) -> None:
        """Append sampled tokens or, without log-probs, an observation."""
        self.response_ids += token_ids
        self.mask += [int(log_probs is not None)] * len(token_ids)
        self.log_probs += log_probs if log_probs is not None else [0.0] * len(token_ids)
        self.rewards += [0.0] * len(token_ids)

    def cut_observation(self) -> None:
        """Nothing follows an observation at the end, so no token learns from it."""
        while self.mask and not self.mask[-1]:
            for column in (self.response_ids, self.mask, self.log_probs, self.rewards):
                column.pop()


class Conversation:
    """One conversation under way.

    Sampled tokens are never made from text. An observation is what the template writes between the end of the
    model's turn and the beginning of its next one. Where the template changes what was there before (it strips old
    reasoning, or trims a turn), the tokens so far would not be the model's context: then a new row begins, whose prompt
    is the whole chat as the template writes it now.
    """

    def __init__(
        self,
        template: ChatTemplate,
        limits: Limits,
        messages: str | Sequence[Message],
        prompt_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.limits = limits
        self.messages = [] if isinstance(messages, str) else list(messages)
        self._is_chat = not isinstance(messages, str)
        self.tools = tools
        self.turns: list[Turn] = []
        self.rows: list[ConversationRow] = []
        self.ended_by = ""
        """Why it is over; empty while it is not."""
        self.counts: dict[str, float] = {}
        """What loops and tools count, such as tool_calls."""
        self._template = template
        self._num_observations = 0
        self._text = ""
        """Of the chat, before the model's last turn."""
        if len(prompt_ids) > limits.prompt_tokens:
            self.end("prompt_length")
        else:
            self.rows.append(ConversationRow(list(prompt_ids)))

    @property
    def context(self) -> list[int]:
        """What the next turn is sampled after."""
        return self.rows[-1].prompt_ids + self.rows[-1].response_ids

    @property
    def room(self) -> int:
        """Tokens that the next turn may have; 0 where no turn may follow."""
        if self.ended_by:
            return 0
        return min(self._left, self.limits.turn_tokens or self._left)

    @property
    def _left(self) -> int:
        return self.limits.response_tokens - len(self.rows[-1].response_ids)

    def add_turn(self, sampled: Sampled) -> Turn:
        """The model's turn. The conversation may be over with it, by a limit."""
        ids = sampled.token_ids
        text = self._template.decode(ids[:-1] if sampled.finished_by_eos else ids)
        if self._is_chat and not self._text:
            self._text = self._template.render(self.messages, self.tools)
        self.messages.append({"role": "assistant", "content": text})
        self.rows[-1].add(ids, sampled.log_probs)
        turn = Turn(text, len(ids), sampled.finished_by_eos)
        self.turns.append(turn)
        if not sampled.finished_by_eos:
            self.count("cut_turns")
            if not self._left:
                self.end("response_length")
        return turn

    def reward(self, value: float) -> None:
        """What the model's last turn earned."""
        self.turns[-1].reward += value
        self.rows[-1].rewards[-1] += value

    def observe(self, messages: Sequence[Message]) -> bool:
        """Add what the model is to read before its next turn; False if it may have none."""
        limits = self.limits
        if not self._is_chat:
            raise DataError("a prompt that is a plain text has one turn: give prompts as chats (data.prompt_key).")
        if self.ended_by:
            return False
        if limits.assistant_turns and len(self.turns) >= limits.assistant_turns:
            return self.end("max_assistant_turns")
        if limits.user_turns and self._num_observations >= limits.user_turns:
            return self.end("max_user_turns")
        text = self._template.render([*self.messages, *messages], self.tools)
        row = self.rows[-1]
        following = self._following(text)
        if following is None:
            prompt_ids = self._template.encode(text)
            if len(prompt_ids) > limits.prompt_tokens:
                return self.end("prompt_length")
            self.rows.append(ConversationRow(prompt_ids))
            self.count("splits")
        elif len(following) >= self._left:  # not a token would be left to answer
            return self.end("response_length")
        else:
            row.add(following)
        self.messages += messages
        self._text = text
        self._num_observations += 1
        return True

    def _following(self, text: str) -> list[int] | None:
        """The tokens between the model's last turn and its next one; None if what was there before has changed."""
        before = self._text + self.turns[-1].text
        if not text.startswith(before):
            return None
        rest = text[len(before) :]
        if not self.turns[-1].finished_by_eos:
            return self._template.encode(rest)
        last = self.rows[-1].response_ids[-1]
        end = self._template.decode([last])
        return self._template.encode(rest[len(end) :], after=last) if rest.startswith(end) else None

    def count(self, name: str, number: float = 1.0) -> None:
        """Add to what is counted of this conversation."""
        self.counts[name] = self.counts.get(name, 0.0) + number

    def end(self, reason: str = ANSWERED) -> bool:
        """It is over; the first reason stays. Gives False, for `observe`."""
        if not self.ended_by:
            self.ended_by = reason
            if self.rows:
                self.rows[-1].cut_observation()
            if len(self.rows) > 1 and not self.rows[-1].response_ids:
                self.rows.pop()  # the model had no turn after the template changed
        return False
