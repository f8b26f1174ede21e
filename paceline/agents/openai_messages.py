"""OpenAI's protocol: what a request asks for, and the bodies of the answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.agents.choice_reader import ChoiceReader, SampledToken
from paceline.agents.parsers import ToolCall
from paceline.agents.template import Message
from paceline.errors import PacelineError

KnownMessage = tuple[Any, ...]
MOST_CHOICES = 64
MOST_STOPS = 16
REFUSED = (
    "response_format", "functions", "audio", "suffix", "echo", "logit_bias", "presence_penalty", "frequency_penalty",
    "top_logprobs",
)  # fmt: skip
"""Settings that would change what the model samples, or how it is read, in a way that is not here."""


class BadRequestError(PacelineError):
    """What a program asks for can't be given; it is told so."""


class BusyError(PacelineError):
    """There is no place for a further request now."""


@dataclass(frozen=True)
class WantedCompletion:
    """A request, checked."""

    is_chat: bool
    messages: list[Message] = field(default_factory=list)
    """Of a chat: contents are texts, and arguments of tool calls are objects, as templates read them."""
    known: list[KnownMessage] = field(default_factory=list)
    """The same, to be compared."""
    prompt: str = ""
    """Of a plain text to go on with."""
    tools: list[Mapping[str, Any]] = field(default_factory=list)
    one_call: bool = False
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    log_probs: bool = False
    stream: bool = False
    with_usage: bool = False
    """At the end of a stream."""
    model: str = ""


def read_request(body: object, *, is_chat: bool) -> WantedCompletion:
    """What a body asks for; a BadRequestError for what can't be given."""
    if not isinstance(body, dict):
        raise BadRequestError("the request must be an object")
    if wrong := [name for name in REFUSED if body.get(name)]:
        raise BadRequestError(f"{', '.join(wrong)}: not supported here; leave it out")
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise BadRequestError("tool_choice must be auto or none: no call can be forced")
    n = _whole(body, "n", at_least=1) or 1
    if n > MOST_CHOICES:
        raise BadRequestError(f"n is {n}; {MOST_CHOICES} are the most")
    if (body.get("best_of") or n) != n:
        raise BadRequestError("best_of must be n: all answers are given")
    log_probs = body.get("logprobs")
    if not is_chat and isinstance(log_probs, int) and log_probs > 1:
        raise BadRequestError("logprobs must be 0 or 1: that of the sampled token is known, and no other")
    tools = body.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRequestError("`tools` must be a list of objects")
    stream_options = body.get("stream_options")
    return WantedCompletion(
        is_chat,
        messages=read_messages(body) if is_chat else [],
        known=[known_message(message) for message in body["messages"]] if is_chat else [],
        prompt="" if is_chat else _prompt(body.get("prompt")),
        tools=[] if body.get("tool_choice") == "none" else tools,
        one_call=body.get("parallel_tool_calls") is False,
        n=n,
        max_tokens=_whole(body, "max_completion_tokens", at_least=1) or _whole(body, "max_tokens", at_least=1),
        stop=_stops(body.get("stop")),
        seed=_whole(body, "seed"),
        temperature=_number(body, "temperature"),
        top_p=_number(body, "top_p"),
        log_probs=bool(log_probs) or (not is_chat and log_probs == 0 and log_probs is not False),
        stream=bool(body.get("stream")),
        with_usage=isinstance(stream_options, dict) and bool(stream_options.get("include_usage")),
        model=str(body.get("model") or ""),
    )


def _whole(body: Mapping[str, Any], name: str, at_least: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or (at_least is not None and value < at_least):
        raise BadRequestError(f"`{name}` must be a whole number{'' if at_least is None else f' from {at_least} on'}")
    return value


def _number(body: Mapping[str, Any], name: str) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        raise BadRequestError(f"`{name}` must be a number from 0 on")
    return float(value)


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(stop, str) for stop in stops):
        raise BadRequestError(f"`stop` must be a text, or a list of up to {MOST_STOPS} texts")
    return tuple(stop for stop in stops if stop)


def _prompt(value: object) -> str:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str) or not value:
        raise BadRequestError("`prompt` must be a text")
    return value


