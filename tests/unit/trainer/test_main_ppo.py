from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from paceline.config import PPOConfig
from paceline.config.load import load_config, to_dictconfig
from paceline.errors import ConfigError
from paceline.trainer import main_ppo
from paceline.trainer.main_ppo import TaskRunner, run_ppo
from paceline.trainer.ppo.roles import Role
from paceline.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker


def command_line(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline.trainer.main_ppo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


# ------------------------------------------------------------------------------------------------- the command line


def test_help_takes_less_than_a_second(tmp_path: Path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = command_line("--help", cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Seconds of CPU, which a busy machine does not change as it does seconds on the wall.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
    assert "actor_rollout_ref.actor.clip_ratio=0.2" in result.stdout
    assert result.returncode == 0


def test_bad_overrides_are_listed_at_once_without_a_traceback(tmp_path: Path):
    result = command_line(
        "trainer.device=cpu",
        "trainer.nodes=2",
        "+actor_rollout_ref.actor.clip_ration=0.1",
        "trainer.seed=x",
        "algorithm.gamma=5",
        cwd=tmp_path,
    )
    assert result.returncode == 2
    assert "trainer.nodes is not a key; did you mean trainer.nnodes?" in result.stderr
    assert "clip_ration is not a key; did you mean actor_rollout_ref.actor.clip_ratio?" in result.stderr
    assert "trainer.seed wants a whole number; got 'x' (str)." in result.stderr
    assert "algorithm.gamma=5.0 is out of range" in result.stderr
    assert "Traceback" not in result.stderr + result.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_prints_the_plan_and_leaves_no_file(train_command, good: dict[str, Any], tmp_path: Path):
    before = set(tmp_path.iterdir())
    result = train_command(
        "trainer.device=cpu",
        "trainer.dry_run=True",
        "trainer.n_gpus_per_node=2",
        "trainer.placement.name=split",
        f"data.train_files={good['data']['train_files']}",
        f"actor_rollout_ref.model.path={tmp_path}",
        "ray_kwargs.ray_init.num_cpus=2",
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert "responses per optimizer step" in result.stdout
    assert "| actor_rollout_ref_pool | critic_pool |" in result.stdout
    assert set(tmp_path.iterdir()) == before


# ------------------------------------------------------------------------------------------------------- run_ppo


def test_run_ppo_raises_all_problems_before_ray_starts(monkeypatch: pytest.MonkeyPatch):
    import ray

    monkeypatch.setattr(ray, "init", lambda **kwargs: pytest.fail("Ray was started"))
    with pytest.raises(ConfigError) as caught:
        run_ppo({"trainer": {"nnodes": 0}, "algorithm": {"adv_estimater": "gae"}})
    assert len(caught.value.problems) == 4  # and no training file, and no model


def test_run_ppo_refuses_what_ray_init_does_not_take(good: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"ray_init.num_cpu is not an argument of ray.init; did you mean num_cpus\?"):
        run_ppo({**good, "ray_kwargs": {"ray_init": {"num_cpu": 2}}})


def test_a_dry_run_from_python_starts_nothing(good: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch):
    import ray

    monkeypatch.setattr(ray, "init", lambda **kwargs: pytest.fail("Ray was started"))
    run_ppo(OmegaConf.create({**good, "trainer": {"dry_run": True}}))
    assert "global_pool" in capsys.readouterr().out


def test_a_dry_run_lists_what_became_of_keys_of_verls_also_where_problems_follow(
    good: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    asked = {**good, "trainer": {"dry_run": True}, "model_engine": "dp", "global_profiler": {"steps": None}}
    run_ppo(OmegaConf.create(asked))
    assert "Taken, because it is so anyway:\n  model_engine=dp: FSDP trains" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="async_training"):
        run_ppo(OmegaConf.create({**asked, "async_training": {"k": 1}}))
    assert "global_profiler.steps=null: no profiler is on." in capsys.readouterr().out


def test_a_run_begins_with_its_plan(
    good: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch, caplog: pytest.LogCaptureFixture
):
    class StartedError(Exception):
        pass

    def start(cfg: Any) -> None:
        raise StartedError

    monkeypatch.setattr(main_ppo, "running_ray", start)
    with pytest.raises(StartedError), caplog.at_level("INFO"):
        run_ppo({**good, "model_engine": "dp"})
    assert "so anyway: model_engine" in caplog.text
    shown = capsys.readouterr().out
    assert "responses per optimizer step" in shown
    assert "Placement: colocated, 1 x 1 devices (cpu)" in shown
    assert "actor, rollout" in shown


# ------------------------------------------------------------------------------------------------------- devices


# --------------------------------------------------------------------------------------------------- TaskRunner


def prepared(config: dict[str, Any]) -> TaskRunner:
    runner = TaskRunner()
    runner.add_actor_rollout_worker(config)
    runner.add_critic_worker(config)
    runner.add_ref_policy_worker(config)
    runner.add_reward_model_worker(config)
    return runner


def test_a_task_runner_has_the_roles_that_the_config_asks_for():
    runner = prepared({})
    assert runner.role_worker_mapping == {Role.ActorRollout: ActorRolloutRefWorker, Role.Critic: TrainingWorker}
    with_reference = prepared({"algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": True}})
    assert with_reference.role_worker_mapping == {
        Role.ActorRollout: ActorRolloutRefWorker,
        Role.RefPolicy: ActorRolloutRefWorker,
    }


@pytest.mark.parametrize(
    ("trainer", "spec"),
    [
        ({"n_gpus_per_node": 4, "nnodes": 2}, {"global_pool": [4, 4]}),
        (
            {"n_gpus_per_node": 4, "nnodes": 2, "placement": {"name": "split"}},
            {"actor_rollout_ref_pool": [4], "critic_pool": [4]},
        ),
        (
            {"n_gpus_per_node": 4, "placement": {"name": "split"}},
            {"actor_rollout_ref_pool": [2], "critic_pool": [2]},
        ),
        (
            {"n_gpus_per_node": 3, "placement": {"name": "split", "critic_devices": 1}},
            {"actor_rollout_ref_pool": [2], "critic_pool": [1]},
        ),
    ],
)
def test_a_task_runner_builds_the_pools(trainer: dict[str, Any], spec: dict[str, list[int]]):
    config = {"trainer": trainer}
    manager = prepared(config).init_resource_pool_mgr(config)
    assert manager.resource_pool_spec == spec
    assert set(manager.mapping.values()) == set(spec)


@pytest.mark.parametrize(("estimator", "placement", "pool"), [
    ("gae", "colocated", "global_pool"),
    ("gae", "split", "critic_pool"),
    ("grpo", "split", "critic_pool"),
])  # fmt: skip
def test_a_reward_model_is_beside_the_critic_or_alone_on_its_pool(estimator: str, placement: str, pool: str):
    config = {
        "algorithm": {"adv_estimator": estimator},
        "reward_model": {"enable": True},
        "trainer": {"placement": {"name": placement}, "n_gpus_per_node": 2},
    }
    runner = prepared(config)
    assert runner.mapping[Role.RewardModel] == pool
    assert pool in runner.init_resource_pool_mgr(config).resource_pool_spec


def test_a_task_runner_reads_the_configuration_once(monkeypatch: pytest.MonkeyPatch):
    reads = []
    monkeypatch.setattr(main_ppo, "load_config", lambda config: (reads.append(config), load_config(config))[1])
    config = to_dictconfig(PPOConfig())
    prepared(config).init_resource_pool_mgr(config)
    assert reads == [config]
    other = to_dictconfig(load_config({"trainer": {"n_gpus_per_node": 2}}))
    assert prepared(other).init_resource_pool_mgr(other).resource_pool_spec == {"global_pool": [2]}
