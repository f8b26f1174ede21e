"""The reward processes: they call the reward functions, so that grading takes no time of the driver or a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized

import numpy as np
import torch

from paceline.algorithms.masking import zero_outside
from paceline.errors import RewardError
from paceline.protocol import DataProto
from paceline.single_controller.base import Dispatch, Worker, register

RewardFn = Callable[..., object]
"""Called `(data, return_dict=True)`; is to give `reward_tensor` (batch, response) and maybe `reward_extra_info`. It may
be the user's, so what it gives is checked."""

EXTRA_INFO = "reward_extra_info"


class RewardWorker(Worker):
    """Grades its share of a batch with the run's reward functions, which came with the constructor.

    They may be the user's, so they get copies: this class does not promise to leave its inputs alone.
    """

    def __init__(self, reward_fn: RewardFn, val_reward_fn: RewardFn | None) -> None:
        super().__init__()
        self.reward_fn, self.val_reward_fn = reward_fn, val_reward_fn

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_reward(self, data: DataProto, validation: bool = False) -> DataProto:
        """`token_level_scores`, and the function's further output: for each row a dict, in column `EXTRA_INFO`.

        One column, because the rows of another share may have other fields.
        """
        reward_fn = self.val_reward_fn if validation else self.reward_fn
        assert reward_fn is not None, "this run has no reward function for validation"
        result = reward_fn(data, return_dict=True)
        if not isinstance(result, dict) or "reward_tensor" not in result:
            raise RewardError(
                f"the reward function, called with return_dict=True, gave a {type(result).__name__}; it must give a "
                f"dict with `reward_tensor` (batch, response) and optionally `{EXTRA_INFO}`."
            )
        rewards, info = result["reward_tensor"], result.get(EXTRA_INFO, {})
        _check(rewards, info, data)
        rewards = zero_outside(rewards.float(), data.batch["response_mask"])
        rows = np.empty(len(data), dtype=object)
        rows[:] = [{name: values[row] for name, values in info.items()} for row in range(len(data))]
        return DataProto.from_dict(tensors={"token_level_scores": rewards}, non_tensors={EXTRA_INFO: rows})


def _check(rewards: object, info: Mapping[str, Sized], data: DataProto) -> None:
    """Raise RewardError unless the output of a user's reward function fits the batch."""
    wanted = tuple(data.batch["responses"].shape)
    if not isinstance(rewards, torch.Tensor) or tuple(rewards.shape) != wanted:
        shape = tuple(rewards.shape) if isinstance(rewards, torch.Tensor) else None
        found = f"a tensor {shape}" if shape is not None else f"a {type(rewards).__name__}"
        raise RewardError(f"the reward function gave {found} as `reward_tensor`; it must be a tensor {wanted}.")
    # An empty response has no token to reward, and is not trained on.
    mask = data.batch["response_mask"].bool()
    lost = (rewards != 0) & ~mask & mask.any(dim=-1, keepdim=True)
    if lost.any():
        row, column = (int(number) for number in lost.nonzero()[0])
        raise RewardError(
            f"the reward function gave {int(lost.sum())} rewards to places that are not tokens of a response, "
            f"the first in row {row} at {column}, where the last token is at {int(mask[row].nonzero()[-1])}. They "
            "would be lost: put the score of a response at its last token."
        )
    lengths = {name: len(values) for name, values in info.items()}
    if any(length != len(data) for length in lengths.values()):
        raise RewardError(f"`{EXTRA_INFO}` must have a value for each of {len(data)} rows; it has {lengths}.")
