"""Devices are divided into pools, and what the sections leave open follows from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config import SFTConfig, TrainerConfig
from paceline.config.derived import (
    actor_goes_by_tokens,
    backend_for,
    critic_config,
    policy_config,
    reward_model_config,
    run_dir_of,
    with_backends,
    with_trainer_keys,
)
from paceline.config.load import load_config
from paceline.errors import ConfigError
from paceline.trainer.ppo.placement import (
    idle_devices,
    plan_pools,
    role_to_pool,
)
from tests.stand_ins import config_with as config

SPLIT = "trainer.placement.name=split"
ON = "trainer.placement.rollout_on"
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4")


@pytest.mark.parametrize(
    ("overrides", "pools"),
    [
        (["trainer.n_gpus_per_node=4"], {"global_pool": [4]}),
        (["trainer.n_gpus_per_node=4", "trainer.nnodes=2"], {"global_pool": [4, 4]}),
        (["trainer.n_gpus_per_node=4", SPLIT], {"actor_rollout_ref_pool": [2], "critic_pool": [2]}),
        (["trainer.nnodes=2", "trainer.n_gpus_per_node=4", SPLIT], {"actor_rollout_ref_pool": [4], "critic_pool": [4]}),
        (["trainer.nnodes=4", SPLIT], {"actor_rollout_ref_pool": [1, 1], "critic_pool": [1, 1]}),
        (
            ["trainer.n_gpus_per_node=5", SPLIT, "trainer.placement.critic_devices=2"],
            {"actor_rollout_ref_pool": [3], "critic_pool": [2]},
        ),
        (
            ["trainer.nnodes=3", "trainer.n_gpus_per_node=2", SPLIT, "trainer.placement.critic_devices=1"],
            {"actor_rollout_ref_pool": [2, 2], "critic_pool": [2]},
        ),
        (
            ["trainer.n_gpus_per_node=4", "trainer.placement.rollout_devices=1"],
            {"global_pool": [3], "rollout_pool": [1]},
        ),
        (
            ["trainer.nnodes=4", "trainer.n_gpus_per_node=2", SPLIT, "trainer.placement.rollout_devices=2"],
            {"actor_rollout_ref_pool": [2], "critic_pool": [2], "rollout_pool": [2, 2]},
        ),
        (
            ["trainer.n_gpus_per_node=4", SPLIT, *GRPO, f"{ON}=[actor_rollout_ref_pool,critic_pool]"],
            {"actor_rollout_ref_pool": [2], "critic_pool": [2]},
        ),
    ],
)
def test_devices_are_divided_into_pools(overrides: list[str], pools: dict[str, Any]):
    cfg = config(*overrides)
    assert plan_pools(cfg) == pools
    assert idle_devices(cfg) == 0


SCORED = ("reward_model.enable=True", "reward_model.model.path=org/rm", "reward_model.enable_resource_pool=True")


@pytest.mark.parametrize(
    ("overrides", "pools"),
    [
        ([], {"global_pool": [4], "reward_model_pool": [4]}),
        (["reward_model.n_gpus_per_node=2", "reward_model.nnodes=3"], {"reward_model_pool": [2, 2, 2]}),
        ([SPLIT], {"critic_pool": [2], "reward_model_pool": [4]}),
        ([SPLIT, *GRPO], {"actor_rollout_ref_pool": [2], "reward_model_pool": [4]}),
    ],
)
def test_the_reward_model_may_have_a_pool_beside_the_others(overrides: list[str], pools: dict[str, Any]) -> None:
    cfg = config("trainer.n_gpus_per_node=4", *SCORED, *overrides)
    assert pools.items() <= plan_pools(cfg).items()
    assert ("critic_pool" in plan_pools(cfg)) == (SPLIT in overrides and not set(GRPO) & set(overrides))
    assert role_to_pool(cfg)["RewardModel"] == "reward_model_pool"
    assert role_to_pool(config(*SCORED, "reward_model.enable_resource_pool=False"))["RewardModel"] == "global_pool"
    alone = config("trainer.n_gpus_per_node=4", *SCORED, "reward_model.n_gpus_per_node=1")
    assert with_backends(alone).reward_model.strategy == "local"


@pytest.mark.parametrize(
    "overrides",
    [
        [SPLIT],
        ["trainer.n_gpus_per_node=3", SPLIT],
        ["trainer.nnodes=3", "trainer.n_gpus_per_node=2", SPLIT],
        ["trainer.n_gpus_per_node=4", SPLIT, "trainer.placement.critic_devices=4"],
        ["trainer.placement.rollout_devices=1"],
        ["trainer.n_gpus_per_node=2", SPLIT, "trainer.placement.rollout_devices=1"],
        ["trainer.n_gpus_per_node=4", SPLIT, "trainer.placement.rollout_devices=1"],
    ],
)
def test_what_does_not_divide_is_an_error(overrides: list[str]):
    with pytest.raises(ConfigError):
        plan_pools(config(*overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{ON}=[critic_pool]"], "names critic_pool, which this placement does not have. The pools are: global_pool."),
        ([SPLIT, f"{ON}=[]"], "names no pool. The pools are: actor_rollout_ref_pool, critic_pool."),
        ([SPLIT, f"{ON}=[critic_pool,critic_pool]"], "name each pool once"),
        (
            [f"{ON}=[global_pool]", "trainer.placement.rollout_devices=1"],
            "leaves rollout_pool idle; add it, or leave trainer.placement.rollout_devices null.",
        ),
        (
            [SPLIT, "trainer.placement.rollout_devices=2", f"{ON}=[critic_pool,rollout_pool]"],
            "name each pool once, actor_rollout_ref_pool and at most one more.",
        ),
    ],
)
def test_pools_that_can_not_generate_are_an_error(overrides: list[str], message: str):
    with pytest.raises(ConfigError) as caught:
        role_to_pool(config("trainer.n_gpus_per_node=4", *overrides))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("trainer", "actor", "critic"),
    [
        ({}, "local", "local"),
        ({"n_gpus_per_node": 2}, "fsdp2", "fsdp2"),
        ({"n_gpus_per_node": 2, "placement": {"name": "split"}}, "local", "local"),
        ({"n_gpus_per_node": 3, "placement": {"name": "split", "critic_devices": 1}}, "fsdp2", "local"),
        ({"n_gpus_per_node": 2, "placement": {"rollout_devices": 1}}, "local", "local"),
        ({"nnodes": 2}, "fsdp2", "fsdp2"),
    ],
)
def test_a_backend_that_is_not_named_is_local_on_one_device_and_fsdp2_on_more(
    trainer: dict[str, Any], actor: str, critic: str
) -> None:
    cfg = with_backends(load_config({"trainer": trainer}))
    found = (cfg.actor_rollout_ref.actor.strategy, cfg.critic.strategy, cfg.reward_model.strategy)
    assert found == (actor, critic, critic)


def test_a_backend_that_is_named_is_used() -> None:
    assert [backend_for("fsdp", 1), backend_for("local", 2)] == ["fsdp", "local"]
    cfg = with_backends(load_config({"critic": {"strategy": "fsdp2"}}))
    assert (cfg.actor_rollout_ref.actor.strategy, cfg.critic.strategy) == ("local", "fsdp2")


@pytest.mark.parametrize(
    ("actor", "critic", "expected"),
    [
        ({}, {}, (True, True)),
        ({"ppo_micro_batch_size_per_gpu": 4}, {}, (False, False)),
        ({"ppo_micro_batch_size_per_gpu": 4, "use_dynamic_bsz": True}, {}, (True, True)),
        ({"use_dynamic_bsz": False}, {}, (False, False)),
        ({}, {"ppo_micro_batch_size_per_gpu": 4}, (True, False)),
        ({}, {"forward_micro_batch_size_per_gpu": 4}, (True, False)),
        ({"use_dynamic_bsz": False}, {"use_dynamic_bsz": True}, (False, True)),
    ],
)
def test_micro_batches_go_by_tokens_unless_their_rows_are_set(
    actor: dict[str, Any], critic: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    cfg = load_config({"actor_rollout_ref": {"actor": actor}, "critic": critic})
    assert (actor_goes_by_tokens(cfg.actor_rollout_ref.actor), critic_config(cfg).use_dynamic_bsz) == expected
    assert reward_model_config(cfg).use_dynamic_bsz == expected[0]


def test_streaming_has_vllm_begin_no_step_ahead_of_its_time() -> None:
    """With asynchronous scheduling, its default on GPUs, new weights would come in the middle of a step."""
    streaming, vllm = "trainer.schedule.name=streaming", "actor_rollout_ref.rollout.name=vllm"
    more = "actor_rollout_ref.rollout.engine_kwargs.vllm.dtype=bfloat16"
    for overrides, expected in (
        ([vllm, more, streaming], {"async_scheduling": False, "dtype": "bfloat16"}),
        ([vllm, more], {"dtype": "bfloat16"}),
        ([streaming], {}),
    ):
        assert policy_config(config(*overrides)).rollout.engine_kwargs.vllm == expected


def test_a_run_that_names_no_folder_has_one_by_project_and_experiment() -> None:
    named = TrainerConfig(project_name="sums", experiment_name="first")
    assert run_dir_of(named) == Path("runs/sums/first")
    assert run_dir_of(TrainerConfig(default_local_dir="~/here")) == Path.home() / "here"


def test_keys_of_the_trainer_change_in_a_copy_of_any_kind_of_run() -> None:
    before = SFTConfig()
    after = with_trainer_keys(before, device="cpu", resume_mode="disable")
    assert (after.trainer.device, after.trainer.resume_mode) == ("cpu", "disable")
    assert before == SFTConfig()
    assert after.model is before.model
