"""Prompts are tokenised once: what the cache finds again, what it must not, and that it never stops a run."""

from __future__ import annotations

import logging
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from paceline.config import DataConfig
from paceline.data import RLHFDataset, token_cache
from paceline.data.token_cache import cache_folder, cache_key, load_tokens, save_tokens
from paceline.errors import DataError
from tests.tiny import make_tiny_tokenizer

PROMPTS = ["one", "two plus three", "four"]
CHATS = [[{"role": "user", "content": text}] for text in PROMPTS]


@pytest.fixture
def tokenizer():
    """A new one: tests change it."""
    return make_tiny_tokenizer()


@pytest.fixture
def file(tmp_path) -> Path:
    return write(tmp_path / "prompts.parquet", PROMPTS)


@pytest.fixture(autouse=True)
def logged(caplog) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


def write(path: Path, prompts: list, **options) -> Path:
    pq.write_table(pa.table({"prompt": prompts}), path, **options)
    return path


def read(file: Path | list[Path], tokenizer, max_samples: int = -1, **changes) -> list[list[int]]:
    dataset = RLHFDataset(file, tokenizer, DataConfig(**{"max_prompt_length": 60, **changes}), max_samples)
    return [item["input_ids"][item["attention_mask"].bool()].tolist() for item in dataset]


def was_cached(caplog) -> bool:
    """Whether the last dataset came from the cache."""
    (message,) = [text for text in caplog.messages if text.startswith(("took the tokens of", "tokenised"))]
    caplog.clear()
    return message.startswith("took")


@pytest.mark.parametrize("prompts", [PROMPTS, CHATS])
def test_the_second_time_tokens_come_from_the_cache(tmp_path, cache, logged, tokenizer, prompts, monkeypatch):
    file = write(tmp_path / "a.parquet", prompts)
    first = read(file, tokenizer)
    assert [PROMPTS[row] in tokenizer.decode(ids) for row, ids in enumerate(first)] == [True] * 3
    assert f"tokenised 3 prompts, cached for the next run in {cache}" in logged.text
    monkeypatch.setattr(RLHFDataset, "_tokenise", None)
    assert read(file, tokenizer) == first
    assert f"took the tokens of 3 prompts from the cache in {cache}" in logged.text
    assert [path.suffix for path in cache.iterdir()] == [".npz"]


def test_length_limits_are_applied_to_what_the_cache_has(file, cache, logged, tokenizer):
    whole = read(file, tokenizer)
    logged.clear()
    assert read(file, tokenizer, max_prompt_length=4, truncation="left") == [ids[-4:] for ids in whole]
    assert was_cached(logged)
    kept = read(file, tokenizer, max_prompt_length=4, filter_overlong_prompts=True)
    assert kept == [ids for ids in whole if len(ids) <= 4]
    with pytest.raises(DataError, match=r"1 of 3 prompts are longer .* row 1 of"):
        read(file, tokenizer, max_prompt_length=4)


def test_other_files_with_the_same_prompts_share_the_tokens(tmp_path, file, cache, logged, tokenizer):
    read(file, tokenizer)
    logged.clear()
    longer = write(tmp_path / "b.parquet", [*PROMPTS, "five"], row_group_size=2, compression="zstd")
    read(longer, tokenizer, max_samples=3)
    assert was_cached(logged)


@pytest.mark.parametrize("prompts", [[*PROMPTS[:2], "five"], PROMPTS[:2], PROMPTS[::-1], [*PROMPTS, "five"], CHATS])
def test_other_prompts_are_tokenised(tmp_path, file, cache, logged, tokenizer, prompts):
    read(file, tokenizer)
    logged.clear()
    tokens = read(write(tmp_path / "b.parquet", prompts), tokenizer)
    assert not was_cached(logged)
    assert tokens == read(tmp_path / "b.parquet", tokenizer, cache_dir="")


def test_prompts_stored_as_categories_are_told_apart(tokenizer):
    """Their batches hold numbers; the texts are elsewhere."""
    one, other = (pa.chunked_array([pa.array(texts).dictionary_encode()]) for texts in (["a", "b"], ["a", "c"]))
    assert cache_key([one], tokenizer) != cache_key([other], tokenizer)


