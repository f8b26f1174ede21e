"""Numbers that are not finite: where they stop a run, and what a step that is left out must not change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import NonFiniteError, RewardError
from paceline.protocol import DataProto, DataProtoFuture
from paceline.single_controller.in_process import InProcessWorkerGroup
from paceline.trainer.main_ppo import TaskRunner, complete_config
from paceline.trainer.ppo.ray_trainer import RayPPOTrainer
from paceline.trainer.ppo.step import Step
from tests.in_process import build_in_process
from tests.mixed import make_mixed_material, mixed_config
from tests.runs import as_omegaconf, base_config, read_metrics

NAN = float("nan")
BROKEN_STEP = 2


def config(material: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "trainer__total_training_steps": 3,
        "trainer__save_freq": 1,
        "trainer__test_freq": -1,
        "trainer__on_nonfinite": "skip",
        "algorithm__use_kl_in_reward": True,
        "algorithm__kl_ctrl__type": "adaptive",
        "algorithm__kl_ctrl__horizon": 100,
        "actor_rollout_ref__actor__ppo_epochs": 2,
        "actor_rollout_ref__actor__optim__lr_warmup_steps": 100,
        "critic__optim__lr_warmup_steps": 100,
    }
    return base_config(material, run_dir, **(settings | changes))


def poison_column(trainer: RayPPOTrainer, phase: str, column: str, *values: float) -> None:
    """The first entries of a column that a phase gives are `values` in the broken step."""
    original = getattr(trainer, phase)

    def poisoned(batch: DataProto) -> DataProtoFuture:
        given = original(batch).get()
        if trainer.global_step == BROKEN_STEP:
            given.batch[column][0, : len(values)] = torch.tensor(values)
        return DataProtoFuture.of(given)

    setattr(trainer, phase, poisoned)


def worker_of(group: Any) -> Any:
    return group._workers[group.name]


def poison_gradient(trainer: RayPPOTrainer, engine: Any) -> None:
    """The gradient of one weight is NaN in all optimizer steps of the broken step; the loss is finite."""
    weight = next(engine.model.parameters())
    weight.register_hook(lambda gradient: gradient * NAN if trainer.global_step == BROKEN_STEP else gradient)


class BrokenRewardFunction:
    """A reward manager of the user's own that once gives a reward that is not finite."""

    def __init__(self, trainer: RayPPOTrainer) -> None:
        self.trainer, self.inner = trainer, trainer.reward_fn

    def __call__(self, data: DataProto, return_dict: bool = False) -> dict[str, Any]:
        result = self.inner(data, return_dict=True)
        if self.trainer.global_step == BROKEN_STEP:
            result["reward_tensor"][1, 0] = float("inf")
        return result


def state_of(run_dir: Path, step: int) -> dict[str, Any]:
    """What the checkpoint of a step holds, but for the data's position and random states."""
    folder = run_dir / "checkpoints" / f"global_step_{step}"
    files = json.loads((folder / "manifest.json").read_text())["files"]
    state: dict[str, Any] = {
        name: file["sha256"] for name, file in files.items() if "/" in name and "/rng_" not in name
    }
    assert {"actor/model.safetensors", "actor/optimizer.pt"} <= state.keys()
    (driver,) = (path for path in folder.glob("*.json") if path.name != "manifest.json")
    kept = json.loads(driver.read_text())
    del kept["global_step"], kept["dataloader"], kept["version"]  # positions, which move with every step
    return state | kept


