"""What code written for verl finds on a TaskRunner and a trainer."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from omegaconf.errors import ReadonlyConfigError

from paceline.config import PPOConfig
from paceline.errors import ConfigError
from paceline.protocol import DataProto
from paceline.single_controller.ray import RayWorkerGroup
from paceline.trainer.main_ppo import TaskRunner
from paceline.trainer.ppo.known_names import KnownNames, check_device_name, readable_config
from paceline.trainer.ppo.ray_trainer import RayPPOTrainer
from paceline.trainer.ppo.roles import Role
from paceline.workers.engine_workers import ActorRolloutRefWorker

KL = {"algorithm": {"use_kl_in_reward": True}}


class Named(KnownNames):
    """The state of a trainer that the names speak of."""

    global_step = 7
    use_reference = True
    use_reward_model = False
    actor_rollout_wg = SimpleNamespace(world_size=2)

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.checkpoints = SimpleNamespace(begin=self.calls.append)

    def validate(self) -> dict[str, float]:
        return {"val/score": 0.5}

    def finish_checkpoint(self) -> None:
        self.calls.append("finished")


def test_names_of_state_are_other_names() -> None:
    named = Named()
    assert (named.global_steps, named.use_reference_policy, named.use_rm) == (7, True, False)
    assert named._validate() == {"val/score": 0.5}
    named._save_checkpoint()
    assert named.calls == [7, "finished"]
    assert issubclass(RayPPOTrainer, KnownNames)


def test_balance_batch_changes_places_so_that_shards_are_alike() -> None:
    lengths = [9, 8, 1, 2]
    mask = torch.tensor([[1] * n + [0] * (9 - n) for n in lengths])
    batch = DataProto.from_dict({"attention_mask": mask}, {"row": np.arange(4)})
    metrics: dict[str, float] = {}
    Named()._balance_batch(batch, metrics)
    assert batch.non_tensor_batch["row"].tolist() == [0, 2, 1, 3]  # 9 + 1 and 8 + 2
    assert metrics == {"global_seqlen/balanced_min": 10, "global_seqlen/balanced_max": 10}


def test_the_hooks_of_a_task_runner_take_and_give_what_people_know() -> None:
    runner = TaskRunner()
    assert runner.add_actor_rollout_worker(KL) == (ActorRolloutRefWorker, RayWorkerGroup)

    class Mine(ActorRolloutRefWorker):
        pass

    runner.add_ref_policy_worker(KL, Mine)
    assert runner.role_worker_mapping[Role.RefPolicy] is Mine


def test_the_configuration_of_a_trainer_reads_as_omegaconf_does() -> None:
    config = readable_config(PPOConfig())
    assert config.trainer.get("nnodes") == config["trainer"]["nnodes"] == 1
    assert config.get("a_key_of_theirs", 3) == 3
    assert OmegaConf.to_container(config, resolve=True)["algorithm"]["adv_estimator"] == "gae"
    assert OmegaConf.select(config, "critic.optim.lr") == 1e-5
    with pytest.raises(ReadonlyConfigError):
        config.trainer.nnodes = 2
    with pytest.raises(ConfigError, match=r"device_name=cuda, but trainer\.device=None"):
        check_device_name(PPOConfig(), "cuda")
