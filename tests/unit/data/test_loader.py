"""PromptLoader: the order of prompts, and going on from any position."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.config import DataConfig
from paceline.data import PromptLoader, RLHFDataset, make_dataloader
from paceline.errors import CheckpointError, ConfigError
from tests.tiny import make_tiny_tokenizer


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> RLHFDataset:
    return make_dataset(tmp_path_factory.mktemp("data"), 10)


def make_dataset(folder: Path, count: int) -> RLHFDataset:
    file = folder / f"{count}.parquet"
    pq.write_table(pa.table({"prompt": [str(number) for number in range(count)]}), file)
    return RLHFDataset(file, make_tiny_tokenizer(), DataConfig(max_prompt_length=4))


def rows(loader: PromptLoader, epochs: int = 1) -> list[list[int]]:
    return [list(batch["index"]) for _ in range(epochs) for batch in loader]


def test_an_epoch_has_every_prompt_once_and_a_smaller_last_batch(dataset):
    loader = make_dataloader(dataset, batch_size=4, shuffle=True, seed=1)
    batches = rows(loader)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert len(loader) == 3
    drawn = [row for batch in batches for row in batch]
    assert sorted(drawn) == list(range(10))
    assert drawn != list(range(10))


def test_without_shuffle_every_epoch_is_in_the_order_of_the_files(dataset):
    assert rows(make_dataloader(dataset, 5, shuffle=False, seed=1), epochs=2) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]] * 2


def test_order_depends_on_seed_and_epoch_only(dataset):
    first = rows(make_dataloader(dataset, 4, shuffle=True, seed=1), epochs=2)
    assert first == rows(make_dataloader(dataset, 4, shuffle=True, seed=1), epochs=2)
    assert first[:3] != first[3:]
    assert first != rows(make_dataloader(dataset, 4, shuffle=True, seed=2), epochs=2)


@pytest.mark.parametrize(("shuffle", "drop_last"), [(True, False), (False, False), (True, True), (False, True)])
@pytest.mark.parametrize("taken", range(10))
def test_a_restored_loader_goes_on_exactly_also_at_the_end_of_an_epoch(dataset, shuffle, drop_last, taken):
    everything = rows(make_dataloader(dataset, 4, shuffle, 3, drop_last), epochs=5 if drop_last else 3)[:9]
    loader = make_dataloader(dataset, 4, shuffle, 3, drop_last)
    done = 0
    state = loader.state_dict()
    while done < taken:
        for _ in loader:
            done += 1
            state = json.loads(json.dumps(loader.state_dict()))
            if done == taken:
                break
    restored = make_dataloader(dataset, 4, shuffle, 3, drop_last)
    restored.load_state_dict(state)
    rest = []
    while len(rest) < 9 - taken:
        rest += rows(restored)
    assert everything[:taken] + rest[: 9 - taken] == everything


def test_leaving_a_loop_early_and_iterating_again_goes_on(dataset):
    loader = make_dataloader(dataset, 4, shuffle=False, seed=1)
    assert list(next(iter(loader))["index"]) == [0, 1, 2, 3]
    assert rows(loader) == [[4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize(("seed", "shuffle"), [(2, True), (1, False)])
def test_a_position_of_another_order_is_refused(dataset, seed, shuffle):
    state = make_dataloader(dataset, 4, shuffle=True, seed=1).state_dict()
    with pytest.raises(CheckpointError, match="does not fit"):
        make_dataloader(dataset, 4, shuffle, seed).load_state_dict(state)


def test_a_position_in_other_data_is_refused_with_both_sizes(dataset, tmp_path):
    state = make_dataloader(dataset, 4, shuffle=True, seed=1).state_dict()
    other = make_dataloader(make_dataset(tmp_path, 9), 4, shuffle=True, seed=1)
    with pytest.raises(CheckpointError, match="num_prompts=10, now it is 9"):
        other.load_state_dict(state)


def test_drop_last_leaves_out_the_smaller_batch_of_every_epoch(dataset):
    loader = make_dataloader(dataset, 4, shuffle=True, seed=1, drop_last=True)
    assert len(loader) == 2
    with_tail = rows(make_dataloader(dataset, 4, shuffle=True, seed=1), epochs=3)
    assert rows(loader, epochs=3) == [batch for batch in with_tail if len(batch) == 4]


def test_drop_last_changes_nothing_when_batches_fit(dataset):
    loader = make_dataloader(dataset, 5, shuffle=True, seed=1, drop_last=True)
    assert len(loader) == 2
    assert rows(loader, epochs=2) == rows(make_dataloader(dataset, 5, shuffle=True, seed=1), epochs=2)


def test_a_loader_that_was_restored_with_another_batch_size_never_gives_a_smaller_batch(dataset):
    """The position counts prompts: 3 of 10 are taken, so 4 fit once more."""
    loader = make_dataloader(dataset, 4, shuffle=False, seed=1, drop_last=True)
    loader.load_state_dict({**loader.state_dict(), "position": 3})
    assert rows(loader, epochs=2) == [[3, 4, 5, 6], [0, 1, 2, 3], [4, 5, 6, 7]]


def test_drop_last_with_fewer_prompts_than_a_batch_says_what_to_set(dataset):
    with pytest.raises(
        ConfigError, match=r"has 10 prompts.* batch of 11\. .*drop_last=False.*train_batch_size .* 10\."
    ):
        make_dataloader(dataset, 11, shuffle=True, seed=1, drop_last=True)
    assert len(make_dataloader(dataset, 10, shuffle=True, seed=1, drop_last=True)) == 1


def test_batch_size_must_be_positive(dataset):
    with pytest.raises(ValueError, match="batch_size=0"):
        make_dataloader(dataset, 0, shuffle=True, seed=1)
