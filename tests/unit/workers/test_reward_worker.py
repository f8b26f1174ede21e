"""What the reward processes take from a reward manager of the user's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.errors import RewardError
from paceline.protocol import DataProto
from paceline.workers.reward_worker import RewardWorker


def scores_of(rewards: list[list[float]]) -> list[list[float]]:
    """The worker's answer for a response of two tokens and an empty one, in three columns."""

    def manager(data: DataProto, return_dict: bool) -> dict[str, Any]:
        return {"reward_tensor": torch.tensor(rewards)}

    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    data = DataProto.from_dict(tensors={"responses": torch.zeros(2, 3, dtype=torch.int64), "response_mask": mask})
    return RewardWorker(manager, None).compute_reward(data).batch["token_level_scores"].tolist()


def test_rewards_of_tokens_are_taken_and_an_empty_response_has_none() -> None:
    # Managers that index by length - 1 put the score of an empty response into the last column.
    assert scores_of([[0.5, 1.0, 0.0], [0.0, 0.0, 1.0]]) == [[0.5, 1.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("lost", [1.0, float("nan")])
def test_a_reward_beside_the_tokens_of_a_response_is_an_error(lost: float) -> None:
    """Estimators look at response tokens alone: the score would be 0, and training go on with nothing to learn from."""
    with pytest.raises(RewardError, match="the first in row 0 at 2, where the last token is at 1"):
        scores_of([[0.0, 0.0, lost], [0.0, 0.0, 0.0]])
