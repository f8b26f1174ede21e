"""Preparation of public datasets: which files, which rows, what is said about the others."""

from __future__ import annotations

import gzip
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.config.data import DataConfig
from paceline.data import RLHFDataset
from paceline.data.sources import SOURCES, find_files, get_source, prepare
from paceline.data.sources.full_hh_rlhf import split_dialogue
from paceline.data.sources.hellaswag import clean
from paceline.errors import DataError
from paceline.rewards import scorers
from paceline.rewards.scorers import _select_rm_score_fn, known_sources
from tests.tiny import make_tiny_tokenizer

GSM8K = {"question": "What is 600 + 600?", "answer": "600 + 600 = <<600+600=1200>>1200\n#### 1,200"}
MATH = {
    "problem": "Halve $x=1$.",
    "solution": r"Not \boxed{2}, but $\boxed{\frac{1}{2}}$.",
    "level": "Level 1",
    "type": "Algebra",
}
ENDINGS = ["wraps a pair of skis.", "rips level tiles off.", "holds a cube.", "starts pulling up roofing."]
HELLASWAG = {
    "ind": 24,
    "activity_label": "Roof shingle removal",
    "ctx": "A man is sitting on a roof. he",
    "endings": ENDINGS,
    "label": 3,
}
OPENING = "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: What is 2+2?"
ORIGINAL_HH = {"chosen": f"{OPENING}\n\nAssistant: It is 4.", "rejected": f"{OPENING}\n\nAssistant: Who cares?"}
DAHOAS_HH = {
    "prompt": f"{OPENING}\n\nAssistant:",
    "response": " It is 4.",
    "chosen": " It is 4.",
    "rejected": " Who cares?",
}
HH_PROMPT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "What is 2+2?"},
]
RECORDS = {"gsm8k": GSM8K, "math": MATH, "hellaswag": HELLASWAG, "full_hh_rlhf": ORIGINAL_HH}


