"""Dialogues of HH-RLHF: where a prompt ends, and pairs that are of no use."""

from __future__ import annotations

import pytest

from paceline.config import DataConfig
from paceline.data import RLHFDataset
from paceline.data.sources.full_hh_rlhf import split_dialogue
from paceline.errors import DataError
from tests.tiny import make_tiny_tokenizer
from tests.unit.data.sources.records import (
    DAHOAS_HH,
    HH_PROMPT,
    OPENING,
    ORIGINAL_HH,
    prepared,
    run,
    write_lines,
)


@pytest.mark.parametrize("record", [ORIGINAL_HH, DAHOAS_HH], ids=["dialogues", "prompt-and-replies"])
def test_hh_rlhf_rows_are_the_same_from_both_schemas(tmp_path, record):
    extra_info = {"split": "test", "index": 0}
    for purpose, columns in {
        "rl": {"ability": "alignment", "reward_model": {"style": "model", "ground_truth": None}},
        "sft": {"response": "It is 4."},
        "rm": {"chosen": "It is 4.", "rejected": "Who cares?"},
    }.items():
        [row] = prepared("full_hh_rlhf", [record], tmp_path / purpose, split="test", purpose=purpose)
        assert row == {
            "data_source": "Dahoas/full-hh-rlhf",
            "prompt": HH_PROMPT,
            **columns,
            "extra_info": extra_info,
        }


def test_a_dialogue_splits_at_the_last_reply_and_roles_alternate():
    prompt, reply = split_dialogue("\n\nHuman: a\n\nHuman: b\n\nAssistant: c\n\nAssistant:\n\nHuman: d\n\nAssistant: e")
    assert prompt == [
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    assert reply == "e"


def test_a_reply_of_two_turns_is_one_reply_and_the_prompt_still_ends_with_the_human():
    prompt, reply = split_dialogue("\n\nHuman: a\n\nAssistant: b\n\nAssistant: c")
    assert prompt == [{"role": "user", "content": "a"}]
    assert reply == "b\n\nc"


def test_the_word_human_inside_a_turn_starts_no_turn():
    prompt, reply = split_dialogue("\n\nHuman: Is Human: a word?\n\nAssistant: Yes.\nHuman: is one.")
    assert prompt == [{"role": "user", "content": "Is Human: a word?"}]
    assert reply == "Yes.\nHuman: is one."


@pytest.mark.parametrize(
    ("record", "purpose", "reason"),
    [
        ({**ORIGINAL_HH, "chosen": f"{OPENING}\n\nAssistant: "}, "sft", "the chosen reply is empty"),
        ({**ORIGINAL_HH, "rejected": f"{OPENING}\n\nAssistant:"}, "rm", "the rejected reply is empty"),
        ({**ORIGINAL_HH, "rejected": ORIGINAL_HH["chosen"]}, "rm", "chosen and rejected are the same"),
        ({**ORIGINAL_HH, "rejected": "\n\nHuman: A\n\nAssistant: B"}, "rm",
         "chosen and rejected reply to different prompts"),
        ({**ORIGINAL_HH, "chosen": OPENING}, "rl", "the dialogue ends with the human"),
        ({**ORIGINAL_HH, "chosen": "\n\nAssistant: Hi\n\nHuman: a\n\nAssistant:"}, "rl", "the assistant speaks first"),
        ({**ORIGINAL_HH, "chosen": "\n\nHuman: \n\nAssistant: Hm?"}, "rl", "the human's last turn is empty"),
    ],
)  # fmt: skip
def test_hh_rlhf_pairs_of_no_use_are_dropped_and_counted(tmp_path, record, purpose, reason):
    path = write_lines(tmp_path / "train.jsonl", [ORIGINAL_HH, record])
    report = run("full_hh_rlhf", path, tmp_path / "out", purpose)["train"]
    assert (report.read, report.kept, dict(report.dropped)) == (2, 1, {reason: 1})


def test_an_empty_chosen_reply_does_not_spoil_a_prompt_for_rl(tmp_path):
    [row] = prepared("full_hh_rlhf", [{**ORIGINAL_HH, "chosen": f"{OPENING}\n\nAssistant:"}], tmp_path)
    assert row["prompt"] == HH_PROMPT


def test_a_malformed_pair_is_found_where_pairs_are_needed(tmp_path):
    path = write_lines(tmp_path / "train.jsonl", [{"chosen": ORIGINAL_HH["chosen"]}])
    assert run("full_hh_rlhf", path, tmp_path / "out", "sft")["train"].kept == 1
    with pytest.raises(DataError, match=r"train\.jsonl:1: no field 'rejected': the row has chosen"):
        run("full_hh_rlhf", path, tmp_path / "out", "rm")


def test_prepared_dialogues_load_in_the_dataset(tmp_path):
    file = run("full_hh_rlhf", write_lines(tmp_path / "test.jsonl", [ORIGINAL_HH]), tmp_path / "out")["test"].path
    tokenizer = make_tiny_tokenizer()
    item = RLHFDataset(file, tokenizer, DataConfig(max_prompt_length=100))[0]
    text = tokenizer.decode(item["input_ids"][item["attention_mask"].bool()])
    assert text == "user: Hi\nassistant: Hello!\nuser: What is 2+2?\nassistant: "