def parts_of(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By role; what is the driver's under an empty name."""
    parts: dict[str, dict[str, Any]] = {}
    for name, value in state.items():
        parts.setdefault(name.split("/")[0] if "/" in name else "", {})[name] = value
    return parts


def changed_parts(run_dir: Path, before: int, after: int) -> set[str]:
    old, new = parts_of(state_of(run_dir, before)), parts_of(state_of(run_dir, after))
    return {part for part in old if old[part] != new[part]}


EVERYTHING = {"actor", "critic", ""}
OF_COLUMNS = {
    "old_log_probs": lambda trainer: poison_column(trainer, "compute_old_log_probs", "old_log_probs", NAN),
    "ref_log_prob": lambda trainer: poison_column(trainer, "compute_ref_log_probs", "ref_log_prob", -float("inf")),
    "values": lambda trainer: poison_column(trainer, "compute_values", "values", NAN),
    # Finite, but its square is not: the KL in the reward is the first number that overflows.
    "token_level_rewards": lambda trainer: poison_column(trainer, "compute_ref_log_probs", "ref_log_prob", -3e38),
    # Finite, but the difference of two is not.
    "advantages": lambda trainer: poison_column(trainer, "compute_values", "values", -3e38, 3e38),
}


@pytest.mark.parametrize("column", OF_COLUMNS)
def test_a_step_with_a_column_that_is_not_finite_updates_nothing(material: Path, tmp_path: Path, column: str) -> None:
    kind = {"algorithm__kl_penalty": "mse"} if column == "token_level_rewards" else {}
    trainer = build_in_process(config(material, tmp_path, **kind))
    OF_COLUMNS[column](trainer)
    trainer.fit()
    check_the_skipped_step(tmp_path, column)


def check_the_skipped_step(run_dir: Path, column: str) -> None:
    assert changed_parts(run_dir, 1, 2) == set()
    assert changed_parts(run_dir, 2, 3) == EVERYTHING
    lines = read_metrics(run_dir)[-3:]
    assert [line.get("training/skipped_step") for line in lines] == [None, 1.0, None]
    assert lines[1][f"training/nonfinite/{column}"] >= 1.0
    assert "actor/pg_loss" in lines[0]
    assert not {name for name in lines[1] if name.startswith(("actor/pg", "actor/lr", "critic/vf_loss", "critic/lr"))}
    coefficients = [line["actor/reward_kl_penalty_coeff"] for line in (lines[0], lines[2])]
    assert coefficients[0] != coefficients[1], "the coefficient moved after step 1, and was kept over step 2"


def test_a_reward_of_a_users_manager_that_is_not_finite_updates_nothing(material: Path, tmp_path: Path) -> None:
    trainer = TaskRunner().build_trainer(
        complete_config(as_omegaconf(config(material, tmp_path))), InProcessWorkerGroup
    )
    trainer.reward_fn = BrokenRewardFunction(trainer)
    trainer.init_workers()
    trainer.fit()
    check_the_skipped_step(tmp_path, "token_level_scores")


def broken_judge(trainer: RayPPOTrainer) -> None:
    judge = worker_of(trainer.rm_wg)
    score = judge.score
    judge.score = lambda data: score(data) * (NAN if trainer.global_step == BROKEN_STEP else 1.0)


def test_a_reward_models_score_that_is_not_finite_updates_nothing(tmp_path: Path) -> None:
    material = make_mixed_material(tmp_path / "material")
    own = {key: value for key, value in config(material, tmp_path).items() if key.startswith(("trainer", "algorithm"))}
    trainer = build_in_process(
        mixed_config(material, tmp_path / "run") | own | {"trainer.default_local_dir": str(tmp_path / "run")}
    )
    broken_judge(trainer)
    trainer.fit()
    check_the_skipped_step(tmp_path / "run", "token_level_scores")


def test_a_reward_models_score_that_is_not_finite_stops_the_run_if_it_may_not_skip(tmp_path: Path) -> None:
    material = make_mixed_material(tmp_path / "material")
    trainer = build_in_process(mixed_config(material, tmp_path / "run"))
    broken_judge(trainer)
    with pytest.raises(RewardError, match=r"a score that is not finite.*reward_model.model.path"):
        trainer.fit()


def test_a_group_whose_scores_are_not_finite_is_not_filtered_out_but_skips_the_step(
    material: Path, tmp_path: Path
) -> None:
    groups = {
        "algorithm__adv_estimator": "grpo",
        "actor_rollout_ref__rollout__n": 2,
        "algorithm__filter_groups__enable": True,
        "algorithm__filter_groups__metric": "seq_reward",
    }
    for on_nonfinite in ("skip", "stop"):
        run_dir = tmp_path / on_nonfinite
        settings = config(material, run_dir, trainer__on_nonfinite=on_nonfinite, **groups)
        trainer = TaskRunner().build_trainer(complete_config(as_omegaconf(settings)), InProcessWorkerGroup)
        trainer.reward_fn = BrokenRewardFunction(trainer)
        trainer.init_workers()
        if on_nonfinite == "skip":
            trainer.fit()
            assert changed_parts(run_dir, 1, 2) == set()
            assert read_metrics(run_dir)[2]["training/skipped_step"] == 1.0
        else:
            with pytest.raises(NonFiniteError, match="step 2: token_level_scores is not finite at 1 of"):
                trainer.fit()


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_gradient_that_is_not_finite_leaves_its_role_and_the_kl_coefficient_as_they_were(
    material: Path, tmp_path: Path, role: str
) -> None:
    """The other role learns: its update may run on other devices at the same time."""
    trainer = build_in_process(config(material, tmp_path))
    group = {"actor": trainer.actor_rollout_wg, "critic": trainer.critic_wg}[role]
    poison_gradient(trainer, worker_of(group).trained_engine)
    trainer.fit()
    assert changed_parts(tmp_path, 1, 2) == {"actor", "critic"} - {role}
    assert changed_parts(tmp_path, 2, 3) == EVERYTHING
    lines = read_metrics(tmp_path)[-3:]
    other = ({"actor", "critic"} - {role}).pop()
    assert [line[f"{role}/skipped_updates"] > 0 for line in lines] == [False, True, False]
    assert [line[f"{other}/skipped_updates"] for line in lines] == [0.0, 0.0, 0.0]
    assert lines[1][f"{role}/nonfinite/gradient"] == lines[1][f"{role}/skipped_updates"]
    assert f"{role}/lr" not in lines[1]
    assert lines[1]["actor/reward_kl_penalty_coeff"] == lines[2]["actor/reward_kl_penalty_coeff"]


def test_other_optimizer_steps_of_an_update_go_on(material: Path, tmp_path: Path) -> None:
    """Advantages of 3e38 overflow in the loss of one mini-batch of two."""
    trainer = build_in_process(config(material, tmp_path))
    update_actor = trainer.update_actor

    def overflowing(step: Step) -> Any:
        if step.number == BROKEN_STEP:
            step.batch.batch["advantages"][:4] = 3e38
        return update_actor(step)

    trainer.update_actor = overflowing
    trainer.fit()
    lines = read_metrics(tmp_path)[-3:]
    assert [line["actor/skipped_updates"] for line in lines] == [0.0, 2.0, 0.0]
    assert lines[1]["actor/nonfinite/loss"] == 2.0
    assert "actor/pg_loss" in lines[1]
    assert changed_parts(tmp_path, 1, 2) == {"actor", "critic"}


def test_a_value_that_is_not_finite_ends_the_run_with_its_name(material: Path, tmp_path: Path) -> None:
    trainer = build_in_process(config(material, tmp_path, trainer__on_nonfinite="stop"))
    OF_COLUMNS["values"](trainer)
    with pytest.raises(NonFiniteError, match="step 2: values is not finite at 1 of 64 places, the first in row 0"):
        trainer.fit()


def test_a_run_resumed_at_the_skipped_step_goes_on_as_it_did(material: Path, tmp_path: Path) -> None:
    trainer = build_in_process(config(material, tmp_path))
    OF_COLUMNS["values"](trainer)
    trainer.fit()
    last = state_of(tmp_path, 3)
    path = str(tmp_path / "checkpoints" / "global_step_2")
    resumed = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": path}
    build_in_process(config(material, tmp_path, **resumed)).fit()
    assert state_of(tmp_path, 3) == last
