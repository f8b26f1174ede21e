"""Teachers in whole runs: the real trainer and workers, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.cli.replay import main as replay
from paceline.errors import NonFiniteError
from paceline.trainer.ppo.ray_trainer import RayPPOTrainer
from tests.in_process import build_in_process, train_in_process
from tests.learn.test_agent_runs import games
from tests.runs import base_config, read_metrics, results
from tests.tiny import make_tiny_model

LOSS = "distillation.distillation_loss"
DISTANCE = "actor/distillation/abs_loss"
SPLIT = {"trainer.n_gpus_per_node": 2, "trainer.placement.name": "split"}
APART = {"distillation.n_gpus_per_node": 1}


@pytest.fixture(scope="module")
def teacher(material: Path) -> Path:
    """Of the same kind with other weights, which are sure of themselves."""
    return make_tiny_model(material / "teacher", seed=7, initializer_range=0.2)


def config(material: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """A run that learns from the teacher alone."""
    settings = base_config(
        material,
        run_dir,
        actor_rollout_ref__actor__use_kl_loss=False,
        distillation__enabled=True,
        distillation__distillation_loss__use_task_rewards=False,
        distillation__distillation_loss__loss_mode="k2",
        distillation__teacher_models__one__model_path=str(material / "teacher"),
    )
    return settings | changes


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("k1", {f"{LOSS}.use_policy_gradient": True, f"{LOSS}.loss_max_clamp": 5.0}),
        ("forward_kl_topk", {f"{LOSS}.topk": 8, f"{LOSS}.log_prob_min_clamp": -20.0}),
        pytest.param("k2", {}, marks=pytest.mark.slow),
        pytest.param("k3", {}, marks=pytest.mark.slow),
        pytest.param("forward_kl_topk_tail", {f"{LOSS}.topk": 8}, marks=pytest.mark.slow),
    ],
)
def test_a_policy_comes_nearer_to_its_teacher(
    material: Path, teacher: Path, tmp_path: Path, mode: str, changes: dict[str, Any]
) -> None:
    steps = {"trainer.total_training_steps": 24, "trainer.total_epochs": 100, f"{LOSS}.loss_mode": mode}
    optim = {"actor_rollout_ref.actor.optim.lr": 1e-2, "trainer.val_before_train": False}
    train_in_process(config(material, tmp_path, **steps, **optim, **changes))
    lines = read_metrics(tmp_path)
    first, last = (sum(line[DISTANCE] for line in part) for part in (lines[:4], lines[-4:]))
    assert last < 0.95 * first
    assert not {"actor/pg_loss", "critic/vf_loss", "critic/advantages/mean"} & lines[0].keys()


def test_a_policy_that_is_its_teacher_has_nothing_to_learn(material: Path, tmp_path: Path) -> None:
    itself = {"distillation.teacher_models.one.model_path": str(material / "model"), f"{LOSS}.loss_mode": "k3"}
    train_in_process(config(material, tmp_path, **itself, **{"trainer.total_training_steps": 1}))
    assert abs(read_metrics(tmp_path)[-1]["actor/distillation/abs_loss"]) < 1e-6


@pytest.fixture(scope="module")
def whole(material: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rewards, critic, reference and teacher together, undisturbed."""
    run_dir = tmp_path_factory.mktemp("whole")
    train_in_process(beside_rewards(material, run_dir))
    return run_dir


