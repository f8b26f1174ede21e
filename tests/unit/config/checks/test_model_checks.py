"""What the training backends of optional packages can't do is refused before a run starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from paceline.catalog import BACKENDS
from paceline.config.checks import check_config
from paceline.config.load import load_config

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
REWARD_MODEL = {"reward_model.enable": True, "reward_model.model.path": "org/rm"}
TWO = {"trainer.n_gpus_per_node": 2}


def problems(good: dict[str, Any], changes: dict[str, Any], device: str = "cpu") -> list[str]:
    config = OmegaConf.create(good)
    for key, value in changes.items():
        OmegaConf.update(config, key, value, force_add=True)
    config.trainer = {**config.get("trainer", {}), "device": device}
    return check_config(load_config(config))


@pytest.mark.parametrize(("devices", "size"), [(8, 8), (6, 3), (8, 4), (6, 2)])
def test_devices_that_share_sequences_divide_those_of_the_pool_and_the_models_heads(
    good: dict[str, Any], files: dict[str, Path], devices: int, size: int
) -> None:
    (files["model"] / "config.json").write_text('{"model_type": "qwen2", "num_attention_heads": 12}')
    changes = {f"{section}.ulysses_sequence_parallel_size": size for section in (ACTOR, "critic")}
    found = problems(good, {**changes, "trainer.n_gpus_per_node": devices})
    if 12 % size == 0:
        assert found == []
    else:
        assert [problem.partition("=")[0] for problem in found] == list(changes)
        assert all("does not divide the 12 attention heads" in problem for problem in found)
        assert all(problem.endswith("Set it to one of: 1, 2, 4.") for problem in found)


@pytest.mark.parametrize("strategy", ["torchtitan", "veomni", "megatron"])
@pytest.mark.parametrize("section", [ACTOR, "critic", "reward_model"])
def test_a_backend_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    good: dict[str, Any], section: str, strategy: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    [problem] = problems(good, {**REWARD_MODEL, f"{section}.strategy": strategy})
    assert problem.startswith(f"{section}.strategy={strategy} needs a package")
    assert f"`make backend-{strategy}`" in problem


def test_roles_that_a_run_has_not_may_name_any_backend(good: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    changes = {"critic.strategy": "megatron", "reward_model.strategy": "veomni"}
    grpo = {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 2}
    assert not problems(good, {**changes, **grpo})


@pytest.mark.parametrize(
    "changes",
    [
        {f"{ACTOR}.strategy": "megatron", f"{ACTOR}.megatron.tensor_model_parallel_size": 2, **TWO},
        {"critic.strategy": "torchtitan", "critic.torchtitan.tensor_model_parallel_size": 2, **TWO},
        {f"{ACTOR}.strategy": "veomni", "actor_rollout_ref.model.use_remove_padding": True, **TWO},
        {
            f"{ACTOR}.strategy": "megatron",
            "critic.strategy": "megatron",
            f"{ACTOR}.megatron.tensor_model_parallel_size": 2,
            "trainer.n_gpus_per_node": 4,
            "trainer.placement.name": "split",
        },
    ],
)
def test_what_they_can_do_is_accepted(good: dict[str, Any], changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert not problems(good, changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {f"{ACTOR}.strategy": "torchtitan", "actor_rollout_ref.model.use_remove_padding": True},
            "actor_rollout_ref.model.use_remove_padding=True: actor_rollout_ref.actor.strategy=torchtitan does not",
        ),
        (
            {"critic.strategy": "megatron", "critic.model.use_remove_padding": True},
            "critic.model.use_remove_padding=True: critic.strategy=megatron does not pack sequences;",
        ),
        (
            {f"{ACTOR}.strategy": "veomni", f"{MODEL}.lora_rank": 8},
            f"{MODEL}.lora_rank=8: {ACTOR}.strategy=veomni has no LoRA;",
        ),
        (
            {f"{ACTOR}.strategy": "veomni", f"{MODEL}.compute_dtype": "bfloat16"},
            f"{MODEL}.compute_dtype=bfloat16: {ACTOR}.strategy=veomni computes in float32;",
        ),
        (
            {**REWARD_MODEL, "reward_model.strategy": "megatron", "reward_model.model.compute_dtype": "bfloat16"},
            "reward_model.model.compute_dtype=bfloat16: reward_model.strategy=megatron computes in float32;",
        ),
        (
            {f"{ACTOR}.megatron.tensor_model_parallel_size": 2, **TWO},
            f"{ACTOR}.megatron.tensor_model_parallel_size=2 is for {ACTOR}.strategy=megatron, which is fsdp2.",
        ),
        (
            {f"{ACTOR}.strategy": "torchtitan", f"{ACTOR}.torchtitan.tensor_model_parallel_size": 3, **TWO},
            f"{ACTOR}.torchtitan.tensor_model_parallel_size=3 does not divide the 2 devices of global_pool.",
        ),
        (
            {
                f"{ACTOR}.strategy": "megatron",
                "critic.strategy": "megatron",
                "critic.megatron.tensor_model_parallel_size": 2,
                **TWO,
            },
            "critic.megatron.tensor_model_parallel_size=2, but that of actor_rollout_ref.actor on the same devices",
        ),
        (
            {f"{ACTOR}.megatron.pipeline_model_parallel_size": 2, **TWO},
            f"{ACTOR}.megatron.pipeline_model_parallel_size=2 is for {ACTOR}.strategy=megatron, which is fsdp2.",
        ),
        (
            {
                f"{ACTOR}.strategy": "megatron",
                f"{ACTOR}.megatron.tensor_model_parallel_size": 2,
                f"{ACTOR}.megatron.pipeline_model_parallel_size": 2,
                **TWO,
            },
            f"{ACTOR}.megatron.pipeline_model_parallel_size=2 with {ACTOR}.megatron.tensor_model_parallel_size=2",
        ),
        (
            {
                f"{ACTOR}.strategy": "local",
                f"{MODEL}.use_torch_compile": True,
                "critic.strategy": "fsdp2",
                "critic.model.use_torch_compile": True,
            },
            "critic.model.use_torch_compile=True: critic.strategy=fsdp2 does not compile layers;",
        ),
        (
            {f"{ACTOR}.strategy": "megatron", f"{ACTOR}.megatron.tensor_model_parallel_size": 0},
            f"{ACTOR}.megatron.tensor_model_parallel_size=0 is out of range",
        ),
    ],
)
def test_what_they_can_not_do_is_refused(
    good: dict[str, Any], changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    [problem] = problems(good, changes)
    assert problem.startswith(message)


def test_every_backend_recomputes_and_all_but_one_offload(good: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    changes = {"critic.model.enable_gradient_checkpointing": True, "critic.model.fsdp_config.param_offload": True}
    for name in BACKENDS.built_in:
        found = problems(good, {"critic.strategy": name, **changes})
        assert ["does not offload" in problem for problem in found] == ([True] if name == "torchtitan" else [])
