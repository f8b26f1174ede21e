"""Batch sizes that do not fit: the message names a size that does."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from paceline.config.checks.batch_checks import check_mini_batches, check_pools
from tests.stand_ins import config_with

MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_the_size_that_is_advised_divides_and_none_is_nearer(prompts: int, size: int):
    problems = list(check_mini_batches(config_with(f"data.train_batch_size={prompts}", f"{MINI_BATCH}={size}")))
    if size <= prompts and prompts % size == 0:
        assert problems == []
        return
    [problem] = problems
    if size > prompts:
        assert f"Set {MINI_BATCH} to {prompts} or one of its divisors." in problem
        return
    found = re.search(r"such as (\d+)\.", problem)
    assert found is not None
    divisors = [number for number in range(1, prompts + 1) if prompts % number == 0]
    assert int(found[1]) in divisors
    assert abs(int(found[1]) - size) == min(abs(divisor - size) for divisor in divisors)


def test_the_critics_own_mini_batch_counts_only_where_there_is_a_critic():
    sizes = ["data.train_batch_size=8", f"{MINI_BATCH}=8", "critic.ppo_mini_batch_size=3"]
    [problem] = check_mini_batches(config_with(*sizes))
    assert problem.startswith("critic.ppo_mini_batch_size=3 does not divide data.train_batch_size=8")
    assert list(check_mini_batches(config_with(*sizes, "algorithm.adv_estimator=grpo"))) == []


def test_a_pool_with_more_devices_than_responses_is_named_once_for_actor_and_critic():
    cfg = config_with("trainer.n_gpus_per_node=4", "data.train_batch_size=2", f"{MINI_BATCH}=2")
    [problem] = check_pools(cfg)
    assert "gives 2 responses per optimizer step for the 4 devices of global_pool" in problem
    assert list(check_pools(config_with(
        "trainer.n_gpus_per_node=4", "data.train_batch_size=2", f"{MINI_BATCH}=2", "actor_rollout_ref.rollout.n=2",
    ))) == []  # fmt: skip
