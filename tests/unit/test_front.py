"""The classes of `from paceline import PPO, GRPO, SFT`: the configuration that they make, and its errors."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline import DPO, GRPO, PPO, SFT, Distill, FinishedRun, RewardModel
from paceline.config import PPOConfig, SFTConfig
from paceline.errors import ConfigError
from paceline.rewards import custom
from tests.stand_ins import write_model_folder, write_parquet


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "model")


def reward_of_this_file(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0


def test_grpo_compares_eight_responses_without_a_critic(model: Path, tmp_path: Path) -> None:
    prompts = write_parquet(tmp_path / "prompts.parquet")
    front = GRPO(model=model, train=prompts, learning_rate=1e-5, steps=3, output=tmp_path / "run", batch_size=4)
    cfg = front.check()
    assert isinstance(cfg, PPOConfig)
    assert (cfg.algorithm.adv_estimator, cfg.actor_rollout_ref.rollout.n) == ("grpo", 8)
    assert cfg.actor_rollout_ref.actor.optim.lr == 1e-5
    assert cfg.actor_rollout_ref.actor.ppo_mini_batch_size == cfg.data.train_batch_size == 4
    assert cfg.trainer.total_training_steps == 3
    assert cfg.trainer.default_local_dir == str(tmp_path / "run")
    assert PPO(model=model, train=prompts, output=tmp_path / "ppo").check().algorithm.adv_estimator == "gae"


def test_a_teacher_or_several_take_the_place_of_rewards(model: Path, tmp_path: Path) -> None:
    prompts = write_parquet(tmp_path / "prompts.parquet")
    front = Distill(model=model, teacher=model, train=prompts, n=2, output=tmp_path / "run")
    cfg = front.check()
    assert (cfg.distillation.enabled, cfg.distillation.distillation_loss.use_task_rewards) == (True, False)
    assert [teacher.model_path for teacher in cfg.distillation.teacher_models.values()] == [str(model)]
    assert cfg.trainer.experiment_name == "distill"
    several = {"math": model, "code": model}
    front = Distill(
        model=model, teacher=several, train=prompts, loss="forward_kl_topk", topk=4, output=tmp_path / "two"
    )
    cfg = front.check()
    assert [teacher.key for teacher in cfg.distillation.teacher_models.values()] == ["math", "code"]
    assert (cfg.distillation.distillation_loss.loss_mode, cfg.distillation.distillation_loss.topk) == (
        "forward_kl_topk",
        4,
    )
    with pytest.raises(ConfigError, match="there is no folder /no/teacher"):
        Distill(model=model, teacher="/no/teacher", train=prompts, output=tmp_path / "three").check()


def test_rows_and_further_keys(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "response": "2"}]
    front = SFT(model=model, train=rows, val=rows, output=tmp_path / "run", config={"trainer.save_freq": 7})
    cfg = front.check()
    assert isinstance(cfg, SFTConfig)
    assert cfg.trainer.save_freq == 7
    written = [json.loads(line) for line in Path(str(cfg.data.train_files)).read_text().splitlines()]
    assert written == rows
    assert cfg.data.val_files == str(tmp_path / "run/inputs/val.jsonl")


@pytest.mark.parametrize("front", [SFT, RewardModel, DPO, GRPO])
def test_mistakes_are_those_of_the_command(front: type, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        front(model="/no/model", train="/no/file.parquet", output=tmp_path, config={"trainer.sed": 1}).check()
    text = str(caught.value)
    assert "path: there is no folder /no/model" in text
    assert "data.train_files: there is no file /no/file.parquet" in text
    assert "trainer.sed is not a key; did you mean trainer.seed?" in text


def test_a_function_of_a_module_is_found_in_its_file(model: Path, tmp_path: Path) -> None:
    front = GRPO(model=model, train=write_parquet(tmp_path / "p.parquet"), reward=reward_of_this_file, output=tmp_path)
    reward = front.check().custom_reward_function
    assert (reward.path, reward.name) == (__file__, "reward_of_this_file")


def test_a_function_from_anywhere_travels_with_what_it_refers_to(model: Path, tmp_path: Path) -> None:
    bonus = 0.25

    def by_length(data_source, solution_str, ground_truth, extra_info=None):
        return len(solution_str) + bonus

    GRPO(model=model, train=write_parquet(tmp_path / "p.parquet"), reward=by_length, output=tmp_path / "run")
    loaded = custom.load_custom_reward(tmp_path / "run/inputs/reward.py")
    assert loaded.fn(data_source="s", solution_str="abc", ground_truth=None) == 3.25


def test_no_function_is_said_to_be_none(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reward is 'accuracy'; give a function"):
        GRPO(model=model, train="p.parquet", reward="accuracy", output=tmp_path)  # type: ignore[arg-type]


def test_a_run_without_a_checkpoint_has_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"set trainer\.save_freq"):
        _ = FinishedRun(tmp_path).model
    assert FinishedRun(tmp_path).metrics == []


def test_every_argument_of_a_front_is_in_its_signature() -> None:
    for front in (PPO, SFT, RewardModel, DPO):
        parameters = inspect.signature(front.__init__).parameters.values()
        assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters)


def test_the_names_of_the_package_exist_and_importing_them_is_quick() -> None:
    assert all(hasattr(paceline, name) for name in paceline.__all__)
    program = (
        "import sys; from paceline import PPO, GRPO, SFT; print({'torch', 'ray', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
