"""Engines by name, and weights on their way into one."""

from __future__ import annotations

import weakref

import pytest
import torch
from transformers import PreTrainedModel

from paceline.errors import ConfigError, PacelineError
from paceline.rollout import rollout_interface as registry
from paceline.rollout.hf import HfRollout
from paceline.rollout.native import NativeRollout
from paceline.rollout.rollout_interface import RolloutEngine, get_rollout, register_rollout, whole_state
from paceline.rollout.vllm import VllmRollout
from tests.tiny import build_tiny_model

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def test_built_in_engines_are_known() -> None:
    assert [get_rollout(name) for name in ("native", "hf", "vllm")] == [NativeRollout, HfRollout, VllmRollout]


def test_unknown_engine_suggests_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"name='nativ' .* did you mean native\? Known: hf, native, vllm"):
        get_rollout("nativ")


def test_registered_engine_is_found_and_its_name_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry._ENGINES, "_entries", dict(registry._ENGINES._entries))

    @register_rollout("mine")
    class Mine(RolloutEngine):
        pass

    assert get_rollout("mine") is Mine
    with pytest.raises(ConfigError, match=r"actor_rollout_ref\.rollout\.name=mine is already .*Mine"):
        register_rollout("mine")(NativeRollout)


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
    assert came[HEAD].equal(came[EMBEDDING])


def test_weights_that_were_handed_on_are_not_kept() -> None:
    """They may be parts of a bucket, of which two may live at a time."""
    state, kept = make_model(tied=True).state_dict(), []

    def weights():
        for name, tensor in state.items():
            came = tensor.clone()
            kept.append(weakref.ref(came))
            yield name, came

    for _ in whole_state(make_empty(tied=True), weights()):
        assert sum(one() is not None for one in kept) <= 2  # the one that is here, and the one that comes


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
