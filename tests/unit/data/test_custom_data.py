"""Datasets and samplers of the user's own, and an order that goes on after a resume."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from paceline.config import CustomDatasetConfig, DataConfig, SamplerConfig
from paceline.data import RLHFDataset, make_dataloader
from paceline.data.custom_data import make_dataset, make_sampler
from paceline.errors import CheckpointError, ConfigError, DataError
from tests.tiny import make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()
CLASSES = """
import torch
from paceline.data import RLHFDataset

class Reversed(RLHFDataset):
    def __getitem__(self, item):
        return {**super().__getitem__(len(self) - 1 - item), "mine": 1}

class Own(torch.utils.data.Dataset):
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        self.made = (data_files, config.get("prompt_key"), config["max_prompt_length"], processor, max_samples)
        self.length = config.max_prompt_length
    def __len__(self):
        return 3
    def __getitem__(self, item):
        ids = torch.full((self.length,), item)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(self.length)}

class Bare(Own):
    def __getitem__(self, item):
        return {"raw_prompt": "x"}

class Wants(Own):
    def __init__(self, data_files, bucket):
        pass

class Backwards:
    def __init__(self, data_source, data_config):
        self.size = len(data_source)
    def __len__(self):
        return self.size
    def __iter__(self):
        return iter(range(self.size - 1, -1, -1))
"""


@pytest.fixture
def classes(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(CLASSES)
    return str(file)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["1", "22", "333", "4444"]}), path)
    return str(path)


def config(classes: str, name: str) -> DataConfig:
    return DataConfig(max_prompt_length=8, cache_dir="", custom_cls=CustomDatasetConfig(classes, name))


def test_without_a_class_it_is_ours(file: str) -> None:
    data = DataConfig(max_prompt_length=8, cache_dir="")
    assert type(make_dataset(file, TOKENIZER, data, max_samples=-1)) is RLHFDataset


def test_a_subclass_of_ours_reads_the_files(classes: str, file: str) -> None:
    dataset = make_dataset(file, TOKENIZER, config(classes, "Reversed"), max_samples=3)
    plain = RLHFDataset(file, TOKENIZER, DataConfig(max_prompt_length=8, cache_dir=""), max_samples=3)
    assert len(dataset) == 3
    assert torch.equal(dataset[0]["input_ids"], plain[2]["input_ids"])
    assert dataset[0]["mine"] == 1


def test_a_class_gets_what_it_takes_by_keyword(classes: str, file: str) -> None:
    dataset = make_dataset(file, TOKENIZER, config(classes, "Own"), max_samples=5, processor="p")
    assert dataset.made == ([file], "prompt", 8, "p", 5)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Bare", "has input_ids: NoneType. It must be a tensor of data.max_prompt_length=8"),
        ("Wants", "data.custom_cls.name=Wants needs the argument bucket."),
        ("Missing", "data.custom_cls.name=Missing: "),
    ],
)
def test_a_class_that_does_not_fit_says_what_is_wanted(classes: str, file: str, name: str, said: str) -> None:
    with pytest.raises((ConfigError, DataError), match=r"argument|class|tensor") as caught:
        make_dataset(file, TOKENIZER, config(classes, name), max_samples=-1)
    assert said in str(caught.value)


def test_a_file_that_fails_to_import_is_named(tmp_path: Path, file: str) -> None:
    (tmp_path / "bad.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match=r"data.custom_cls.path=.*bad.py can't be imported: ZeroDivisionError"):
        make_dataset(file, TOKENIZER, config(str(tmp_path / "bad.py"), "A"), max_samples=-1)


def rows(batch: dict) -> list[int]:
    return batch["index"].tolist()


def test_a_sampler_says_the_order(classes: str, file: str) -> None:
    data = DataConfig(max_prompt_length=8, cache_dir="", sampler=SamplerConfig(classes, "Backwards"))
    dataset = make_dataset(file, TOKENIZER, data, max_samples=-1)
    loader = make_dataloader(dataset, 3, True, 1, sampler=make_sampler(dataset, data))
    assert [rows(batch) for batch in loader] == [[3, 2, 1], [0]]
    assert len(loader) == 2


class Drawn:
    """Another order in each epoch, with random numbers of its own, and rows that come twice."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return 6

    def __iter__(self):
        return iter(torch.randint(4, (6,), generator=self.generator).tolist())


def test_a_resumed_epoch_goes_on_with_the_rows_that_were_drawn(file: str) -> None:
    dataset = RLHFDataset(file, TOKENIZER, DataConfig(max_prompt_length=8, cache_dir=""))
    loader = make_dataloader(dataset, 2, False, 1, sampler=Drawn(3))
    whole = [rows(batch) for batch in loader]
    assert len(whole) == len(loader) == 3
    first = make_dataloader(dataset, 2, False, 1, sampler=Drawn(3))
    next(iter(first))
    resumed = make_dataloader(dataset, 2, False, 1, sampler=Drawn(99))
    resumed.load_state_dict(first.state_dict())
    assert [rows(batch) for batch in resumed] == whole[1:]
    with pytest.raises(CheckpointError, match="sampler=None"):
        resumed.load_state_dict(make_dataloader(dataset, 2, False, 1).state_dict())


def test_a_sampler_is_told_the_epoch(file: str) -> None:
    class Turning:
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self):
            return iter([self.epoch % 4, 0, 1, 2])

    dataset = RLHFDataset(file, TOKENIZER, DataConfig(max_prompt_length=8, cache_dir=""))
    loader = make_dataloader(dataset, 4, False, 1, sampler=Turning())
    assert [rows(next(iter(loader)))[0] for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("sampler", "said"), [([0, 9], "row 9, and there are 4 prompts"), ([], "gives 0 rows in epoch 0")]
)
def test_rows_that_are_not_there_are_an_error(file: str, sampler: list[int], said: str) -> None:
    dataset = RLHFDataset(file, TOKENIZER, DataConfig(max_prompt_length=8, cache_dir=""))
    with pytest.raises(DataError, match=said):
        list(make_dataloader(dataset, 1, False, 1, sampler=[*sampler] or iter(())))


def test_an_order_that_follows_scores_is_refused(file: str) -> None:
    class Curriculum(list):
        def update(self, batch: object) -> None: ...

    dataset = RLHFDataset(file, TOKENIZER, DataConfig(max_prompt_length=8, cache_dir=""))
    with pytest.raises(ConfigError, match="Curriculum has `update`"):
        make_dataloader(dataset, 1, False, 1, sampler=Curriculum([0]))


def test_a_collate_function_makes_the_batches(file: str) -> None:
    dataset = RLHFDataset(file, TOKENIZER, DataConfig(max_prompt_length=8, cache_dir=""))
    loader = make_dataloader(dataset, 2, False, 1, collate=lambda items: {"count": len(items)})
    assert [batch["count"] for batch in loader] == [2, 2]
