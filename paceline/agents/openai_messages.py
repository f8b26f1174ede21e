"""Messages as OpenAI's protocol has them, and as a chat template reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.agents.conversation import Turn
from paceline.agents.parsers import ToolCall
from paceline.agents.template import Message
from paceline.errors import PacelineError


class BadRequestError(PacelineError):
    """What a program asks for can't be given; it is told so."""


def read_messages(asked: Mapping[str, Any]) -> list[Message]:
    """The chat of a request, its contents as texts."""
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        raise BadRequestError("`messages` must be a list of at least one message")
    return [{**message, "content": _text(message.get("content"))} for message in messages]


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


def known_message(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells whether two messages are the same: clients add and leave out fields that are empty."""
    calls = tuple(
        (call.get("id"), call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    )
    return message.get("role"), _text(message.get("content")), calls, message.get("tool_call_id")


def chat_answer(turn: Turn, calls: Sequence[ToolCall], number: int) -> tuple[dict[str, Any], str]:
    """The assistant's message for a turn, and why it ended. Its tool calls have ids by the number of the turn."""
    if not calls:
        return {"role": "assistant", "content": turn.text}, "stop" if turn.finished_by_eos else "length"
    tool_calls = [
        {
            "id": f"call-{number}-{place}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for place, call in enumerate(calls)
    ]
    content = turn.text.partition("<tool_call>")[0] or None
    return {"role": "assistant", "content": content, "tool_calls": tool_calls}, "tool_calls"


def chunks(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """An answer as a stream. The turn is sampled by then, so its text comes in one piece."""
    common = {name: body[name] for name in ("id", "created", "model")}
    choice = body["choices"][0]
    if "text" in choice:
        yield {**common, "object": "text_completion", "choices": [choice]}
        return
    message = dict(choice["message"])
    if "tool_calls" in message:
        message["tool_calls"] = [{"index": place, **call} for place, call in enumerate(message["tool_calls"])]
    common["object"] = "chat.completion.chunk"
    first = {"index": 0, "delta": message, "finish_reason": None, "logprobs": choice.get("logprobs")}
    yield {**common, "choices": [first]}
    yield {**common, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
