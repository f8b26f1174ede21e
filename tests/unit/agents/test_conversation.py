from __future__ import annotations

import random
import string

import pytest

from paceline.agents.conversation import Conversation, Limits, Sampled
from paceline.errors import DataError
from tests.unit.agents.chats import TEMPLATES, chat_template, random_turn

EOS = 1
HASH = 3 + 10 + 52 + string.punctuation.index("#")
LETTERS = [*range(3, 98), *[HASH] * 20]
"""All characters; a # makes one of the templates forget."""
ROOMY = Limits(200, 200)


def begin(name: str, limits: Limits = ROOMY, text: str = "2+3=") -> Conversation:
    template = chat_template(name)
    messages = [{"role": "user", "content": text}]
    return Conversation(template, limits, messages, template.encode(template.render(messages)))


def say(conversation: Conversation, text: str, ends: bool = True) -> list[int]:
    ids = chat_template("blocks").encode(text) + [EOS] * ends
    conversation.add_turn(Sampled(ids, [-0.5] * len(ids), ends))
    return ids


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_trains_is_what_was_sampled_after_what_the_template_writes(name: str) -> None:
    """A thousand conversations of any tokens: ids and log-probs as they came, masks, and the context of each turn."""
    generator = random.Random(name)
    template = chat_template(name)
    num_splits = 0
    for number in range(1000 // len(TEMPLATES) + 1):
        limits = Limits(
            generator.randint(30, 150),
            generator.randint(10, 120),
            turn_tokens=generator.choice([None, 6]),
            assistant_turns=generator.choice([None, 3]),
            user_turns=generator.choice([None, 2]),
        )
        conversation = begin(name, limits, text=f"question {number}")
        sampled: list[Sampled] = []
        while conversation.room:
            assert template.decode(conversation.context) == template.render(conversation.messages)
            sampled.append(random_turn(generator, LETTERS, EOS, conversation.room))
            turn = conversation.add_turn(sampled[-1])
            assert turn.num_tokens <= (limits.turn_tokens or 200)
            if generator.random() < 0.1:
                break
            answer = "".join(generator.choices("ab #1", k=generator.randint(0, 9)))
            if not conversation.observe([{"role": "tool", "content": answer}] * generator.randint(1, 2)):
                break
        conversation.end()
        trained = [
            (token, log_prob)
            for row in conversation.rows
            for token, own, log_prob in zip(row.response_ids, row.mask, row.log_probs, strict=True)
            if own
        ]
        assert trained == [pair for one in sampled for pair in zip(one.token_ids, one.log_probs, strict=True)]
        for row in conversation.rows:
            assert len(row.response_ids) == len(row.rewards) <= limits.response_tokens
            assert len(row.prompt_ids) <= limits.prompt_tokens
            assert not row.mask or row.mask[-1]
            assert all(log_prob == 0 for log_prob, own in zip(row.log_probs, row.mask, strict=True) if not own)
        splits = int(conversation.counts.get("splits", 0))
        assert max(1, len(conversation.rows)) in (splits, splits + 1)  # a row without a turn is none
        num_splits += splits
    assert num_splits > 50 if name == "forgets" else num_splits == 0


def test_an_observation_is_what_the_template_writes_between_two_turns() -> None:
    conversation = begin("blocks")
    ids = say(conversation, "7*")
    assert conversation.observe([{"role": "tool", "content": "12"}])
    more = say(conversation, "12")
    row = conversation.rows[0]
    between = chat_template("blocks").encode("\n[tool]12<eos>\n[assistant]")
    assert row.response_ids == ids + between + more
    assert row.mask == [1] * 3 + [0] * len(between) + [1] * 3


def test_a_turn_that_was_cut_is_closed_as_the_template_does() -> None:
    conversation = begin("blocks")
    say(conversation, "7*", ends=False)
    conversation.observe([{"role": "tool", "content": "12"}])
    assert conversation.counts == {"cut_turns": 1}
    assert conversation.rows[0].mask == [1, 1] + [0] * len("e\n[tool]12e\n[assistant]")


def test_a_template_that_changes_what_was_said_splits_the_conversation_there() -> None:
    conversation = begin("forgets")
    say(conversation, "hm#5")
    conversation.observe([{"role": "user", "content": "sure?"}])
    say(conversation, "yes")
    conversation.observe([{"role": "user", "content": "?"}])
    say(conversation, "yes")
    first, second = conversation.rows
    template = chat_template("forgets")
    assert template.decode(first.response_ids) == "hm#5<eos>"
    assert template.decode(second.prompt_ids) == "[user]2+3=<eos>[assistant]5<eos>[user]sure?<eos>[assistant]"
    assert template.decode(second.response_ids) == "yes<eos>[user]?<eos>[assistant]yes<eos>"
    assert conversation.counts["splits"] == 1


def test_an_observation_at_the_end_is_no_part_of_what_trains() -> None:
    conversation = begin("blocks")
    say(conversation, "7*")
    conversation.observe([{"role": "tool", "content": "12"}])
    conversation.end()
    assert conversation.rows[0].mask == [1, 1, 1]
    assert conversation.ended_by == "answer"


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(200, 28), "response_length"),
        (Limits(200, 200, assistant_turns=1), "max_assistant_turns"),
        (Limits(200, 200, user_turns=1), "max_user_turns"),
    ],
)
def test_a_limit_ends_it_and_is_named(limits: Limits, reason: str) -> None:
    conversation = begin("blocks", limits)
    for _ in range(3):
        say(conversation, "7*")
        if not conversation.observe([{"role": "tool", "content": "1"}]):
            break
    assert conversation.ended_by == reason
    assert conversation.room == 0
    assert conversation.rows[0].mask[-1] == 1


def test_a_prompt_that_is_too_long_has_no_turn() -> None:
    conversation = begin("blocks", Limits(5, 200))
    assert (conversation.ended_by, conversation.room, conversation.rows) == ("prompt_length", 0, [])


def test_rewards_of_turns_are_at_their_last_tokens() -> None:
    conversation = begin("blocks")
    for value in (0.5, 2.0):
        say(conversation, "7*")
        conversation.reward(value)
        conversation.observe([{"role": "tool", "content": "1"}])
    conversation.end()
    rewards = conversation.rows[0].rewards
    assert [turn.reward for turn in conversation.turns] == [0.5, 2.0]
    assert (rewards[2], rewards[-1], sum(rewards)) == (0.5, 2.0, 2.5)


def test_a_plain_text_has_one_turn() -> None:
    conversation = Conversation(chat_template("blocks"), ROOMY, "2+3=", [5, 6])
    say(conversation, "5")
    with pytest.raises(DataError, match="plain text"):
        conversation.observe([{"role": "user", "content": "?"}])
