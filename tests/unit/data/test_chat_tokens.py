from __future__ import annotations

import pytest

from paceline.data.chat_tokens import ConversationTokens, TrainedConversation
from paceline.errors import DataError
from tests.tiny import make_tiny_tokenizer

TURNS = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 3?"},
    {"role": "assistant", "content": "five"},
]
OPEN = "{% if add_generation_prompt %}<assistant>{% endif %}"
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>\n{% endfor %}" + OPEN
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>"
    "{% endgeneration %}{{ '\n' }}{% else %}{{ m.content }}<eos>\n{% endif %}{% endfor %}" + OPEN
)
FORGETFUL = (  # leaves out what the assistant thought in earlier turns, as some reasoning models do
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and not loop.last %}...{% else %}{{ m.content }}"
    "{% endif %}<eos>{% endfor %}" + OPEN
)


def split(template: str | None, conversation: TrainedConversation) -> list[str]:
    """The text as runs, trained ones in brackets."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = template
    (tokens,) = ConversationTokens(tokenizer, {}).tokenise([conversation])
    runs: list[tuple[int, list[int]]] = []
    for token, trained in zip(tokens.ids, tokens.trained, strict=True):
        if not runs or runs[-1][0] != trained:
            runs.append((trained, []))
        runs[-1][1].append(token)
    return [f"[{tokenizer.decode(ids)}]" if trained else tokenizer.decode(ids) for trained, ids in runs]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "marks"])
def test_every_turn_of_the_assistant_is_trained_to_its_end(template: str) -> None:
    assert split(template, TrainedConversation(TURNS)) == [
        "<user>1+1=<eos>\n<assistant>",
        "[2<eos>]",
        "\n<user>and 3?<eos>\n<assistant>",
        "[five<eos>]",
    ]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prefixes", "marks"])
def test_the_last_turn_alone(template: str) -> None:
    runs = split(template, TrainedConversation(TURNS, turns="last"))
    assert runs == ["<user>1+1=<eos>\n<assistant>2<eos>\n<user>and 3?<eos>\n<assistant>", "[five<eos>]"]


def test_a_prompt_and_its_reply_as_text_end_with_eos() -> None:
    assert split(None, TrainedConversation(prompt="1+1=", reply="2")) == ["1+1=", "[2<eos>]"]


def test_what_the_rollout_is_given_is_the_beginning_of_what_is_trained() -> None:
    tokenizer = make_tiny_tokenizer()
    (tokens,) = ConversationTokens(tokenizer, {}).tokenise([TrainedConversation(TURNS)])
    prompt = tokenizer.apply_chat_template(TURNS[:1], add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokens.ids[: len(prompt)] == prompt
    assert tokens.trained.index(1) == len(prompt)


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_way_out() -> None:
    with pytest.raises(DataError, match=r"message 1.*data\.trained_turns=last"):
        split(FORGETFUL, TrainedConversation(TURNS))
    assert split(FORGETFUL, TrainedConversation(TURNS, turns="last"))[-1] == "[five<eos>]"


def test_a_conversation_without_the_assistant_trains_nothing() -> None:
    with pytest.raises(DataError, match="no turn of the assistant"):
        split(CHATML, TrainedConversation(TURNS[:1]))


def test_a_chat_wants_a_template() -> None:
    with pytest.raises(DataError, match="no chat template"):
        split(None, TrainedConversation(TURNS))


def test_what_a_template_raises_is_told() -> None:
    with pytest.raises(DataError, match="rejected by the chat template: no system here"):
        split("{{ raise_exception('no system here') }}", TrainedConversation(TURNS))