def test_arguments_of_the_template_are_part_of_the_key(tokenizer):
    prompts = [pa.chunked_array([["a"]])]
    keys = [cache_key(prompts, tokenizer, kwargs) for kwargs in (None, {}, {"a": 1}, {"a": 2})]
    assert keys[0] == keys[1] == cache_key(prompts, tokenizer)
    assert len(set(keys)) == 3


def change_template(tokenizer):
    tokenizer.chat_template += "!"


def change_special_token(tokenizer):
    tokenizer.pad_token = "<unk>"


def change_vocabulary(tokenizer):
    tokenizer.add_tokens(["two"])


def change_splitting(tokenizer):
    tokenizer.split_special_tokens = True


def change_class(tokenizer):
    tokenizer.__class__ = PreTrainedTokenizerFast


CHANGES = [change_template, change_special_token, change_vocabulary, change_splitting, change_class]


@pytest.mark.parametrize("change", CHANGES)
def test_another_tokenizer_is_told_apart(tokenizer, change):
    columns = [pa.chunked_array([CHATS])]
    before = cache_key(columns, tokenizer)
    change(tokenizer)
    assert cache_key(columns, tokenizer) not in (before, None)


def test_library_and_format_versions_are_part_of_the_key(tokenizer, monkeypatch):
    columns = [pa.chunked_array([PROMPTS])]
    keys = {cache_key(columns, tokenizer)}
    monkeypatch.setattr(token_cache.transformers, "__version__", "0")
    keys.add(cache_key(columns, tokenizer))
    monkeypatch.setattr(token_cache.tokenizers, "__version__", "0")
    keys.add(cache_key(columns, tokenizer))
    monkeypatch.setattr(token_cache, "_FORMAT", 0)
    keys.add(cache_key(columns, tokenizer))
    assert len(keys) == 4


def test_what_earlier_calls_left_in_the_tokenizer_makes_no_difference(tokenizer):
    columns = [pa.chunked_array([PROMPTS])]
    before = cache_key(columns, tokenizer)
    tokenizer(PROMPTS, padding=True, truncation=True, max_length=5)
    assert tokenizer.backend_tokenizer.truncation is not None
    assert cache_key(columns, tokenizer) == before


def test_a_template_with_the_date_is_tokenised_anew_on_another_day(tokenizer, monkeypatch):
    class Tomorrow(token_cache.datetime.date):
        @classmethod
        def today(cls):
            return cls(2999, 1, 1)

    columns = [pa.chunked_array([CHATS])]
    plain = cache_key(columns, tokenizer)
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + tokenizer.chat_template
    dated = cache_key(columns, tokenizer)
    monkeypatch.setattr(token_cache.datetime, "date", Tomorrow)
    assert cache_key(columns, tokenizer) != dated
    tokenizer.chat_template = make_tiny_tokenizer().chat_template
    assert cache_key(columns, tokenizer) == plain


def test_a_tokenizer_with_code_of_its_own_is_not_cached(file, cache, logged, tokenizer):
    class MyTokenizer(type(tokenizer)):
        pass

    tokenizer.__class__ = MyTokenizer
    assert len(read(file, tokenizer)) == 3
    assert "tokenised 3 prompts, without a cache: MyTokenizer has code of its own" in logged.text
    assert not cache.exists()


def test_a_tokenizer_with_python_parts_is_not_cached(tokenizer):
    from tokenizers.pre_tokenizers import PreTokenizer

    class Splitter:
        def pre_tokenize(self, text) -> None:
            text.split(lambda _, part: [part])

    tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(Splitter())
    assert cache_key([pa.chunked_array([PROMPTS])], tokenizer) is None


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PACELINE_CACHE", "~/elsewhere")
    assert cache_folder(None) == tmp_path / "elsewhere" / "tokens"
    assert cache_folder("~/mine") == tmp_path / "mine" / "tokens"
    assert cache_folder("") is None
    monkeypatch.delenv("PACELINE_CACHE")
    assert cache_folder(None) == tmp_path / ".cache" / "paceline" / "tokens"