def write_lines(path: Path, records: list[Any]) -> Path:
    """Records as jsonl, gzipped if the name says so; bytes are written as they are."""
    lines = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]
    data = b"".join(line + b"\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def run(name: str, path: Path, output: Path, purpose: str = "rl", on_error: str = "stop", **options: Any) -> dict:
    source = get_source(name, purpose)
    files = find_files(path, preferred=source.preferred, ignored=source.ignored, output=output, **options)
    return prepare(source, files, output, on_error)


def prepared(name: str, records: list[Any], tmp_path: Path, split: str = "train", **options: Any) -> list[dict]:
    run(name, write_lines(tmp_path / "in" / f"{split}.jsonl", records), tmp_path / "out", **options)
    return pq.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist()


def test_gsm8k_row(tmp_path):
    [row] = prepared("gsm8k", [GSM8K], tmp_path)
    [message] = row.pop("prompt")
    assert message["role"] == "user"
    assert message["content"].startswith("What is 600 + 600?\n")
    assert "####" in message["content"]
    assert row == {
        "data_source": "openai/gsm8k",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1200"},
        "extra_info": {"split": "train", "index": 0, **GSM8K},
    }


def test_math_row_has_the_last_boxed_answer(tmp_path):
    [row] = prepared("math", [MATH], tmp_path)
    assert row["data_source"] == "DigitalLearningGmbH/MATH-lighteval"
    assert row["reward_model"] == {"style": "rule", "ground_truth": r"\frac{1}{2}"}
    assert row["extra_info"]["level"] == "Level 1"
    assert r"\boxed{}" in row["prompt"][0]["content"]


def test_math_takes_rows_without_level_and_type(tmp_path):
    [row] = prepared("math", [{key: MATH[key] for key in ("problem", "solution")}], tmp_path)
    assert row["extra_info"]["level"] is None


def test_hellaswag_row_shows_lettered_endings_and_has_the_letter(tmp_path):
    rows = prepared("hellaswag", [HELLASWAG, {**HELLASWAG, "label": "1"}], tmp_path)
    content = rows[0]["prompt"][0]["content"]
    assert content.startswith("Roof shingle removal: A man is sitting on a roof. he ...\n")
    assert f"\nA. {ENDINGS[0]}\nB. {ENDINGS[1]}\nC. {ENDINGS[2]}\nD. {ENDINGS[3]}\n" in content
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["D", "B"]
    assert rows[0]["extra_info"]["endings"] == ENDINGS


def test_marks_of_wikihow_pages_are_taken_out():
    assert clean("[header] How to bake [title] Heat it. [step] Wait. [title] Eat [insert name].") == (
        "How to bake. Heat it. Wait. Eat [insert name]."
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


def test_rows_without_public_labels_or_answers_are_dropped_and_counted(tmp_path):
    write_lines(tmp_path / "hs" / "hellaswag_val.jsonl", [HELLASWAG])
    write_lines(tmp_path / "hs" / "hellaswag_test.jsonl", [{**HELLASWAG, "label": ""}, {**HELLASWAG, "label": None}])
    reports = run("hellaswag", tmp_path / "hs", tmp_path / "out")
    assert list(reports) == ["validation", "test"]
    assert dict(reports["test"].dropped) == {"no label: those of the test split are not public": 2}
    assert reports["test"].path is None
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["validation.parquet"]

    path = write_lines(tmp_path / "train.jsonl", [MATH, {**MATH, "solution": r"It is $\boxed{}$."}])
    assert dict(run("math", path, tmp_path / "out")["train"].dropped) == {r"the solution's '\boxed' is empty": 1}


def without(record: dict, key: str) -> dict:
    return {name: value for name, value in record.items() if name != key}


MALFORMED = [
    ("gsm8k", b'{"question": ', "bad JSON"),
    ("gsm8k", b"\xff\xfe{}", "bad JSON"),
    ("gsm8k", ["a"], "no JSON object"),
    ("gsm8k", without(GSM8K, "answer"), "no field 'answer'"),
    ("gsm8k", {**GSM8K, "question": None}, "no field 'question'"),
    ("gsm8k", {**GSM8K, "question": 3}, "'question' is no text"),
    ("gsm8k", {**GSM8K, "question": "  "}, "'question' is empty"),
    ("gsm8k", {**GSM8K, "question": "\ud800"}, "'question' is no valid Unicode"),
    ("gsm8k", {**GSM8K, "answer": "It is 3."}, "no '####' in 'answer'"),
    ("gsm8k", {**GSM8K, "answer": "#### many"}, "no number after '####'"),
    ("math", without(MATH, "problem"), "no field 'problem'"),
    ("math", {**MATH, "solution": "It is 3."}, r"no '\boxed' in 'solution'"),
    ("math", {**MATH, "solution": r"It is \boxed{3"}, r"no '\boxed' in 'solution'"),
    ("hellaswag", without(HELLASWAG, "ctx"), "no field 'ctx'"),
    ("hellaswag", without(HELLASWAG, "label"), "no field 'label'"),
    ("hellaswag", {**HELLASWAG, "label": 4}, "'label' is out of range"),
    ("hellaswag", {**HELLASWAG, "label": -1}, "'label' is out of range"),
    ("hellaswag", {**HELLASWAG, "label": ""}, "'label' is no number"),
    ("hellaswag", {**HELLASWAG, "label": True}, "'label' is no number"),
    ("hellaswag", without(HELLASWAG, "endings"), "no field 'endings'"),
    ("hellaswag", {**HELLASWAG, "endings": ENDINGS[:3]}, "'endings' is no list of four"),
    ("hellaswag", {**HELLASWAG, "endings": [*ENDINGS[:3], 4]}, "'endings' is no text"),
    ("hellaswag", {**HELLASWAG, "endings": [*ENDINGS[:3], "[step]"]}, "'endings' has an empty one"),
    ("full_hh_rlhf", without(ORIGINAL_HH, "chosen"), "no field 'chosen'"),
    ("full_hh_rlhf", {**ORIGINAL_HH, "chosen": "Hello"}, "no dialogue of 'Human:' and 'Assistant:'"),
]


@pytest.mark.parametrize(("name", "bad", "reason"), MALFORMED)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_malformed_row_is_reported_with_file_and_line(tmp_path, caplog, name, bad, reason, suffix):
    good = RECORDS[name]
    path = write_lines(tmp_path / f"train{suffix}", [good, b"", bad, good])
    output = tmp_path / "out"
    with pytest.raises(DataError) as error:
        run(name, path, output)
    assert f"{path}:3: {reason}" in str(error.value)
    assert "--on-error skip" in str(error.value)
    assert list(output.iterdir()) == []

    with caplog.at_level(logging.WARNING):
        report = run(name, path, output, on_error="skip")["train"]
    assert f"{path}:3: {reason}" in caplog.text
    assert (report.read, report.kept, dict(report.dropped)) == (3, 2, {reason: 1})
    rows = pq.read_table(report.path).to_pylist()
    assert [row["extra_info"]["index"] for row in rows] == [0, 2]


def test_a_malformed_pair_is_found_where_pairs_are_needed(tmp_path):
    path = write_lines(tmp_path / "train.jsonl", [without(ORIGINAL_HH, "rejected")])
    assert run("full_hh_rlhf", path, tmp_path / "out", "sft")["train"].kept == 1
    with pytest.raises(DataError, match=r"train\.jsonl:1: no field 'rejected': the row has chosen"):
        run("full_hh_rlhf", path, tmp_path / "out", "rm")


def test_a_gzip_file_that_is_cut_off_is_reported_with_the_line(tmp_path):
    records = [{**GSM8K, "question": f"{os.urandom(2000).hex()}?"} for _ in range(50)]
    path = write_lines(tmp_path / "train.jsonl.gz", records)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=r"train\.jsonl\.gz:\d+: bad gzip") as error:
        run("gsm8k", path, tmp_path / "out")
    line = int(str(error.value).split(".gz:")[1].split(":")[0])
    assert 1 < line < 50
    report = run("gsm8k", path, tmp_path / "out", on_error="skip")["train"]
    assert report.kept == line - 1 == pq.read_metadata(report.path).num_rows
    assert dict(report.dropped) == {"bad gzip": 1}


@pytest.mark.parametrize("name", ["train.jsonl.gz", "train.parquet"])
def test_a_file_that_is_not_what_its_name_says_is_reported(tmp_path, name):
    (tmp_path / name).write_bytes(b'{"question": "a"}\n' * 10)
    with pytest.raises(DataError, match=r"train\.(jsonl\.gz:1|parquet, row 1): bad (gzip|parquet)"):
        run("gsm8k", tmp_path / name, tmp_path / "out")


def test_parquet_in_and_a_bad_row_named_by_its_number(tmp_path):
    path = tmp_path / "in" / "data" / "train-00000-of-00001.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist([GSM8K, {"question": "Why?", "answer": "Because."}]), path)
    with pytest.raises(DataError, match=r"train-00000-of-00001\.parquet, row 2: no '####'"):
        run("gsm8k", tmp_path / "in", tmp_path / "out")
    assert run("gsm8k", tmp_path / "in", tmp_path / "out", on_error="skip")["train"].kept == 1


def test_many_malformed_rows_of_a_kind_do_not_flood_the_log(tmp_path, caplog):
    path = write_lines(tmp_path / "train.jsonl", [GSM8K, *[{"question": "a"}] * 500])
    with caplog.at_level(logging.WARNING):
        report = run("gsm8k", path, tmp_path / "out", on_error="skip")["train"]
    assert dict(report.dropped) == {"no field 'answer'": 500}
    assert len(caplog.records) == 21


def test_files_of_a_folder_are_joined_by_split_in_the_order_of_their_names(tmp_path):
    for number, name in enumerate(
        ["a/train.jsonl.gz", "b/train.jsonl", "b/test.jsonl", "c_valid.jsonl", "d/dev/x.jsonl"]
    ):
        write_lines(tmp_path / "in" / name, [{**GSM8K, "question": str(number)}])
    reports = run("gsm8k", tmp_path / "in", tmp_path / "out")
    assert {split: (report.kept, report.path.name) for split, report in reports.items()} == {
        "train": (2, "train.parquet"),
        "validation": (2, "validation.parquet"),
        "test": (1, "test.parquet"),
    }
    rows = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert [(row["extra_info"]["question"], row["extra_info"]["index"]) for row in rows] == [("0", 0), ("1", 1)]


def test_files_that_hold_the_same_rows_again_or_no_split_are_left_out(tmp_path, caplog):
    folder = tmp_path / "in"
    for name in ("train.jsonl", "train_socratic.jsonl", "example_model_solutions.jsonl", ".cache/train.jsonl"):
        write_lines(folder / name, [GSM8K])
    with caplog.at_level(logging.INFO):
        assert run("gsm8k", folder, tmp_path / "out")["train"].read == 1
    assert "left out train_socratic.jsonl" in caplog.text
    assert "left out example_model_solutions.jsonl, whose names tell no split" in caplog.text

    for name in ("data/train-00000-of-00001.jsonl", "algebra/train-00000-of-00001.jsonl"):
        write_lines(tmp_path / "math" / name, [MATH])
    assert run("math", tmp_path / "math", tmp_path / "out")["train"].read == 1


def test_the_same_name_in_two_formats_is_refused(tmp_path):
    for name in ("train.jsonl", "train.jsonl.gz"):
        write_lines(tmp_path / "in" / name, [GSM8K])
    with pytest.raises(DataError, match="same rows in two formats"):
        run("gsm8k", tmp_path / "in", tmp_path / "out")


def test_a_name_without_a_split_takes_one_from_the_user(tmp_path):
    path = write_lines(tmp_path / "in" / "data.jsonl", [GSM8K])
    for given in (path, path.parent):
        with pytest.raises(DataError, match=r"data\.jsonl.* no split .*Set --split"):
            run("gsm8k", given, tmp_path / "out")
        assert list(run("gsm8k", given, tmp_path / "out", split="test")) == ["test"]


def test_a_name_with_two_splits_is_refused(tmp_path):
    with pytest.raises(DataError, match="more than one split: test, train"):
        run("gsm8k", write_lines(tmp_path / "train_test.jsonl", [GSM8K]), tmp_path / "out")


def test_a_missing_path_an_empty_folder_and_another_suffix_are_errors(tmp_path):
    with pytest.raises(DataError, match=r"no file or folder .*--hub"):
        find_files(tmp_path / "nothing")
    (tmp_path / "readme.txt").write_text("")
    with pytest.raises(DataError, match=r"it holds readme\.txt"):
        find_files(tmp_path)
    with pytest.raises(DataError, match=r"readme\.txt is no \.jsonl"):
        find_files(tmp_path / "readme.txt")


def test_the_output_is_neither_the_folder_of_the_originals_nor_read_as_one(tmp_path):
    path = write_lines(tmp_path / "train.jsonl", [GSM8K])
    with pytest.raises(DataError, match=r"holds the original train\.jsonl"):
        run("gsm8k", tmp_path, tmp_path)
    for _ in range(2):
        assert run("gsm8k", path.parent, tmp_path / "out")["train"].read == 1


def test_a_stop_leaves_the_files_of_an_earlier_preparation_as_they_were(tmp_path):
    output = tmp_path / "out"
    run("gsm8k", write_lines(tmp_path / "a" / "train.jsonl", [GSM8K]), output)
    before = (output / "train.parquet").read_bytes()
    write_lines(tmp_path / "b" / "test.jsonl", [GSM8K])
    write_lines(tmp_path / "b" / "train.jsonl", [GSM8K, {}])
    with pytest.raises(DataError):
        run("gsm8k", tmp_path / "b", output)
    assert [file.name for file in output.iterdir()] == ["train.parquet"]
    assert (output / "train.parquet").read_bytes() == before


def test_nothing_kept_is_an_error_with_the_reasons(tmp_path):
    with pytest.raises(DataError, match="2 rows: no field 'question'"):
        run("gsm8k", write_lines(tmp_path / "train.jsonl", [{}, {}]), tmp_path / "out", on_error="skip")
    with pytest.raises(DataError, match="the files are empty"):
        run("gsm8k", write_lines(tmp_path / "train.jsonl", []), tmp_path / "out")


def test_an_output_that_can_not_be_written_is_an_error(tmp_path):
    (tmp_path / "out").write_text("a file, no folder")
    with pytest.raises(DataError, match="can't be written"):
        run("gsm8k", write_lines(tmp_path / "in" / "train.jsonl", [GSM8K]), tmp_path / "out")


def test_rows_are_written_in_groups_while_files_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[prepare.__module__], "ROWS_PER_GROUP", 10)
    records = [{**GSM8K, "question": str(number)} for number in range(25)]
    run("gsm8k", write_lines(tmp_path / "train.jsonl", records), tmp_path / "out")
    metadata = pq.read_metadata(tmp_path / "out" / "train.parquet")
    assert [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)] == [10, 10, 5]


