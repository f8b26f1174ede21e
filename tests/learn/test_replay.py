"""The flight recorder in real runs in this process: what a bundle holds, and that a replay gives the same again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.catalog import ESTIMATORS, LOSSES
from paceline.cli.replay import main as replay
from paceline.errors import NonFiniteError
from paceline.report.bundles import list_bundles, read_bundle
from tests.in_process import train_in_process
from tests.learn.test_agent_runs import games
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


def settings_of(estimator: str) -> dict[str, Any]:
    """What an estimator or loss needs beside its name."""
    entry = ESTIMATORS.built_in[estimator]
    changes: dict[str, Any] = {"algorithm__adv_estimator": estimator}
    if entry.needs_groups:
        changes |= GROUPS
    if entry.needs_components:
        changes["algorithm__gdpo_reward_keys"] = ["score"]
    return changes


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ESTIMATORS.built_in)
def test_each_estimator_is_replayed(
    estimator: str, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record(material, tmp_path, **settings_of(estimator), trainer__total_training_steps=2)
    assert replay([str(run), "--step", "2"]) == 0
    assert last_line(capsys).startswith("replay: equal to the last bit")


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES.built_in)
def test_each_loss_is_replayed(loss: str, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes: dict[str, Any] = {"actor_rollout_ref__actor__policy_loss__loss_mode": loss}
    if loss == "bypass_mode":
        changes["algorithm__rollout_correction__bypass_mode"] = True
    if loss == "dro":
        changes["actor_rollout_ref__actor__policy_loss__dro_beta"] = 0.5
    run = record(material, tmp_path, **settings_of("grpo"), **changes, trainer__total_training_steps=2)
    assert replay([str(run), "--step", "2"]) == 0
    assert last_line(capsys).startswith("replay: equal to the last bit")


WAYS: dict[str, dict[str, Any]] = {
    "pipelined": {"trainer__schedule__name": "pipelined", "trainer__schedule__max_staleness": 2},
    "streaming": {
        "trainer__schedule__name": "streaming",
        "trainer__schedule__max_staleness": 1,
        "trainer__n_gpus_per_node": 2,
        "trainer__placement__rollout_devices": 1,
        "actor_rollout_ref__actor__use_kl_loss": False,
    },
    "split": {"trainer__n_gpus_per_node": 2, "trainer__placement__name": "split"},
    "adaptive KL in the reward": {
        "algorithm__use_kl_in_reward": True,
        "algorithm__kl_ctrl__type": "adaptive",
        "actor_rollout_ref__actor__use_kl_loss": False,
    },
    "PF-PPO": {"algorithm__use_pf_ppo": True},
    "shuffled": {"actor_rollout_ref__actor__shuffle": True, "actor_rollout_ref__actor__ppo_epochs": 2},
    "filtered groups": {**GROUPS, "algorithm__adv_estimator": "grpo", "algorithm__filter_groups__enable": True},
    "corrected": {
        "algorithm__rollout_correction__rollout_is": "token",
        "algorithm__rollout_correction__rollout_rs": None,
    },
    "warm-up": {"trainer__critic_warmup": 2},
    "single turns through agents": {"actor_rollout_ref__rollout__multi_turn__enable": True},
    "LoRA": {"actor_rollout_ref__model__lora_rank": 4},
    "micro-batches by tokens": {"actor_rollout_ref__actor__use_dynamic_bsz": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_steps_of_other_runs_are_replayed(
    way: str, material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = record(material, tmp_path, **WAYS[way])
    for step in (1, 3):
        assert replay([str(run), "--step", str(step)]) == 0, capsys.readouterr().out
        assert last_line(capsys).startswith("replay: equal to the last bit")


@pytest.mark.slow
def test_conversations_with_rewards_of_their_turns_are_replayed(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"trainer__record": "every", "trainer__total_training_steps": 3, "trainer__val_before_train": False}
    train_in_process(games(material, tmp_path, **settings))
    assert replay([str(tmp_path), "--step", "3"]) == 0, capsys.readouterr().out
    assert last_line(capsys).startswith("replay: equal to the last bit")


@pytest.mark.slow
def test_a_resumed_run_is_replayed_from_its_checkpoint_or_its_chain(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"trainer__save_freq": 2, "trainer__max_actor_ckpt_to_keep": 1, "trainer__max_critic_ckpt_to_keep": 1}
    record(material, tmp_path, **settings, trainer__total_training_steps=2)
    run = record(material, tmp_path, **settings, trainer__total_training_steps=5)
    assert list(list_bundles(run / "records")) == [1, 2, 3, 4, 5]
    assert replay([str(run), "--step", "4"]) == 0
    assert last_line(capsys).startswith("replay: equal")
    record(material, tmp_path / "other", **settings, trainer__total_training_steps=4, trainer__record=[4])
    assert read_bundle(tmp_path / "other" / "records" / "step_4").base is not None
    assert replay([str(tmp_path / "other"), "--step", "4"]) == 0


@pytest.mark.slow
def test_a_step_in_which_the_run_fails_is_kept(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.trainer.ppo import phases

    compute, calls = phases.compute_advantage, []

    def breaks_in_the_second_step(batch: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        result = compute(batch, *args, **kwargs)
        if len(calls) >= 2:
            result.batch["advantages"] = result.batch["advantages"] * float("nan")
        return result

    monkeypatch.setattr(phases, "compute_advantage", breaks_in_the_second_step)
    with pytest.raises(NonFiniteError):
        record(material, tmp_path)
    bundle = read_bundle(tmp_path / "records" / "step_2")
    assert bundle.manifest["failed"]
    assert "advantages is not finite" in bundle.manifest["alarms"][0]
    assert replay([str(tmp_path), "--step", "2"]) == 0
    assert "the error that ended the run" in last_line(capsys)
    monkeypatch.undo()
    assert replay([str(tmp_path), "--step", "2"]) == 1


@pytest.mark.slow
def test_bundles_of_an_earlier_run_are_kept_aside(material: Path, tmp_path: Path) -> None:
    for _ in range(2):
        record(material, tmp_path, trainer__total_training_steps=2)
    assert list(list_bundles(tmp_path / "records")) == list(list_bundles(tmp_path / "records.1")) == [1, 2]


@pytest.mark.slow
def test_an_unusual_step_is_kept_with_what_leads_to_it(
    material: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.report import anomalies

    monkeypatch.setattr(anomalies, "FEWEST", 6)
    from paceline.trainer.ppo import phases

    compute = phases.compute_advantage

    def sometimes_huge(batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = compute(batch, *args, **kwargs)
        if trainer_step[0] == 8:
            result.batch["returns"] = result.batch["returns"] * 1e4
        return result

    trainer_step = [0]
    begin = phases.Phases.compute_advantages

    def counted(self: Any, step: Any) -> None:
        trainer_step[0] = step.number
        begin(self, step)

    monkeypatch.setattr(phases.Phases, "compute_advantages", counted)
    monkeypatch.setattr(phases, "compute_advantage", sometimes_huge)
    run = record(
        material, tmp_path, trainer__record="on_anomaly", trainer__save_freq=2, trainer__total_training_steps=10
    )
    alarms = [json.loads(line) for line in (run / "alarms.jsonl").read_text().splitlines()]
    assert 8 in [row["step"] for row in alarms]
    kept = list(list_bundles(run / "records"))
    assert 8 in kept
    assert 1 not in kept
    monkeypatch.undo()
    assert replay([str(run), "--step", "8", "--from", "loss"]) == 0
    assert last_line(capsys).startswith("replay: equal to the last bit")