def test_an_empty_cache_dir_turns_the_cache_off(file, cache, logged, tokenizer):
    read(file, tokenizer, cache_dir="")
    assert "tokenised 3 prompts, without a cache: data.cache_dir is ''" in logged.text
    assert not cache.exists()


def flip_a_byte_of_a_token(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(np.array([len("one")]).tobytes())] ^= 1  # the length of the first prompt
    path.write_bytes(content)


def other_file(**arrays):
    return lambda path: np.savez(path, **{"key": np.array(path.stem), **arrays})


TOKENS, LENGTHS = np.arange(21, dtype=np.int32), np.array([3, 14, 4])
DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-30]),
    "empty": lambda path: path.write_bytes(b""),
    "not ours": lambda path: path.write_text("hello"),
    "one byte": flip_a_byte_of_a_token,
    "no array": other_file(tokens=TOKENS),
    "one array": lambda path: np.save(path.open("wb"), TOKENS),
    "pickled": other_file(tokens=np.array([[1], [2, 3]], dtype=object), lengths=LENGTHS),
    "other key": other_file(tokens=TOKENS, lengths=LENGTHS, key=np.array("other")),
    "other type": other_file(tokens=TOKENS.astype(np.int64), lengths=LENGTHS),
    "other count": other_file(tokens=TOKENS, lengths=np.array([21])),
    "other sum": other_file(tokens=TOKENS, lengths=LENGTHS + 1),
    "no tokens": other_file(tokens=TOKENS, lengths=np.array([0, 17, 4])),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_file_is_made_anew_with_a_warning(file, cache, logged, tokenizer, damage):
    first = read(file, tokenizer)
    (cached,) = cache.iterdir()
    DAMAGES[damage](cached)
    logged.clear()
    assert read(file, tokenizer) == first
    (warning,) = [record.message for record in logged.records if record.levelno == logging.WARNING]
    assert f"{cached} can't be used and are made again" in warning
    logged.clear()
    assert read(file, tokenizer) == first
    assert was_cached(logged)


def test_the_file_that_the_damages_imitate_is_good(tmp_path):
    """Else the tests above would pass for another reason than they say."""
    other_file(tokens=TOKENS, lengths=LENGTHS)(tmp_path / "k.npz")
    assert [len(ids) for ids in load_tokens(tmp_path, "k", 3) or []] == [3, 14, 4]


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, file, logged, tokenizer):
    (tmp_path / "taken").write_text("a file")
    tokens = read(file, tokenizer, cache_dir=str(tmp_path / "taken"))
    (warning,) = [record.message for record in logged.records if record.levelno == logging.WARNING]
    assert "can't be kept for the next run" in warning
    assert "Set data.cache_dir" in warning
    assert tokens == read(file, tokenizer, cache_dir="")


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch, logged):
    def full(stream, **arrays) -> None:
        stream.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert not save_tokens(tmp_path, "k", [np.array([1])])
    assert list(tmp_path.iterdir()) == []
    assert "No space left" in logged.text


def save_often(folder: Path) -> None:
    for _ in range(100):
        assert save_tokens(folder, "k", [np.arange(5000, dtype=np.int32), np.arange(3, dtype=np.int32)])


def test_processes_that_write_the_same_file_do_not_disturb_each_other(tmp_path, logged):
    start = multiprocessing.get_context("fork").Process
    processes = [start(target=save_often, args=(tmp_path,)) for _ in range(3)]
    for process in processes:
        process.start()
    found = 0
    while any(process.is_alive() for process in processes):
        tokens = load_tokens(tmp_path, "k", 2)
        found += tokens is not None and [len(ids) for ids in tokens] == [5000, 3]
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert found > 0
    assert logged.records == []
    assert os.listdir(tmp_path) == ["k.npz"]


@pytest.mark.parametrize("bad", ["", None])
def test_bad_prompts_are_refused_every_time_and_never_cached(tmp_path, cache, tokenizer, bad):
    file = write(tmp_path / "bad.parquet", ["fine", bad])
    for _ in range(2):
        with pytest.raises(DataError, match=r"row 1 of .*bad\.parquet"):
            read(file, tokenizer)
    assert not cache.exists()
