"""Weights of rules and models, as a configuration gives them."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.rewards import RewardManager
from tests.unit.rewards.reward_batches import TOKENIZER


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ({"a": {"rule": -1.0}}, "of 'a' has rule=-1.0; set it to a number >= 0"),
        ({"a": {"model": "much"}}, "of 'a' has model='much'"),
        ({"a": {"model": True}}, "of 'a' has model=True"),
        ({"a": {"model": float("nan")}}, "of 'a' has model=nan"),
        ({"a": {"modl": 1.0}}, "of 'a' is {'modl': 1.0}; write {rule: 1.0, model: 0.2}"),
        ({"a": 0.5}, "of 'a' is 0.5"),
        ({"a": {}}, "of 'a' is {}"),
    ],
)
def test_weights_that_can_not_be_read_are_refused(weights, problem):
    with pytest.raises(ConfigError) as error:
        RewardManager(TOKENIZER, 0, weights=weights)
    assert problem in str(error.value)
