"""Weights on their way into an engine."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from paceline.errors import PacelineError
from paceline.rollout.weights import whole_state
from tests.tiny import build_tiny_model

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def make_model(*, tied: bool) -> PreTrainedModel:
    return build_tiny_model(layers=1, tie_word_embeddings=tied)


def make_empty(*, tied: bool) -> PreTrainedModel:
    with torch.device("meta"):
        return make_model(tied=tied)


@pytest.mark.parametrize("left_out", [HEAD, EMBEDDING])
def test_a_tied_weight_comes_under_all_of_its_names(left_out: str) -> None:
    state = make_model(tied=True).state_dict()
    came = dict(whole_state(make_empty(tied=True), ((name, state[name]) for name in state if name != left_out)))
    assert came.keys() == state.keys()
    assert came[HEAD] is came[EMBEDDING]


def test_weights_that_are_not_tied_must_all_come() -> None:
    state = make_model(tied=False).state_dict()
    del state[HEAD]
    came = whole_state(make_empty(tied=False), state.items())
    with pytest.raises(PacelineError, match=rf"no value for 1 of {len(state) + 1} weights: lm_head\.weight\. Send"):
        dict(came)


def test_weights_are_handed_on_one_at_a_time() -> None:
    taken: list[str] = []

    def weights():
        for name, tensor in make_model(tied=True).state_dict().items():
            taken.append(name)
            yield name, tensor

    next(whole_state(make_empty(tied=True), weights()))
    assert taken == [EMBEDDING]
