"""The quickstart's task: sums such as 12+7=, as GSM8K-style rows and as text to pre-train on.

Takes a seed; gives parquet files for the trainer and answers for the pre-training. Validation sums are in neither.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

DATA_SOURCE = "paceline/sums"
"""Scored as GSM8K is: by the number after `####`."""
LEFT, RIGHT = range(10, 90), range(10)
NUM_TRAINING = 640
NUM_VALIDATION = 160
SHARE_OF_BARE_ANSWERS = 0.5


@dataclass(frozen=True)
class Sum:
    """One sum.

    >>> Sum(12, 7).question, Sum(12, 7).answer
    ('12+7=', '19')
    """

    left: int
    right: int

    @property
    def question(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        return str(self.left + self.right)


def split_sums(seed: int) -> tuple[list[Sum], list[Sum]]:
    """(training, validation), each in a seeded order.

    The left number is larger than the right one, so no sum is another's mirror image: what validation asks was not
    seen in any form.
    """
    sums = [Sum(left, right) for left in LEFT for right in RIGHT]
    random.Random(f"split-{seed}").shuffle(sums)
    return sums[NUM_VALIDATION : NUM_VALIDATION + NUM_TRAINING], sums[:NUM_VALIDATION]


def pretraining_answer(item: Sum, rng: random.Random) -> str:
    """The answer to learn, in one of two formats.

    Only `#### n` scores by the strict rule. The pre-training ends before the sums are all learned well, so there are
    two things for PPO to find: the format, and to be right.
    """
    return item.answer if rng.random() < SHARE_OF_BARE_ANSWERS else f"#### {item.answer}"


def rows(sums: list[Sum], split: str) -> list[dict[str, object]]:
    """Rows as the GSM8K preparation writes them."""
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": item.question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": item.answer},
            "extra_info": {"split": split, "index": index},
        }
        for index, item in enumerate(sums)
    ]


def write_parquet(sums: list[Sum], split: str, path: Path) -> None:
    """Write the rows of `sums` to `path`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows(sums, split)), path)
