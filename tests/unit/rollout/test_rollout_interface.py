"""Engines by name."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.rollout import rollout_interface as registry
from paceline.rollout.hf import HfRollout
from paceline.rollout.native import NativeRollout
from paceline.rollout.rollout_interface import RolloutEngine, get_rollout, register_rollout
from paceline.rollout.vllm import VllmRollout


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
