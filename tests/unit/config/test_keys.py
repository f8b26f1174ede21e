"""The keys as data: which there are, and which one was meant."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from paceline.config.field_rules import Names, OnlyWith
from paceline.config.keys import is_known_key, known_keys, value_of
from paceline.config.load import load_config
from paceline.errors import ConfigError


@pytest.mark.parametrize(
    ("unknown", "suggested"),
    [
        ("trainer.rollout_is_threshold", "algorithm.rollout_correction.rollout_is_threshold"),
        ("data.sampling", None),
        ("data.max_prompt_len", "data.max_prompt_length"),
        ("critic.n", None),
        ("actor_rollout_ref.actor.clip_ration", "actor_rollout_ref.actor.clip_ratio"),
        ("actor_rollout_ref.rollout.temprature", "actor_rollout_ref.rollout.temperature"),
        ("trainer.adv_estimator", "algorithm.adv_estimator"),
        ("algorithm.critic_warmup", "trainer.critic_warmup"),
        ("actor_rollout_ref.actor.ppo_micro_batch_per_gpu", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        ("actor_rollout_ref.temperature", "actor_rollout_ref.rollout.temperature"),
        ("trainr", "trainer"),
    ],
)
def test_a_suggestion_is_made_for_a_really_similar_key_and_for_no_other(unknown: str, suggested: str | None):
    with pytest.raises(ConfigError) as caught:
        load_config(OmegaConf.from_dotlist([f"{unknown}=1"]))
    expected = f"{unknown} is not a key" + (f"; did you mean {suggested}?" if suggested else ".")
    assert caught.value.problems == [expected]


def test_keys_below_a_dict_of_the_users_own_are_known():
    assert is_known_key("ray_kwargs.ray_init.runtime_env.env_vars.A")
    assert is_known_key("trainer.nnodes")
    assert not is_known_key("trainer.nnodes.x")
    assert not is_known_key("trainer.nodes")


def test_a_key_has_the_rules_of_its_type_and_the_part_of_the_run_that_its_section_belongs_to():
    keys = known_keys()
    assert keys["trainer.nnodes"].range is not None
    assert 0 not in keys["trainer.nnodes"].range
    assert keys["data.train_files"].names is Names.PATH
    assert keys["critic.optim.lr"].only_with is OnlyWith.CRITIC
    assert keys["trainer.nnodes"].only_with is None


def test_a_value_is_found_by_the_name_of_its_key():
    cfg = load_config({"trainer": {"placement": {"name": "split"}}})
    assert value_of(cfg, "trainer.placement.name") == "split"
    assert value_of(cfg, "trainer") is cfg.trainer
