"""Around steps the model computes without gradients and in evaluation mode; after them it is as it was."""

from __future__ import annotations

import pytest
import torch

from paceline.rollout import SamplingParams
from paceline.rollout.native import NativeRollout
from tests.tiny import build_tiny_model


@pytest.fixture
def engine() -> NativeRollout:
    model = build_tiny_model(layers=1)
    model.train()
    model.model.layers[0].mlp.eval()  # not all of it trains
    return NativeRollout(model, {1}, 0, dtype=torch.bfloat16)


def states(engine: NativeRollout) -> list[bool]:
    return [module.training for module in engine.model.modules()]


def test_blocks_nest_and_the_outermost_puts_everything_back(engine: NativeRollout) -> None:
    before = states(engine)
    assert any(before)
    assert not all(before)
    with engine.decoding():
        with engine.decoding():
            pass
        assert not any(states(engine))  # the inner block's end changes nothing
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert states(engine) == before
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_an_error_in_a_block_leaves_the_model_as_it_was(engine: NativeRollout) -> None:
    before = states(engine)
    with pytest.raises(KeyError), engine.decoding():
        raise KeyError
    assert states(engine) == before
    assert len(engine.generate([[5, 6]], SamplingParams(2, ignore_eos=True), [0])[0].token_ids) == 2
    assert states(engine) == before


def test_weights_do_not_change_between_the_steps_of_a_block(engine: NativeRollout) -> None:
    with engine.decoding(), pytest.raises(AssertionError, match="autocast"):
        engine.load_weights(engine.model.state_dict().items())
