"""Packing, token budgets and whose log-probs are the old ones change no number of a run: the real trainer and
workers, in process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.trainer.ppo.old_log_probs import BOUNDS
from tests.in_process import train_in_process
from tests.mixed import make_mixed_material, mixed_config
from tests.runs import results

pytestmark = pytest.mark.device

PACKED: dict[str, Any] = {
    "actor_rollout_ref__model__use_remove_padding": True,
    "critic__model__use_remove_padding": True,
    "reward_model__model__use_remove_padding": True,
}
BY_TOKENS: dict[str, Any] = {
    "actor_rollout_ref__actor__use_dynamic_bsz": True,
    "actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 90,
    "actor_rollout_ref__rollout__log_prob_max_token_len_per_gpu": 60,
    "actor_rollout_ref__ref__log_prob_max_token_len_per_gpu": 70,
    "critic__use_dynamic_bsz": True,
    "critic__ppo_max_token_len_per_gpu": 80,
    "critic__forward_max_token_len_per_gpu": 120,
    "reward_model__use_dynamic_bsz": True,
    "reward_model__forward_max_token_len_per_gpu": 100,
}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixed_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="module")
def plain(material: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    run_dir = tmp_path_factory.mktemp("plain")
    train_in_process(mixed_config(material, run_dir))
    return results(run_dir)


COMPUTED: dict[str, Any] = {"actor_rollout_ref__rollout__trust_log_probs": False}
TRUSTED: dict[str, Any] = {"actor_rollout_ref__rollout__trust_log_probs": True}
MISMATCH = ("training/rollout_", "rollout_corr/")
"""Metrics that compare both log-probs begin so."""


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(PACKED, id="packed", marks=pytest.mark.slow),
        pytest.param(BY_TOKENS, id="tokens", marks=pytest.mark.slow),
        pytest.param(PACKED | BY_TOKENS, id="both"),
        pytest.param(COMPUTED, id="computed", marks=pytest.mark.slow),
        pytest.param(TRUSTED, id="trusted"),
    ],
)
def test_a_run_gives_the_same_numbers(
    material: Path, plain: list[dict[str, Any]], tmp_path: Path, changes: dict[str, Any]
) -> None:
    train_in_process(mixed_config(material, tmp_path, **changes))
    lines = results(tmp_path)
    assert [line["step"] for line in lines] == [line["step"] for line in plain] == [0, 1, 2, 3]
    measured = {name for name in plain[-1] if name.startswith(MISMATCH)}
    assert {"training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"} <= measured
    for line, expected in zip(lines, plain, strict=True):
        # With the log-probs of all rows there is more to compare.
        assert {name for name in line if not name.startswith("rollout_corr/")} == expected.keys()
        line = {name: line[name] for name in expected}
        numbers = {name: expected[name] for name in line if isinstance(expected[name], float)}
        assert {name: line[name] for name in numbers} == pytest.approx(numbers, rel=1e-3, abs=1e-5)


def test_log_probs_beyond_the_bound_are_computed_for_all_rows_and_the_log_says_so(
    material: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    train_in_process(mixed_config(material, tmp_path / "computed", **COMPUTED))
    monkeypatch.setitem(BOUNDS, "float32", -1.0)
    train_in_process(mixed_config(material, tmp_path / "beyond"))
    assert results(tmp_path / "beyond") == results(tmp_path / "computed")
    said = [record.message for record in caplog.records if "more than rounding" in record.message]
    assert [line.split(":")[0] for line in said] == ["step 1", "step 2", "step 3"]
