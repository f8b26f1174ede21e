"""Requests for the rollout, and the record of a step."""

from __future__ import annotations

import numpy as np
import torch

from paceline.data.loader import make_dataloader
from paceline.protocol import DataProto
from paceline.report.ledger import DataPosition, Prompts
from paceline.trainer.ppo.step import Draw, Step, draw_prompts, make_requests, position_of


def collated(rows: int) -> dict:
    return {
        "input_ids": torch.arange(rows * 3).reshape(rows, 3),
        "attention_mask": torch.ones(rows, 3, dtype=torch.long),
        "position_ids": torch.arange(3).repeat(rows, 1),
        "data_source": np.array(["s"] * rows, dtype=object),
    }


def test_requests_repeat_each_prompt_n_times_in_a_row_and_share_its_uid() -> None:
    requests, labels = make_requests(collated(2), n=3, seed=1, purpose="training", step=5)
    assert requests.batch["input_ids"][:, 0].tolist() == [0, 0, 0, 3, 3, 3]
    uid = labels.non_tensor_batch["uid"].tolist()
    assert uid[0] == uid[1] == uid[2] != uid[3]
    assert "input_ids" not in (labels.batch.keys() if labels.batch is not None else [])


def test_seeds_differ_between_responses_steps_and_purposes_and_repeat_for_equal_arguments() -> None:
    def seeds(**changes):
        arguments = {"n": 2, "seed": 1, "purpose": "training", "step": 5} | changes
        return make_requests(collated(4), **arguments)[0].batch["seeds"].tolist()

    assert len(set(seeds())) == 8
    assert seeds() == seeds()
    assert not set(seeds()) & (set(seeds(step=6)) | set(seeds(purpose="validation")) | set(seeds(seed=2)))
    assert min(seeds()) >= 0


class Rows:
    """A dataset of numbered prompts."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, row: int) -> dict:
        return {name: column[0] for name, column in collated(1).items()} | {"index": row}


def test_a_draw_says_which_prompts_it_is() -> None:
    loader = make_dataloader(Rows(5), batch_size=2, shuffle=False, seed=1, drop_last=True)  # type: ignore[arg-type]
    draws = [draw_prompts(loader, "training")[1] for _ in range(3)]
    assert [draw.prompts for draw in draws] == [(0, 0, 2), (0, 2, 4), (1, 0, 2)]
    assert [draw.before for draw in draws] == [(0, 0), (0, 2), (0, 4)]
    assert [draw.skipped for draw in draws] == [None, None, (0, 4, 5)], "drop_last left one out"
    assert position_of(loader) == (1, 2)


def drawn_step(*kept: str) -> Step:
    """Step 3, which drew four prompts and then two more; those in `kept` are left in its batch."""
    draws = [
        Draw("training", DataPosition(0, 2), Prompts(0, 2, 6), None),
        Draw("refill", DataPosition(0, 6), Prompts(1, 0, 2), Prompts(0, 6, 7)),
    ]
    uids = {"uid": np.array(kept, dtype=object)}
    step = Step(3, DataProto(), DataProto(), batch=DataProto.from_dict(non_tensors=uids))
    for draw in draws:
        step.add(draw)
    return step


def test_a_step_accounts_for_all_its_prompts() -> None:
    step = drawn_step("training-3-0", "training-3-0", "training-3-1", "training-3-3", "refill-3-1")
    assert step.accounted() == (
        [(0, 2, 4), (0, 5, 6), (1, 1, 2)],
        {"filter_groups": [(0, 4, 5), (1, 0, 1)], "drop_last": [(0, 6, 7)]},
    )
    assert (step.epoch, step.num_prompts) == (1, 7)


def test_a_step_that_was_left_out_trained_on_nothing() -> None:
    step = drawn_step("training-3-0")
    step.is_left_out = True
    trained, dropped = step.accounted()
    assert trained == []
    assert dropped["not_finite"] == [(0, 2, 6), (1, 0, 2)]
