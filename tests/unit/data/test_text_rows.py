from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config.supervised import DialogueDataConfig, PairDataConfig, RatedPairDataConfig
from paceline.data.text_rows import Dialogues, Pairs
from paceline.errors import DataError
from tests.texts import sums, write_rows
from tests.tiny import make_tiny_tokenizer

PAIR = {"prompt": "ab", "chosen": "cd", "rejected": "efgh"}


def dialogues(tmp_path: Path, rows: list[dict[str, Any]], **changes: Any) -> Dialogues:
    file = write_rows(tmp_path / "rows.parquet", rows)
    return Dialogues(str(file), make_tiny_tokenizer(), DialogueDataConfig(**changes))


def pairs(tmp_path: Path, rows: list[dict[str, Any]], **changes: Any) -> Pairs:
    file = write_rows(tmp_path / "rows.parquet", rows)
    return Pairs(str(file), make_tiny_tokenizer(), RatedPairDataConfig(**changes))


def test_a_batch_says_where_each_trained_token_is_predicted_from(tmp_path: Path) -> None:
    rows = dialogues(tmp_path, [{"prompt": "ab", "response": "cde"}, {"prompt": "a", "response": "b"}])
    tokenizer = make_tiny_tokenizer()
    batch = rows.collate([rows[0], rows[1]])
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 1, 2]]
    trained = [
        ids[1:][mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["response_mask"], strict=True)
    ]
    assert [tokenizer.decode(ids) for ids in trained] == ["cde<eos>", "b<eos>"]


def test_a_pair_is_one_row_of_two_sequences(tmp_path: Path) -> None:
    rows = pairs(tmp_path, [PAIR, {**PAIR, "chosen": "c"}])
    batch = rows.collate([rows[0], rows[1]])
    assert batch["input_ids"].shape == (2, 2 * 7)
    sequences = batch["input_ids"].view(4, 7)
    attended = batch["attention_mask"].view(4, 7).bool()
    texts = [make_tiny_tokenizer().decode(ids[mask]) for ids, mask in zip(sequences, attended, strict=True)]
    assert texts == ["abcd<eos>", "abefgh<eos>", "abc<eos>", "abefgh<eos>"]
    assert batch["response_mask"].shape == (2, 2 * 6)


def test_margins_are_read_where_there_are_some(tmp_path: Path) -> None:
    assert [item.margin for item in pairs(tmp_path, [{**PAIR, "margin": 0.5}, {**PAIR, "margin": None}])] == [0.5, 0.0]
    with pytest.raises(DataError, match=r"Row 0 of .* has -1\.0 in the column of data\.margin_key"):
        pairs(tmp_path, [{**PAIR, "margin": -1.0}])


def test_replies_may_be_messages(tmp_path: Path) -> None:
    said = [{"role": "assistant", "content": "cd"}]
    chat = {"prompt": [{"role": "user", "content": "ab"}], "chosen": said, "rejected": said}
    assert len(pairs(tmp_path, [chat])) == 1


@pytest.mark.parametrize("how", ["left", "right"])
def test_long_rows_are_cut_where_it_was_asked(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    rows = dialogues(tmp_path, [{"prompt": "abcdef", "response": "gh"}], max_length=8, truncation=how)
    ids, trained = rows[0].sequences[0]
    assert make_tiny_tokenizer().decode(ids) == ("bcdefgh<eos>" if how == "left" else "abcdefgh")
    assert trained.sum() == (3 if how == "left" else 2)
    assert "1 texts are cut" in caplog.text


def test_long_rows_are_an_error_that_names_the_row_or_are_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "a" * 9, "response": "b"}]
    with pytest.raises(DataError, match=r"Row 1 of .*rows\.parquet has 11 tokens, more than data\.max_length=4"):
        dialogues(tmp_path, rows, max_length=4)
    assert len(dialogues(tmp_path, rows, max_length=4, truncation="drop")) == 1
    assert "1 of 2 rows are left out" in caplog.text
    with pytest.raises(DataError, match="All 2 rows were left out"):
        dialogues(tmp_path, rows, max_length=2, truncation="drop")


def test_a_row_of_which_nothing_trained_is_left_is_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": "abc", "response": "d"}, {"prompt": "a", "response": "d"}]
    assert len(dialogues(tmp_path, rows, max_length=3, truncation="right")) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "response": None}, "wants text in the columns 'prompt' and 'response'"),
        ({"prompt": [{"role": "user", "content": "a"}], "response": ""}, "must be text, and not be empty"),
        ({"messages": [{"content": "a"}]}, "it must be a chat"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no turn of the assistant"),
    ],
)
def test_the_first_row_that_is_not_as_it_should_be_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    good = {"messages": sums(1)[0]["messages"]} if "messages" in row else {"prompt": row["prompt"], "response": "b"}
    with pytest.raises(DataError, match=rf"Row 1 of .*rows\.parquet .*{message}"):
        dialogues(tmp_path, [good, row])


def test_json_lines_are_read_as_parquet_is(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c", "other": 1}\n' * 3)
    rows = Pairs(str(tmp_path / "rows.jsonl"), make_tiny_tokenizer(), PairDataConfig(), max_samples=2)
    assert len(rows) == 2
    assert torch.equal(rows.collate([rows[0]])["margin"], torch.zeros(1))
