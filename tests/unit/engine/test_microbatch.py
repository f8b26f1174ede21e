from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from paceline.engine.microbatch import Window, split_micro_batches


def test_micro_batches_hold_all_rows_in_order() -> None:
    batch = TensorDict({"row": torch.arange(5)}, batch_size=[5])
    assert [part["row"].tolist() for part in split_micro_batches(batch, 2)] == [[0, 1], [2, 3], [4]]


def test_a_micro_batch_size_below_one_is_an_error() -> None:
    with pytest.raises(ValueError, match="micro_batch_size is 0"):
        split_micro_batches(TensorDict({"row": torch.arange(5)}, batch_size=[5]), 0)


def test_a_batch_without_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rows"):
        split_micro_batches(TensorDict({"row": torch.arange(0)}, batch_size=[0]), 1)


def test_the_window_leaves_out_columns_that_no_row_uses() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0]])
    assert Window.of(mask) == Window(1, 5)


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        ([0, 0, 1, 1, 1, 0], Window(2, 5)),
        ([0, 0, 0, 0, 0, 0], Window(0, 4)),  # Nothing attended: still a column to predict from and one to predict.
        ([0, 1, 1, 0, 0, 0], Window(1, 4)),
        ([0, 0, 0, 1, 1, 1], Window(2, 6)),
    ],
)
def test_the_window_of_responses_can_predict_a_response_token(mask: list[int], window: Window) -> None:
    """Three prompt columns, three response columns."""
    assert Window.of_responses(torch.tensor([mask]), num_response_columns=3) == window
