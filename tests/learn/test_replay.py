"""The flight recorder in real runs in this process: what a bundle holds, and that a replay gives the same again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.cli.replay import main as replay
from paceline.report.bundles import list_bundles, read_bundle
from tests.in_process import train_in_process
from tests.runs import base_config, make_material

GROUPS = {"actor_rollout_ref__rollout__n": 2}
STEPS = 3


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_material(tmp_path_factory.mktemp("material"))


def record(material: Path, run_dir: Path, **changes: Any) -> Path:
    settings = {"trainer__record": "every", "trainer__total_training_steps": STEPS, "trainer__val_before_train": False}
    train_in_process(base_config(material, run_dir, **(settings | changes)))
    return run_dir


@pytest.fixture(scope="module")
def run(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(material, tmp_path_factory.mktemp("run"), actor_rollout_ref__actor__ppo_epochs=2)


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out.splitlines()[-1]


def test_every_step_is_replayed_to_the_last_bit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(list_bundles(run / "records")) == [1, 2, 3]
    assert replay([str(run), "--step", "2"]) == 0
    line = last_line(capsys)
    assert line.startswith("replay: equal to the last bit")
    for part in (
        "token_level_scores",
        "advantages",
        "returns",
        "critic: 4 optimizer steps",
        "actor: 4 optimizer steps",
    ):
        assert part in line


@pytest.mark.parametrize("start", ["advantage", "loss", "gradient"])
def test_a_replay_may_begin_later(start: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay([str(run / "records" / "step_3"), "--from", start, "--row", "1"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("replay: equal")
    assert "row 1, " in out


def test_another_setting_shows_what_would_have_been(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay([str(run), "--step", "1", "--set", "algorithm.lam=0.5"]) == 0
    line = last_line(capsys)
    assert line.startswith("replay: with other settings, the step differs, first in advantages, row ")
    with pytest.raises(SystemExit):
        replay([str(run), "--step", "1", "--set", "algorithm.lamda=0.5"])
    assert "algorithm.lam" in capsys.readouterr().err


def test_the_first_value_that_differs_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.trainer.ppo import phases

    compute = phases.compute_advantage

    def off_by_little(*args: Any, **kwargs: Any) -> Any:
        batch = compute(*args, **kwargs)
        batch.batch["advantages"] = batch.batch["advantages"].clone()
        batch.batch["advantages"][3, 2] += 1e-3
        return batch

    monkeypatch.setattr(phases, "compute_advantage", off_by_little)
    assert replay([str(run), "--step", "1", "--from", "advantage"]) == 1
    assert "first in advantages, row 3, token 2: recorded " in last_line(capsys)
    assert replay([str(run), "--step", "1", "--from", "loss"]) == 0


def test_a_bundle_has_what_the_step_was_made_of(run: Path) -> None:
    bundle = read_bundle(run / "records" / "step_2")
    assert {"responses", "rollout_log_probs", "old_log_probs", "values", "advantages", "token_level_scores"} <= set(
        bundle.columns.batch.keys()
    )
    assert set(bundle.extras["requests"]) >= {"seeds", "input_ids"}
    assert [step["grad_norm"] > 0 for step in bundle.manifest["updates"]["actor"]["steps"]] == [True] * 4
    assert sorted(bundle.extras["order"]["actor"].tolist()) == list(range(8))
    assert bundle.manifest["config"]["algorithm"]["adv_estimator"] == "gae"


def test_a_damaged_bundle_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import shutil

    copy = shutil.copytree(run / "records" / "step_1", tmp_path / "step_1")
    content = bytearray((copy / "columns.safetensors.zst").read_bytes())
    content[100] ^= 1
    (copy / "columns.safetensors.zst").write_bytes(content)
    with pytest.raises(SystemExit):
        replay([str(copy)])
    assert "columns.safetensors.zst is not what was written" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        replay([str(run), "--step", "9"])
    assert "step 9 was not recorded" in capsys.readouterr().err


def test_listed_steps_carry_their_weights(material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = record(material, tmp_path / "run", trainer__record=[2])
    assert list(list_bundles(run / "records")) == [2]
    assert read_bundle(run / "records" / "step_2").base is not None
    assert replay([str(run), "--step", "2"]) == 0
    assert last_line(capsys).startswith("replay: equal to the last bit")
