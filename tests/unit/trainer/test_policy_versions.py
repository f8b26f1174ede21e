from __future__ import annotations

import pytest
import torch

from paceline.protocol import DataProto
from paceline.trainer.ppo.policy_versions import staleness_metrics, with_versions


def responses(*lengths: int, width: int = 4) -> DataProto:
    mask = torch.tensor([[1] * length + [0] * (width - length) for length in lengths])
    return DataProto.from_dict(tensors={"response_mask": mask})


def test_every_token_carries_the_version_that_sampled_it() -> None:
    assert with_versions(responses(3, 1), 7).batch["policy_versions"].tolist() == [[7, 7, 7, 0], [7, 0, 0, 0]]


def test_staleness_is_counted_over_tokens() -> None:
    """Six tokens of version 3 and two of version 5, trained on by version 5: ages 2 and 0."""
    batch = DataProto.concat([with_versions(responses(4, 2), 3), with_versions(responses(2), 5)])
    assert staleness_metrics(batch, version=5) == pytest.approx(
        {
            "training/staleness/in_flight": 0.0,
            "training/staleness/in_queue": 4 / 3,
            "training/staleness/mean": 1.5,
            "training/staleness/max": 2.0,
            "training/staleness/share_of_tokens/0": 0.25,
            "training/staleness/share_of_tokens/2": 0.75,
        }
    )


def test_a_response_ages_while_it_is_sampled_and_while_it_waits() -> None:
    """Versions 1, 3, 3 of one response, 4 of another, and one that is empty; version 5 trains on them."""
    batch = with_versions(responses(3, 1, 0), 4)
    batch.batch["policy_versions"][0] = torch.tensor([1, 3, 3, 0])
    found = staleness_metrics(batch, version=5)
    assert found["training/staleness/in_flight"] == (2 + 0) / 2
    assert found["training/staleness/in_queue"] == (2 + 1) / 2
    assert found["training/staleness/max"] == 4


def test_a_batch_without_tokens_has_no_staleness() -> None:
    assert staleness_metrics(with_versions(responses(0), 1), version=1) == {}
