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
class ConversationLimits:
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
    is_stopped: bool = False
    """Whoever asked for it ended it: the last token completes a text that it was to stop at."""
    versions: list[int] = field(default_factory=list)
    """Of the weights that sampled each token, where that was asked."""


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
    versions: list[int] = field(default_factory=list)
    """Of the weights that sampled each token; 0 on observations."""

    def add(
        self, token_ids: Sequence[int], log_probs: Sequence[float] | None = None, versions: Sequence[int] = ()
    ) -> None:
        """Append sampled tokens or, without log-probs, an observation."""
        self.response_ids += token_ids
        self.mask += [int(log_probs is not None)] * len(token_ids)
        self.log_probs += log_probs if log_probs is not None else [0.0] * len(token_ids)
        self.rewards += [0.0] * len(token_ids)
        self.versions += versions or [0] * len(token_ids)

    def branch(self) -> ConversationRow:
        """Another row that goes on from here. What was sampled before trains in this one."""
        row = ConversationRow([*self.prompt_ids])
        row.add(self.response_ids)
        return row

    def cut_observation(self) -> None:
        """Nothing follows an observation at the end, so no token learns from it."""
        while self.mask and not self.mask[-1]:
            for column in (self.response_ids, self.mask, self.log_probs, self.rewards, self.versions):
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
        limits: ConversationLimits,
        messages: str | Sequence[Message],
        prompt_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.limits = limits
        self.messages = [] if isinstance(messages, str) else list(messages)
        self._is_chat = not isinstance(messages, str)
        self._plain = messages if isinstance(messages, str) else ""
        self.tools = tools
        self.turns: list[Turn] = []
        self.rows: list[ConversationRow] = []
        self.ended_by = ""
        """Why it is over; empty while it is not."""
        self.counts: dict[str, float] = {}
        """What loops and tools count, such as tool_calls."""
        self._template = template
        self._num_observations = 0
        self._num_choices = 1
        """Of the last request: answers to the same chat, whose turns and rows are the last ones."""
        self._text = ""
        """Of the chat, before the model's last turn."""
        if len(prompt_ids) > limits.prompt_tokens:
            self.end("prompt_length")
        else:
            self.rows.append(ConversationRow(list(prompt_ids)))

    def restart(self, messages: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> bool:
        """Go on with another chat, in a row of its own that shares the reward; False if the model may have no turn."""
        if self.ended_by:
            return False
        if self.limits.assistant_turns and len(self.turns) >= self.limits.assistant_turns:
            return self.end("max_assistant_turns")
        text = messages if isinstance(messages, str) else self._template.render(messages, tools)
        prompt_ids = self._template.encode(text)
        if len(prompt_ids) > self.limits.prompt_tokens:
            return self.end("prompt_length")
        self.messages = [] if isinstance(messages, str) else list(messages)
        self.tools, self._text = tools, ""
        self._is_chat = not isinstance(messages, str)
        self._plain = messages if isinstance(messages, str) else ""
        if self.rows[-1].response_ids:
            self.rows[-1].cut_observation()
            self.rows.append(ConversationRow(prompt_ids))
            self.count("restarts")
        else:
            self.rows[-1] = ConversationRow(prompt_ids)
        return True

    @property
    def chat(self) -> list[Message] | str:
        """All that was said; of a plain text, that and how it goes on."""
        return self.messages if self._is_chat else self._plain + "".join(item["content"] for item in self.messages)

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
        self._num_choices = 1
        turn = self._add(sampled)
        self._end_if_full()
        return turn

    def add_choices(self, choices: Sequence[Sampled]) -> list[Turn]:
        """Several answers to the same chat, each in a row of its own. It goes on after the last one, unless
        `go_on_with` names another."""
        before = self.rows[-1].branch()
        turns = [self._add(choices[0])]
        for sampled in choices[1:]:
            self.messages.pop()
            self.rows.append(before.branch())
            turns.append(self._add(sampled))
        self._num_choices = len(turns)
        self.count("branches", len(turns) - 1)
        return turns

    def go_on_with(self, choice: int) -> None:
        """Which of the answers that came last is the one that others go on from."""
        place = choice - self._num_choices
        self.turns.append(self.turns.pop(place))
        self.rows.append(self.rows.pop(place))
        self.messages[-1] = {"role": "assistant", "content": self.turns[-1].text}
        self._num_choices = 1

    def _add(self, sampled: Sampled) -> Turn:
        ids = sampled.token_ids
        text = self._template.decode(ids[:-1] if sampled.finished_by_eos else ids)
        if self._is_chat and not self._text:
            self._text = self._template.render(self.messages, self.tools)
        self.messages.append({"role": "assistant", "content": text})
        self.rows[-1].add(ids, sampled.log_probs, sampled.versions)
        turn = Turn(text, len(ids), sampled.finished_by_eos)
        self.turns.append(turn)
        if not sampled.finished_by_eos and not sampled.is_stopped:
            self.count("cut_turns")
        return turn

    def _end_if_full(self) -> None:
        """A turn that was cut by the row's length is the last one."""
        if self.turns and not self.turns[-1].finished_by_eos and not self._left:
            self.end("response_length")

    def reward(self, value: float) -> None:
        """What the model's last turn earned."""
        self.turns[-1].reward += value
        self.rows[-1].rewards[-1] += value

    def observe(self, messages: Sequence[Message]) -> bool:
        """Add what the model is to read before its next turn; False if it may have none."""
        limits = self.limits
        if not self._is_chat:
            raise DataError("a prompt that is a plain text has one turn: give prompts as chats (data.prompt_key).")
        self._end_if_full()
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
        if reason == ANSWERED:
            self._end_if_full()
        if not self.ended_by:
            self.ended_by = reason
            if self.rows:
                self.rows[-1].cut_observation()
            if len(self.rows) > 1 and not self.rows[-1].response_ids:
                self.rows.pop()  # the model had no turn after the template changed
        return False