def beside_rewards(material: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    settings = {
        f"{LOSS}.use_task_rewards": True,
        f"{LOSS}.distillation_loss_coef": 0.5,
        f"{LOSS}.loss_mode": "forward_kl_topk_tail",
        f"{LOSS}.topk": 4,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "trainer.save_freq": 1,
    }
    return config(material, run_dir, **{**settings, **changes})


def test_a_teacher_beside_rewards_is_a_further_term_of_the_loss(whole: Path) -> None:
    for line in read_metrics(whole)[1:]:
        parts = line["actor/pg_loss"] + 0.001 * line["actor/kl_loss"] + 0.5 * line["actor/distillation/loss"]
        assert line["actor/loss"] == pytest.approx(parts, abs=1e-6)
        assert 0 < line["actor/distillation/student_mass"] < 1
    assert "critic/vf_loss" in read_metrics(whole)[-1]


@pytest.mark.parametrize(
    "changes",
    [SPLIT, APART, SPLIT | APART, {"trainer.n_gpus_per_node": 2, "trainer.placement.rollout_devices": 1}],
    ids=["on the critic's pool", "on its own", "on its own beside two", "beside a rollout apart"],
)
def test_where_the_teacher_is_changes_not_a_bit(
    material: Path, whole: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    train_in_process(beside_rewards(material, tmp_path, **{**changes, "trainer.save_freq": -1}))
    assert results(tmp_path) == results(whole)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    pools = {rows[event["tid"]].split()[0] for event in events if event["name"] == "compute_teacher_log_prob"}
    expected = "teacher_pool" if APART.items() <= changes.items() else "global_pool"
    assert pools == {"critic_pool" if changes == SPLIT else expected}


def test_resumed_equals_uninterrupted(
    material: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build_in_process(beside_rewards(material, tmp_path))
    update = trainer.update_actor

    def crash(step: Any) -> Any:
        if trainer.global_step == 3:
            raise KeyboardInterrupt
        return update(step)

    monkeypatch.setattr(trainer, "update_actor", crash)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    train_in_process(beside_rewards(material, tmp_path))
    assert results(tmp_path) == results(whole)


@pytest.mark.parametrize("schedule", ["pipelined", "streaming"])
def test_a_teacher_scores_what_older_weights_sampled(
    material: Path, teacher: Path, tmp_path: Path, schedule: str
) -> None:
    late = {"trainer.schedule.name": schedule, "trainer.schedule.max_staleness": 1}
    train_in_process(config(material, tmp_path, **late))
    lines = read_metrics(tmp_path)[1:]
    assert all(line[DISTANCE] > 0 for line in lines)
    assert max(line["training/staleness/max"] for line in lines) == 1


def test_each_row_has_the_teacher_of_its_source(material: Path, teacher: Path, tmp_path: Path) -> None:
    """A teacher that is the policy leaves its rows as they are; the others are as far as with their teacher alone."""
    rows = pq.read_table(material / "train.parquet").to_pylist()
    for number, row in enumerate(rows):
        row["data_source"] = "mine" if number % 2 else "other"
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "mixed.parquet")
    seen: list[tuple[list[str], Any]] = []
    trainer = build_in_process(
        config(
            material,
            tmp_path / "run",
            **{
                "data.train_files": str(tmp_path / "mixed.parquet"),
                "data.val_files": None,
                "distillation.teacher_models.one.key": "other",
                "distillation.teacher_models.two.key": "mine",
                "distillation.teacher_models.two.model_path": str(material / "model"),
                "trainer.total_training_steps": 1,
            },
        )
    )
    update = trainer.update_actor

    def watch(step: Any) -> Any:
        distance = (step.batch.batch["teacher_log_probs"] - step.batch.batch["rollout_log_probs"]).abs().amax(dim=-1)
        seen.append((list(step.batch.non_tensor_batch["data_source"]), distance.tolist()))
        return update(step)

    trainer.update_actor = watch  # type: ignore[method-assign]
    trainer.fit()
    ((sources, distances),) = seen
    assert {"mine", "other"} == set(sources)
    for source, distance in zip(sources, distances, strict=True):
        assert (distance < 1e-5) == (source == "mine")


def test_prompts_alone_are_enough_where_a_teacher_alone_trains(material: Path, teacher: Path, tmp_path: Path) -> None:
    prompts = [{"prompt": row["prompt"]} for row in pq.read_table(material / "train.parquet").to_pylist()]
    pq.write_table(pa.Table.from_pylist(prompts), tmp_path / "prompts.parquet")
    files = {"data.train_files": str(tmp_path / "prompts.parquet"), "data.val_files": None}
    settings = config(material, tmp_path / "run", **files, **{"trainer.total_training_steps": 1})
    del settings["custom_reward_function.path"]
    train_in_process(settings)
    assert read_metrics(tmp_path / "run")[-1]["critic/score/mean"] == 0


def test_a_teacher_that_says_nothing_finite_ends_the_run(
    material: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer: RayPPOTrainer = build_in_process(beside_rewards(material, tmp_path))
    ask = trainer.compute_ref_log_probs

    def broken(batch: Any) -> Any:
        def spoil(answer: Any) -> Any:
            answer.batch["top_log_probs"] = answer.batch["top_log_probs"] * float("nan")
            return answer

        return ask(batch).then(spoil)

    monkeypatch.setattr(trainer, "compute_ref_log_probs", broken)
    with pytest.raises(NonFiniteError, match="top_log_probs is not finite"):
        trainer.fit()


@pytest.mark.parametrize("alone", [False, True], ids=["beside rewards", "alone"])
def test_a_recorded_step_is_made_again_to_the_last_bit(
    material: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], alone: bool
) -> None:
    recorded = {"trainer.record": "every", "trainer.total_training_steps": 2, "trainer.val_before_train": False}
    make = config if alone else beside_rewards
    train_in_process(make(material, tmp_path, **{**recorded, **APART, "trainer.save_freq": -1}))
    assert replay([str(tmp_path), "--step", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("replay: equal to the last bit")


@pytest.mark.slow
def test_a_teacher_scores_every_row_of_a_conversation(material: Path, teacher: Path, tmp_path: Path) -> None:
    taught = {key: value for key, value in config(material, tmp_path).items() if key.startswith("distillation")}
    settings = games(material, tmp_path) | taught | {"trainer.total_training_steps": 1}
    train_in_process(settings)
    line = read_metrics(tmp_path)[-1]
    assert line[DISTANCE] > 0
    assert line["agent/num_turns/max"] > 1
