"""How many tokens a pass has where nothing is set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.config import PPOConfig
from paceline.config.load import load_config
from paceline.trainer.ppo import token_budgets
from paceline.trainer.ppo.model_size import read_model_size
from paceline.trainer.ppo.placement import batch_table
from paceline.trainer.ppo.token_budgets import MEMORY_SHARE, with_token_budgets
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder)
    return str(folder)


def config(model: str, **trainer: Any) -> PPOConfig:
    return load_config(
        {
            "actor_rollout_ref": {"model": {"path": model}},
            "data": {"max_prompt_length": 40, "max_response_length": 60},
            "trainer": {"device": "cpu", **trainer},
        }
    )


def budgets(cfg: PPOConfig) -> tuple[int | None, int | None]:
    cfg = with_token_budgets(cfg)
    return cfg.actor_rollout_ref.actor.ppo_max_token_len_per_gpu, cfg.critic.ppo_max_token_len_per_gpu


def test_a_small_model_gets_what_is_fastest_and_the_batch_table_shows_it(model: str) -> None:
    assert budgets(config(model)) == (4096, 4096)
    table = batch_table(config(model))
    assert "tokens per micro-batch               4,096  per device, at most; as many responses as fit" in table


def test_activations_keep_within_their_share_of_the_memory(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(model)
    size = read_model_size(cfg.actor_rollout_ref.model)
    assert size is not None
    enough = int(size.activation_bytes(1024, checkpointing=False, head="language") / MEMORY_SHARE)
    monkeypatch.setattr(token_budgets, "available_memory", lambda device: enough)
    assert budgets(cfg)[0] == 1024
    monkeypatch.setattr(token_budgets, "available_memory", lambda device: enough - 1)
    assert budgets(cfg)[0] == 512
    monkeypatch.setattr(token_budgets, "available_memory", lambda device: 1)
    assert budgets(cfg) == (100, 100)  # a response of full length


def test_the_budget_is_the_same_in_every_placement_with_as_many_devices_for_a_role(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(model)
    size = read_model_size(cfg.actor_rollout_ref.model)
    assert size is not None
    memory = int(size.activation_bytes(2048, checkpointing=False, head="language") / MEMORY_SHARE)
    monkeypatch.setattr(token_budgets, "available_memory", lambda device: memory)
    split = config(model, n_gpus_per_node=2, placement={"name": "split"})
    apart = config(model, n_gpus_per_node=2, placement={"rollout_devices": 1})
    assert budgets(cfg) == budgets(split) == budgets(apart)
    assert budgets(config(model, n_gpus_per_node=2))[0] == 1024


def test_what_is_set_stays_and_an_unknown_size_gets_eight_full_responses(model: str, tmp_path: Path) -> None:
    cfg = config(str(tmp_path / "no such folder"))
    assert budgets(cfg) == (800, 800)
    actor = replace(cfg.actor_rollout_ref.actor, ppo_max_token_len_per_gpu=77)
    cfg = replace(cfg, actor_rollout_ref=replace(cfg.actor_rollout_ref, actor=actor))
    assert budgets(cfg) == (77, 800)
