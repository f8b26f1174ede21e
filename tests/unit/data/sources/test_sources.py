"""Preparation of public datasets: which files, which rows, what is said about the others."""

from __future__ import annotations

import pytest

from paceline.config import DataConfig
from paceline.data import RLHFDataset
from paceline.data.sources import SOURCES, get_source
from paceline.errors import DataError
from paceline.rewards.by_source import MODEL_SOURCES, _select_rm_score_fn, known_sources
from tests.tiny import make_tiny_tokenizer
from tests.unit.data.sources.records import (
    ENDINGS,
    GSM8K,
    MATH,
    RECORDS,
    run,
    write_lines,
)


def test_every_source_that_is_written_has_a_scorer():
    names = {name: source.data_sources for name, by_purpose in SOURCES.items() for source in by_purpose.values()}
    assert set(names.pop("full_hh_rlhf")) <= set(MODEL_SOURCES)
    assert {name for by_name in names.values() for name in by_name} <= set(known_sources())


def test_another_known_name_can_be_chosen_and_an_unknown_one_not():
    assert get_source("math", data_source="lighteval/MATH").data_source == "lighteval/MATH"
    with pytest.raises(DataError, match="lighteval/MATH, for which there are rewards"):
        get_source("math", data_source="mine")
    with pytest.raises(DataError, match="there is for gsm8k, math"):
        get_source("gsm9k")
    with pytest.raises(DataError, match="only for rl"):
        get_source("gsm8k", "rm")


@pytest.mark.parametrize(
    ("name", "response"),
    [
        ("gsm8k", GSM8K["answer"]),
        ("math", MATH["solution"]),
        ("hellaswag", "Answer: D"),
        ("hellaswag", ENDINGS[3]),
    ],
)
def test_prepared_rows_load_in_the_dataset_and_their_own_answers_score_1(tmp_path, name, response):
    path = write_lines(tmp_path / "in" / "train.jsonl.gz", [RECORDS[name]] * 3)
    file = run(name, path, tmp_path / "out")["train"].path
    dataset = RLHFDataset(file, make_tiny_tokenizer(), DataConfig(max_prompt_length=512))
    assert len(dataset) == 3
    item = dataset[0]
    score = _select_rm_score_fn(item["data_source"])
    ground_truth = item["reward_model"]["ground_truth"]
    assert score(solution_str=response, ground_truth=ground_truth, extra_info=item["extra_info"]) == 1.0
    assert score(solution_str="#### 7 or (A)", ground_truth=ground_truth, extra_info=item["extra_info"]) == 0.0
