"""RLHFDataset: what is read, what is refused, and with which words."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from paceline.config import DataConfig
from paceline.data import RLHFDataset, collate_fn, make_dataloader
from paceline.errors import ConfigError, DataError
from paceline.protocol import DataProto
from tests.tiny import make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()
PAD = TOKENIZER.pad_token_id


def write(path: Path, **columns: list) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def config(**changes) -> DataConfig:
    return DataConfig(**{"max_prompt_length": 40, **changes})


def text_of(item: dict) -> str:
    return TOKENIZER.decode(item["input_ids"][item["attention_mask"].bool()])


def test_chat_goes_through_the_template_and_is_padded_on_the_left(tmp_path):
    item = RLHFDataset(write(tmp_path / "a.parquet", prompt=[chat("hi")]), TOKENIZER, config())[0]
    expected = "user: hi\nassistant: "
    assert text_of(item) == expected
    assert item["input_ids"].shape == item["attention_mask"].shape == item["position_ids"].shape == (40,)
    assert item["input_ids"][: 40 - len(expected)].eq(PAD).all()
    assert item["attention_mask"].tolist() == [0] * (40 - len(expected)) + [1] * len(expected)
    assert item["position_ids"].tolist() == [0] * (40 - len(expected)) + list(range(len(expected)))
    assert item["input_ids"].dtype == item["attention_mask"].dtype == item["position_ids"].dtype == torch.int64


def test_string_prompt_is_tokenised_as_it_is(tmp_path):
    item = RLHFDataset(write(tmp_path / "a.parquet", prompt=["2+2="]), TOKENIZER, config())[0]
    assert text_of(item) == "2+2="


def test_a_bare_string_gets_the_tokenizers_own_start_token_and_a_chat_does_not(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    string = RLHFDataset(write(tmp_path / "a.parquet", prompt=["hi"]), tokenizer, config())[0]
    templated = RLHFDataset(write(tmp_path / "b.parquet", prompt=[chat("hi")]), tokenizer, config())[0]
    assert text_of(string) == "<eos>hi"
    assert text_of(templated) == "user: hi\nassistant: "


@pytest.mark.parametrize("prompts", [["a", "b"], [chat("a"), chat("b")]])
@pytest.mark.parametrize("changes", [{}, {"keep_columns": []}, {"reward_fn_key": "scorer"}])
def test_prompt_is_the_only_required_column_and_index_counts_rows(tmp_path, prompts, changes):
    dataset = RLHFDataset(write(tmp_path / "a.parquet", prompt=prompts), TOKENIZER, config(**changes))
    assert set(dataset[0]) == {"input_ids", "attention_mask", "position_ids", "index"}
    assert [item["index"] for item in dataset] == [0, 1]
    assert [text_of(item)[-1] for item in dataset] == (["a", "b"] if prompts == ["a", "b"] else [" ", " "])
    assert dataset.column("data_source") == [None, None]
    (batch,) = make_dataloader(dataset, batch_size=2, shuffle=False, seed=0)
    assert len(DataProto.from_single_dict(batch)) == 2


def test_every_extra_column_is_kept_for_rewards(tmp_path):
    reward_model = {"style": "rule", "ground_truth": "4"}
    file = write(
        tmp_path / "a.parquet",
        prompt=[chat("2+2")],
        data_source=["openai/gsm8k"],
        reward_model=[reward_model],
        extra_info=[{"index": 7, "split": "train"}],
        difficulty=[0.5],
    )
    item = RLHFDataset(file, TOKENIZER, config())[0]
    assert item["data_source"] == "openai/gsm8k"
    assert item["reward_model"] == reward_model
    assert item["extra_info"] == {"index": 7, "split": "train"}
    assert item["difficulty"] == 0.5
    assert "prompt" not in item
    assert "raw_prompt" not in item


def test_ground_truths_are_found_by_prompt_with_their_place(tmp_path):
    labels = [{"style": "rule", "ground_truth": truth} for truth in ("a", None, "c")]
    first = write(tmp_path / "a.parquet", prompt=[chat("1"), chat("2 " * 50), chat("3")], reward_model=labels)
    second = write(tmp_path / "b.parquet", prompt=[chat("4")], reward_model=[labels[0]])
    data = RLHFDataset([first, second], TOKENIZER, config(filter_overlong_prompts=True))
    assert [data.ground_truth(item) for item in range(len(data))] == ["a", "c", "a"]
    assert [data.place(item) for item in range(3)] == [f"row 0 of {first}", f"row 2 of {first}", f"row 0 of {second}"]


def test_raw_chat_is_returned_when_asked_without_the_nulls_of_arrow(tmp_path):
    messages = [{"role": "system", "content": "s", "name": "n"}, {"role": "user", "content": "hi"}]
    file = write(tmp_path / "a.parquet", prompt=[messages])
    assert RLHFDataset(file, TOKENIZER, config(return_raw_chat=True))[0]["raw_prompt"] == messages


def test_several_files_globs_and_home_are_read_in_order(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "b1.parquet", prompt=["one"], level=[1])
    write(tmp_path / "b2.parquet", prompt=["two"], data_source=["x"])
    write(tmp_path / "a.parquet", prompt=[chat("three")])
    dataset = RLHFDataset(["~/b*.parquet", str(tmp_path / "a.parquet")], TOKENIZER, config())
    assert [text_of(item) for item in dataset] == ["one", "two", "user: three\nassistant: "]
    assert dataset.column("data_source") == [None, "x", None]
    batch = collate_fn(list(dataset))
    assert list(batch["level"]) == [1, None, None]
    assert list(batch["index"]) == [0, 1, 2]


def test_batch_fits_dataproto(tmp_path):
    file = write(
        tmp_path / "a.parquet", prompt=["a", "bb"], reward_model=[{"ground_truth": "1"}] * 2, tags=[["x"], ["y"]]
    )
    data = DataProto.from_single_dict(collate_fn(list(RLHFDataset(file, TOKENIZER, config()))))
    assert len(data) == 2
    assert data.batch["input_ids"].shape == (2, 40)
    assert data.non_tensor_batch["reward_model"][1] == {"ground_truth": "1"}
    assert data.non_tensor_batch["tags"].shape == (2,)


@pytest.mark.parametrize(("max_samples", "texts"), [(1, "a"), (2, "aa"), (3, "aab"), (4, "aabb"), (9, "aabbcc")])
def test_max_samples_takes_the_first_rows_across_files(tmp_path, max_samples, texts):
    for number, name in enumerate("abc"):
        write(tmp_path / f"{name}.parquet", prompt=[name, name], **{f"only_{name}": [number, number]})
    dataset = RLHFDataset(str(tmp_path / "*.parquet"), TOKENIZER, config(), max_samples)
    assert [text_of(item) for item in dataset] == list(texts)
    assert [item.get("only_b") for item in dataset] == [1 if name == "b" else None for name in texts]
    assert dataset.column("only_b") == [item.get("only_b") for item in dataset]


def test_max_samples_ends_inside_a_row_group_or_at_its_end(tmp_path):
    pq.write_table(pa.table({"prompt": list("abcdefg")}), tmp_path / "a.parquet", row_group_size=3)
    for count in range(1, 8):
        dataset = RLHFDataset(tmp_path / "a.parquet", TOKENIZER, config(), max_samples=count)
        assert "".join(text_of(item) for item in dataset) == "abcdefg"[:count]


def test_filter_drops_overlong_prompts_by_their_templated_length_and_says_how_many(tmp_path, caplog):
    around = len("user: \nassistant: ")
    prompts = [chat("x" * (40 - around)), chat("x" * (41 - around)), chat("short")]
    file = write(tmp_path / "a.parquet", prompt=prompts, level=[1, 2, 3])
    with caplog.at_level(logging.INFO):
        dataset = RLHFDataset(file, TOKENIZER, config(filter_overlong_prompts=True))
    assert "kept 2 of 3 prompts; 1 are longer than data.max_prompt_length=40" in caplog.text
    assert [(item["index"], item["level"]) for item in dataset] == [(0, 1), (2, 3)]
    assert dataset.column("level") == [1, 3]


def test_all_prompts_overlong_is_an_error_with_their_lengths(tmp_path):
    file = write(tmp_path / "a.parquet", prompt=["x" * 50, "x" * 60])
    with pytest.raises(DataError, match=r"All 2 prompts.*row 1 of .*a\.parquet, has 60 tokens, the shortest 50"):
        RLHFDataset(file, TOKENIZER, config(filter_overlong_prompts=True))


def test_overlong_prompt_is_an_error_at_the_start_that_names_row_length_and_remedy(tmp_path):
    files = [write(tmp_path / "a.parquet", prompt=["ok"]), write(tmp_path / "b.parquet", prompt=["ok", "x" * 41])]
    with pytest.raises(DataError) as error:
        RLHFDataset(files, TOKENIZER, config())
    for part in (
        "1 of 3 prompts",
        "max_prompt_length=40",
        "row 1 of",
        "b.parquet",
        "41 tokens",
        "filter_overlong",
        "left",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(("truncation", "kept"), [("left", "56789"), ("right", "01234"), ("middle", "01789")])
def test_truncation_cuts_where_it_says(tmp_path, truncation, kept):
    file = write(tmp_path / "a.parquet", prompt=["0123456789", "ab"])
    dataset = RLHFDataset(file, TOKENIZER, config(max_prompt_length=5, truncation=truncation))
    assert [text_of(item) for item in dataset] == [kept, "ab"]


def test_unknown_truncation_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="truncation='up'"):
        RLHFDataset(write(tmp_path / "a.parquet", prompt=["x" * 50]), TOKENIZER, config(truncation="up"))


def test_missing_prompt_column_names_the_file_and_its_columns(tmp_path):
    file = write(tmp_path / "a.parquet", question=["q"], answer=["a"])
    with pytest.raises(DataError, match=r"a\.parquet has no column 'prompt'; it has question, answer.*prompt_key"):
        RLHFDataset(file, TOKENIZER, config())
    assert text_of(RLHFDataset(file, TOKENIZER, config(prompt_key="question"))[0]) == "q"


@pytest.mark.parametrize(
    "prompts",
    [
        ["fine", None],
        [chat("fine"), []],
        [chat("fine"), None],
        [chat("fine"), [{"role": "user", "content": None}]],
        [[{"role": "user", "content": "fine"}], [{"role": None, "content": "no role"}]],
    ],
)
def test_malformed_prompt_names_file_and_row(tmp_path, prompts):
    with pytest.raises(DataError, match=r"row 1 of .*bad\.parquet"):
        RLHFDataset(write(tmp_path / "bad.parquet", prompt=prompts), TOKENIZER, config())


def test_prompts_that_are_neither_chats_nor_strings_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"row 0 of .* is 5\. Column .*string, or a chat"):
        RLHFDataset(write(tmp_path / "a.parquet", prompt=[5]), TOKENIZER, config())


def test_prompt_without_tokens_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"row 1 of .* is empty"):
        RLHFDataset(write(tmp_path / "a.parquet", prompt=["a", ""]), TOKENIZER, config())


def test_chat_without_a_chat_template_says_what_to_do(tmp_path):
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"no chat template.*instruction-tuned"):
        RLHFDataset(write(tmp_path / "a.parquet", prompt=[chat("hi")]), tokenizer, config())


def test_a_template_gets_the_arguments_of_the_configuration(tmp_path):
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = "{{ 'yes' if thinking else 'no' }}"
    file = write(tmp_path / "a.parquet", prompt=[chat("hi")])
    plain, thinking = (
        RLHFDataset(file, tokenizer, config(apply_chat_template_kwargs=kwargs)) for kwargs in ({}, {"thinking": True})
    )
    shown = [tokenizer.decode(d[0]["input_ids"], skip_special_tokens=True) for d in (plain, thinking)]
    assert shown == ["no", "yes"]


def test_a_template_of_the_configuration_takes_the_place_of_the_tokenizers(tmp_path):
    tokenizer = make_tiny_tokenizer()
    file = write(tmp_path / "a.parquet", prompt=[chat("hi")])
    for own in (tokenizer.chat_template, None):
        tokenizer.chat_template = own
        data = RLHFDataset(file, tokenizer, config(apply_chat_template_kwargs={"chat_template": "mine"}))
        assert text_of(data[0]) == "mine"


def test_a_template_that_rejects_a_chat_names_the_row(tmp_path):
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    )
    prompts = [chat("hi"), [{"role": "system", "content": "s"}]]
    with pytest.raises(DataError, match=r"row 1 of .*no system role"):
        RLHFDataset(write(tmp_path / "a.parquet", prompt=prompts), tokenizer, config())


def test_missing_file_empty_file_and_broken_file_are_named(tmp_path):
    with pytest.raises(DataError, match=r"no data file .*nothing\*\.parquet"):
        RLHFDataset(str(tmp_path / "nothing*.parquet"), TOKENIZER, config())
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    with pytest.raises(DataError, match=r"no prompts in .*empty\.parquet"):
        RLHFDataset(tmp_path / "empty.parquet", TOKENIZER, config())
    (tmp_path / "broken.parquet").write_text("not parquet")
    with pytest.raises(DataError, match=r"broken\.parquet is not a parquet file"):
        RLHFDataset(tmp_path / "broken.parquet", TOKENIZER, config())


def test_a_column_that_the_trainer_fills_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"column 'responses'.*Rename"):
        RLHFDataset(write(tmp_path / "a.parquet", prompt=["a"], responses=["b"]), TOKENIZER, config())


def test_index_out_of_range_and_negative_index(tmp_path):
    dataset = RLHFDataset(write(tmp_path / "a.parquet", prompt=["a", "b"]), TOKENIZER, config())
    assert text_of(dataset[-1]) == "b"
    with pytest.raises(IndexError):
        dataset[2]


def test_dataset_survives_pickling(tmp_path):
    dataset = RLHFDataset(write(tmp_path / "a.parquet", prompt=["a"], level=[3]), TOKENIZER, config())
    copy = pickle.loads(pickle.dumps(dataset))
    assert text_of(copy[0]) == "a"
    assert copy[0]["level"] == 3
