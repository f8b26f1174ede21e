from __future__ import annotations

from paceline.trainer.ppo.placement import (
    batch_table,
    idle_devices,
    placement_picture,
    plan_pools,
    role_to_pool,
    update_plans,
)
from tests.stand_ins import config_with as config

SPLIT = "trainer.placement.name=split"
ON = "trainer.placement.rollout_on"
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4")


def test_grpo_in_split_placement_builds_no_pool_for_the_critic_that_it_has_not():
    cfg = config("trainer.n_gpus_per_node=4", SPLIT, *GRPO)
    assert plan_pools(cfg) == {"actor_rollout_ref_pool": [2]}
    assert role_to_pool(cfg) == {"ActorRollout": "actor_rollout_ref_pool"}
    assert idle_devices(cfg) == 2
    assert "not used: grpo has no critic" in placement_picture(cfg)


def test_roles_follow_the_algorithm_and_the_placement():
    assert role_to_pool(config()) == {"ActorRollout": "global_pool", "Critic": "global_pool"}
    assert role_to_pool(config("actor_rollout_ref.actor.use_kl_loss=true", *GRPO)) == {
        "ActorRollout": "global_pool",
        "RefPolicy": "global_pool",
    }
    assert role_to_pool(config("trainer.n_gpus_per_node=2", SPLIT, "algorithm.use_kl_in_reward=true")) == {
        "ActorRollout": "actor_rollout_ref_pool",
        "RefPolicy": "actor_rollout_ref_pool",
        "Critic": "critic_pool",
    }


def test_with_lora_the_actor_is_its_own_reference():
    lora = "actor_rollout_ref.model.lora_rank=8"
    assert role_to_pool(config(lora)) == {"ActorRollout": "global_pool", "Critic": "global_pool"}
    with_reference = config(lora, "actor_rollout_ref.actor.use_kl_loss=true", *GRPO)
    assert role_to_pool(with_reference) == {"ActorRolloutRef": "global_pool"}
    assert update_plans(with_reference)["actor"].devices == 1
    assert "actor, rollout, reference" in placement_picture(with_reference)


def test_update_plans_count_responses_per_device():
    plans = update_plans(
        config(
            "trainer.n_gpus_per_node=3",
            SPLIT,
            "trainer.placement.critic_devices=1",
            "data.train_batch_size=32",
            "data.max_prompt_length=10",
            "data.max_response_length=20",
            "actor_rollout_ref.rollout.n=3",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=5",
            "actor_rollout_ref.actor.ppo_epochs=2",
            "critic.ppo_mini_batch_size=16",
        )
    )
    actor, critic = plans["actor"], plans["critic"]
    assert (actor.devices, actor.mini_batches, actor.optimizer_steps) == (2, 4, 8)
    assert (actor.mini_batch, actor.per_device, actor.micro_batches) == (24, 12, 3)
    assert actor.tokens_per_micro_batch == 5 * 30
    assert (critic.devices, critic.mini_batches, critic.optimizer_steps) == (1, 2, 4)
    assert (critic.mini_batch, critic.per_device, critic.micro_batches) == (48, 48, 6)


def test_a_micro_batch_is_never_larger_than_what_a_device_has():
    plan = update_plans(config("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4"))["actor"]
    assert (plan.per_device, plan.micro_batch, plan.micro_batches) == (4, 4, 1)


def test_the_batch_table_says_what_every_number_counts():
    table = batch_table(config("trainer.n_gpus_per_node=3", "actor_rollout_ref.rollout.n=2"))
    rows = {line.split("  ")[1]: line for line in table.splitlines() if line.startswith("  ")}
    assert "2,048  prompts x rollout.n (2)" in rows["responses"]
    assert "512  256 prompts x 2, over 3 devices" in rows["responses per optimizer step"]
    assert "171  of an optimizer step, at most" in rows["responses per device"]
    assert "Update of the critic" in table
    assert "Update of the critic" not in batch_table(config(*GRPO))


def test_the_plan_says_how_token_losses_are_aggregated():
    gspo = "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"
    own = "(its own way; loss_agg_mode is not set)"
    assert f"Policy loss vanilla, aggregated by token-mean {own}" in batch_table(config())
    assert f"Policy loss gspo, aggregated by seq-mean-token-mean {own}" in batch_table(config(gspo))
    asked = "actor_rollout_ref.actor.loss_agg_mode=token-mean"
    assert "Policy loss gspo, aggregated by token-mean (loss_agg_mode)" in batch_table(config(gspo, asked))


def test_micro_batches_by_tokens_have_no_fixed_number():
    keys = ("actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=5000")
    actor, critic = batch_table(config(*keys)).split("Update of the ")[1:]
    assert "5,000  per device, at most; as many responses as fit" in actor
    assert "micro-batches per device" not in actor
    assert "4,096  per device, at most" in critic  # it follows the actor, with a budget of its own
    rows = batch_table(config(*keys, "critic.use_dynamic_bsz=False")).split("Update of the ")[2]
    assert "micro-batches per device" in rows


def test_the_picture_shows_nodes_pools_devices_and_roles():
    picture = placement_picture(config("trainer.n_gpus_per_node=3", SPLIT, "trainer.placement.critic_devices=1"))
    assert picture.splitlines() == [
        "Placement: split, 1 x 3 devices",
        "",
        "  node 0",
        "  +------------------------+-------------+",
        "  | actor_rollout_ref_pool | critic_pool |",
        "  | [0] [1]                | [2]         |",
        "  | actor, rollout         | critic      |",
        "  +------------------------+-------------+",
    ]


def test_the_picture_has_the_reward_models_own_pool_wherever_that_may_be() -> None:
    own = ("reward_model.enable=True", "reward_model.model.path=org/rm", "reward_model.enable_resource_pool=True")
    picture = placement_picture(config("trainer.n_gpus_per_node=2", *own, "reward_model.nnodes=2"))
    assert (
        picture.count("  on any node\n  +-------------------+\n  | reward_model_pool |\n  | [0] [1]           |") == 2
    )


def test_the_picture_has_a_box_for_every_node():
    picture = placement_picture(config("trainer.nnodes=2", "trainer.n_gpus_per_node=2", SPLIT, "trainer.device=cpu"))
    assert "2 x 2 devices (cpu)" in picture
    assert picture.index("node 0") < picture.index("actor_rollout_ref_pool") < picture.index("node 1")
    assert picture.index("node 1") < picture.index("critic_pool")


def test_the_rollout_is_on_the_pools_that_the_config_names():
    both = config("trainer.n_gpus_per_node=2", SPLIT, f"{ON}=[critic_pool,actor_rollout_ref_pool]")
    assert role_to_pool(both) == {
        "ActorRollout": "actor_rollout_ref_pool",
        "Critic": "critic_pool",
        "Rollout": "critic_pool",
    }
    apart = config("trainer.n_gpus_per_node=2", "trainer.placement.rollout_devices=1")
    assert role_to_pool(apart) == {"Actor": "global_pool", "Critic": "global_pool", "Rollout": "rollout_pool"}
    assert update_plans(apart)["actor"].devices == 1
    assert "| actor, critic | rollout      |" in placement_picture(apart)