def test_progress_is_logged_while_a_file_is_read(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sys.modules[prepare.__module__], "_PROGRESS_SECONDS", -1.0)
    with caplog.at_level(logging.INFO):
        run("gsm8k", write_lines(tmp_path / "train.jsonl", [GSM8K] * 3), tmp_path / "out")
    assert "train.jsonl:2: train so far: 2 read, 2 kept" in caplog.text


def test_every_source_that_is_written_has_a_scorer():
    names = {name: source.data_sources for name, by_purpose in SOURCES.items() for source in by_purpose.values()}
    assert set(names.pop("full_hh_rlhf")) <= set(scorers.MODEL_SOURCES)
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


def test_prepared_dialogues_load_in_the_dataset(tmp_path):
    file = run("full_hh_rlhf", write_lines(tmp_path / "test.jsonl", [ORIGINAL_HH]), tmp_path / "out")["test"].path
    tokenizer = make_tiny_tokenizer()
    item = RLHFDataset(file, tokenizer, DataConfig(max_prompt_length=100))[0]
    text = tokenizer.decode(item["input_ids"][item["attention_mask"].bool()])
    assert text == "user: Hi\nassistant: Hello!\nuser: What is 2+2?\nassistant: "


class Hub(BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as serves one dataset."""

    COMMIT = "a" * 40
    FILES: dict[str, bytes] = {}  # noqa: RUF012 - filled once
    requested: list[str] = []  # noqa: RUF012

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        api, files = "/api/datasets/openai/gsm8k", f"/datasets/openai/gsm8k/resolve/{self.COMMIT}/"
        if path.startswith(f"{api}/revision/"):
            siblings = [{"rfilename": name} for name in self.FILES]
            answer = json.dumps({"_id": "1", "id": "openai/gsm8k", "sha": self.COMMIT, "siblings": siblings}).encode()
        elif path.startswith(f"{api}/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": "b" * 40} for name, data in self.FILES.items()
            ]
            answer = json.dumps(entries).encode()
        elif path.startswith(files) and path.removeprefix(files) in self.FILES:
            self.requested.append(path.removeprefix(files))
            answer = self.FILES[path.removeprefix(files)]
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.send_header("ETag", '"0123456789"')
        self.send_header("X-Repo-Commit", self.COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """The address of a hub that has openai/gsm8k."""
    pq.write_table(pa.Table.from_pylist([GSM8K]), tmp_path / "served.parquet")
    data = (tmp_path / "served.parquet").read_bytes()
    Hub.FILES = {
        f"{folder}/{split}-00000-of-00001.parquet": data
        for folder in ("main", "socratic")
        for split in ("train", "test")
    }
    Hub.FILES["README.md"] = b"# GSM8K"
    Hub.requested = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def run_with_hub(tmp_path: Path, endpoint: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: the hub's address is read once, at import."""
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))},
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    command = ["data", "gsm8k", *arguments, "--output", str(tmp_path / "out")]
    code = f"import sys; from paceline.cli import main; sys.exit(main({command!r}))"
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_dataset_comes_from_the_hub_by_name(tmp_path, hub):
    done = run_with_hub(tmp_path, hub, "--hub")
    assert done.returncode == 0, done.stderr
    assert sorted(set(Hub.requested)) == ["main/test-00000-of-00001.parquet", "main/train-00000-of-00001.parquet"]
    for split in ("train", "test"):
        assert pq.read_table(tmp_path / "out" / f"{split}.parquet").num_rows == 1

    unknown = run_with_hub(tmp_path, hub, "--hub", "nobody/nothing")
    assert unknown.returncode == 1
    assert "has no public dataset 'nobody/nothing'" in unknown.stderr


def test_without_a_network_the_error_says_what_to_do(tmp_path):
    done = run_with_hub(tmp_path, "http://127.0.0.1:9", "--hub")  # nothing listens there
    assert done.returncode == 1
    assert "openai/gsm8k can't be downloaded" in done.stderr
    assert "--input" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
