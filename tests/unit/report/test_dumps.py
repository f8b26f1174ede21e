from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline import files
from paceline.protocol import DataProto
from paceline.report.dumps import dump_generations, generation_rows
from tests.tiny import make_tiny_tokenizer


@pytest.fixture
def batch() -> DataProto:
    """Two responses, of one and of three tokens (the last ends the sequence), to left-padded prompts."""
    tokenizer = make_tiny_tokenizer()
    prompts, responses = ["1+2=", "9="], [["3"], ["9", "<eos>"]]
    width, length = 5, 3
    ids = torch.zeros(2, width + length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        tokens = tokenizer(prompt)["input_ids"]
        tokens += tokenizer.convert_tokens_to_ids(response)
        start = width - len(prompt)
        ids[row, start : start + len(tokens)] = torch.tensor(tokens)
        mask[row, start : start + len(tokens)] = 1
    columns = {
        "data_source": np.array(["openai/gsm8k", "own"], dtype=object),
        "uid": np.array(["validation-0-0", "validation-0-1"], dtype=object),
        "reward_model": np.array([{"style": "rule", "ground_truth": "3"}, None], dtype=object),
    }
    tensors = {
        "prompts": ids[:, :width],
        "responses": ids[:, width:],
        "attention_mask": mask,
        "token_level_scores": torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.25, 0.25]]),
    }
    return DataProto.from_dict(tensors=tensors, non_tensors=columns)


def test_a_row_has_texts_labels_score_and_what_the_scorer_gave(batch: DataProto) -> None:
    info = {
        "acc": np.array([1.0, np.nan], dtype=np.float32),
        "pred": np.array(["3", None], dtype=object),
        "extracted": np.array([True, False]),
        "score": np.array([9.0, 9.0]),
    }
    first, second = generation_rows(batch, make_tiny_tokenizer(), step=7, info=info)
    assert first == {
        "step": 7,
        "data_source": "openai/gsm8k",
        "uid": "validation-0-0",
        "prompt": "1+2=",
        "response": "3",
        "ground_truth": "3",
        "score": 1.0,
        "acc": 1.0,
        "pred": "3",
        "extracted": True,
    }
    assert (second["prompt"], second["response"], second["ground_truth"]) == ("9=", "9", None)
    assert (second["score"], second["acc"], second["pred"], second["extracted"]) == (0.5, None, None, False)


def test_scores_and_the_name_of_the_source_column_may_be_given(batch: DataProto) -> None:
    rows = generation_rows(batch, make_tiny_tokenizer(), step=1, scores=torch.ones(2, 3), reward_fn_key="uid")
    assert [(row["score"], row["data_source"]) for row in rows] == [(3.0, "validation-0-0"), (3.0, "validation-0-1")]


def test_a_dump_is_one_line_per_response_and_replaces_that_of_the_same_step(batch: DataProto, tmp_path: Path) -> None:
    rows = generation_rows(batch, make_tiny_tokenizer(), step=7)
    dump_generations(tmp_path / "deep" / "folder", 7, [{"old": True}] * 5)
    path = dump_generations(tmp_path / "deep" / "folder", 7, rows)
    assert path == tmp_path / "deep" / "folder" / "7.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    assert [file.name for file in path.parent.iterdir()] == ["7.jsonl"]


def test_any_text_and_any_value_becomes_one_line(tmp_path: Path) -> None:
    row = {"response": 'two\nlines "quoted" 数学 \u2028', "ratio": float("inf"), "array": np.arange(2), "odd": "\ud800"}
    path = dump_generations(tmp_path, 1, [row, row])
    lines = path.read_text(encoding="utf-8").split("\n")
    assert len(lines) == 3
    assert lines[-1] == ""
    assert "数学" in lines[0]  # to be found by searching the file
    read = json.loads(lines[0])
    assert read == {"response": row["response"], "ratio": "Infinity", "array": [0, 1], "odd": "?"}


def test_a_dump_that_fails_on_the_way_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dump_generations(tmp_path, 1, [{"n": 1}])

    def fail(_: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files, "sync", fail)
    with pytest.raises(OSError, match="disk full"):
        dump_generations(tmp_path, 1, [{"n": 2}])
    assert json.loads(path.read_text()) == {"n": 1}


def test_a_conversation_is_told_turn_by_turn(batch: DataProto) -> None:
    ids = torch.tensor([[12, 1, 9, 8, 10], [11, 1, 0, 0, 0]])
    attended = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    talk = DataProto.from_dict(
        tensors={
            "prompts": batch.batch["prompts"],
            "responses": ids,
            "attention_mask": torch.cat([batch.batch["attention_mask"][:, :5], attended], dim=1),
            "response_mask": torch.tensor([[1, 1, 0, 0, 1], [1, 1, 0, 0, 0]]),
            "turn_scores": torch.tensor([[0, 0.5, 0, 0, 2.0], [0, 0, 0, 0, 0]]),
            "conversation": torch.tensor([0, 1]),
            "token_level_scores": torch.ones(2, 5),
        }
    )
    first, second = generation_rows(talk, make_tiny_tokenizer(), step=1)
    assert first["turns"] == [
        {"by": "model", "text": "9<eos>", "tokens": 2, "reward": 0.5},
        {"by": "read", "text": "65", "tokens": 2},
        {"by": "model", "text": "7", "tokens": 1, "reward": 2.0},
    ]
    assert [turn["by"] for turn in second["turns"]] == ["model"]