def read_messages(body: Mapping[str, Any]) -> list[Message]:
    """The chat of a request, as a template reads it."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        raise BadRequestError("`messages` must be a list of at least one message")
    return [{**message, "content": _text(message.get("content")), **_calls_of(message)} for message in messages]


def _text(content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise BadRequestError("only parts of type text can be read")
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRequestError("the content of a message must be a text")
    return content


def _calls_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """Tool calls with arguments as objects: templates write them as JSON themselves."""
    if not message.get("tool_calls"):
        return {}
    try:
        return {
            "tool_calls": [
                {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
        }
    except (KeyError, TypeError, ValueError) as error:
        raise BadRequestError(f"the tool calls of a message can't be read: {error!r}") from error


def known_message(message: Mapping[str, Any]) -> KnownMessage:
    """What tells whether two messages are the same: clients add and leave out fields that are empty."""
    calls = tuple(
        (call.get("id"), call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    )
    return message.get("role"), _text(message.get("content")), calls, message.get("tool_call_id")


@dataclass
class Choice:
    """An answer that has ended."""

    reader: ChoiceReader
    calls: list[dict[str, Any]]
    """Its tool calls, as the protocol has them."""

    @classmethod
    def of(cls, reader: ChoiceReader, calls: Sequence[ToolCall], name: str) -> Choice:
        """`name` tells its calls from those of other answers."""
        return cls(
            reader,
            [
                {
                    "id": f"call-{name}-{place}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for place, call in enumerate(calls)
            ],
        )

    @property
    def finish_reason(self) -> str:
        if self.calls:
            return "tool_calls"
        return "stop" if self.reader.finished_by_eos or self.reader.is_stopped else "length"

    @property
    def message(self) -> dict[str, Any]:
        """Of the assistant."""
        if not self.calls:
            return {"role": "assistant", "content": self.reader.text}
        return {"role": "assistant", "content": self.reader.content or None, "tool_calls": self.calls}


@dataclass(frozen=True)
class Bodies:
    """The bodies of one answer."""

    id: str
    created: int
    asked: WantedCompletion

    def whole(self, choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
        """All at once."""
        return {
            **self._common("chat.completion" if self.asked.is_chat else "text_completion"),
            "choices": [self._choice(place, choice) for place, choice in enumerate(choices)],
            "usage": _usage(choices, prompt_tokens),
        }

    def _choice(self, place: int, choice: Choice) -> dict[str, Any]:
        said = {"message": choice.message} if self.asked.is_chat else {"text": choice.reader.text}
        log_probs = {"logprobs": self._log_probs(choice.reader.tokens)}
        return {"index": place, **said, **log_probs, "finish_reason": choice.finish_reason}

    def role(self, place: int) -> Iterator[dict[str, Any]]:
        """What a streamed message begins with."""
        if self.asked.is_chat:
            yield self._chunk({"index": place, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def piece(self, place: int, text: str, tokens: Sequence[SampledToken]) -> Iterator[dict[str, Any]]:
        """More of a text."""
        if text or tokens:
            said = {"delta": {"content": text}} if self.asked.is_chat else {"text": text}
            yield self._chunk({"index": place, **said, "logprobs": self._log_probs(tokens), "finish_reason": None})

    def last(self, place: int, choice: Choice) -> Iterator[dict[str, Any]]:
        """What a streamed answer ends with: tool calls, or text that might have been one, and why it ended."""
        text, tokens = choice.reader.take()
        shown = "" if choice.calls else choice.reader.text[len(choice.reader.content) :]
        yield from self.piece(place, text + shown, tokens)
        if choice.calls:
            calls = [{"index": number, **call} for number, call in enumerate(choice.calls)]
            yield self._chunk({"index": place, "delta": {"tool_calls": calls}, "finish_reason": None})
        said: dict[str, Any] = {"delta": {}} if self.asked.is_chat else {"text": ""}
        yield self._chunk({"index": place, **said, "finish_reason": choice.finish_reason})

    def usage(self, choices: Sequence[Choice], prompt_tokens: int) -> Iterator[dict[str, Any]]:
        """The last chunk, where it was asked for."""
        if self.asked.with_usage:
            yield {**self._chunk(), "usage": _usage(choices, prompt_tokens)}

    def _chunk(self, *choices: Mapping[str, Any]) -> dict[str, Any]:
        name = "chat.completion.chunk" if self.asked.is_chat else "text_completion"
        return {**self._common(name), "choices": [*choices]}

    def _common(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.asked.model or "policy"}

    def _log_probs(self, tokens: Sequence[SampledToken]) -> dict[str, Any] | None:
        if not self.asked.log_probs:
            return None
        if not self.asked.is_chat:
            return {"tokens": [one.text for one in tokens], "token_logprobs": [one.log_prob for one in tokens]}
        return {
            "content": [
                {"token": one.text, "logprob": one.log_prob, "bytes": list(one.text.encode()), "top_logprobs": []}
                for one in tokens
            ]
        }


def _usage(choices: Sequence[Choice], prompt_tokens: int) -> dict[str, int]:
    sampled = sum(len(choice.reader.tokens) for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
    }
