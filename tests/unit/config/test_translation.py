"""Keys and values that people bring from verl: each is renamed, taken with words, or refused; none is lost."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from paceline.config import PPOConfig
from paceline.config.checks import all_problems
from paceline.config.dialect.choices import CHOICES, REFUSED_CHOICES
from paceline.config.dialect.rule_kinds import Rule
from paceline.config.dialect.translation import RULES, Note, notes_line, notes_text, rule_for
from paceline.config.keys import is_known_key, known_keys, value_of
from paceline.config.load import Reading, load_config, read_config
from paceline.errors import ConfigError

ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
MODEL = "actor_rollout_ref.model"


def read(asked: dict[str, Any]) -> Reading:
    config = OmegaConf.create()
    for key, value in asked.items():
        OmegaConf.update(config, key, value, force_add=True)
    return read_config(config)


def note_of(reading: Reading, key: str) -> Note:
    [note] = [note for note in reading.notes if note.key == key]
    return note


@pytest.mark.parametrize(
    ("asked", "here"),
    [
        ({"critic.fsdp.param_offload": True}, {"critic.model.fsdp_config.param_offload": True}),
        ({"critic.fsdp_config.optimizer_offload": True}, {"critic.model.fsdp_config.optimizer_offload": True}),
        ({"reward.num_workers": 4}, {"reward_model.num_workers": 4}),
        ({"reward.reward_model.enable": True}, {"reward_model.enable": True}),
        ({"reward.reward_model.model_path": "org/rm"}, {"reward_model.model.path": "org/rm"}),
        (
            {"reward.reward_kwargs.overlong_buffer_cfg.len": 7},
            {"reward_model.reward_kwargs.overlong_buffer_cfg.len": 7},
        ),
        ({"reward.custom_reward_function.name": "f"}, {"custom_reward_function.name": "f"}),
        ({"reward.sandbox_fusion.url": "http://a"}, {"reward_model.sandbox.url": "http://a"}),
        ({f"{ACTOR}.optim.clip_grad": 0.5}, {f"{ACTOR}.grad_clip": 0.5}),
        ({"critic.optim.lr_decay_style": "cosine"}, {"critic.optim.lr_scheduler_type": "cosine"}),
        ({f"{ROLLOUT}.prompt_length": 64}, {"data.max_prompt_length": 64}),
        ({f"{ROLLOUT}.response_length": 64}, {"data.max_response_length": 64}),
        ({"data.trust_remote_code": True}, {f"{MODEL}.trust_remote_code": True}),
        ({"ray_init.num_cpus": 3}, {"ray_kwargs.ray_init": {"num_cpus": 3}}),
        ({f"{MODEL}.lora.rank": 8, f"{MODEL}.lora.alpha": 4}, {f"{MODEL}.lora_rank": 8, f"{MODEL}.lora_alpha": 4}),
        ({"model_engine": "megatron"}, {f"{ACTOR}.strategy": "megatron", "critic.strategy": "megatron"}),
        ({f"{ACTOR}.model_engine": "veomni"}, {f"{ACTOR}.strategy": "veomni"}),
        ({f"{ACTOR}.fsdp_config.strategy": "fsdp"}, {f"{ACTOR}.strategy": "fsdp"}),
        ({f"{ACTOR}.fsdp_config.model_dtype": "bf16"}, {f"{MODEL}.compute_dtype": "bfloat16"}),
        ({f"{ACTOR}.fsdp_config.mixed_precision.param_dtype": "fp32"}, {f"{MODEL}.compute_dtype": "float32"}),
        ({"critic.fsdp.mixed_precision.param_dtype": "bf16"}, {"critic.model.compute_dtype": "bfloat16"}),
        (
            {f"{ACTOR}.fsdp_config.offload_policy": True},
            {f"{ACTOR}.fsdp_config.param_offload": True, f"{ACTOR}.fsdp_config.optimizer_offload": True},
        ),
        ({f"{MODEL}.enable_activation_offload": True}, {f"{MODEL}.enable_gradient_checkpointing": True}),
        ({f"{ACTOR}.veomni.activation_offload": True}, {f"{MODEL}.enable_gradient_checkpointing": True}),
        ({f"{ACTOR}.fsdp_config.use_torch_compile": True}, {f"{MODEL}.use_torch_compile": True}),
        ({"critic.strategy": "local", "critic.use_torch_compile": True, "trainer.nnodes": 2},
         {"critic.model.use_torch_compile": True}),
        (
            {"model_engine": "megatron", f"{ACTOR}.megatron.param_offload": True, f"{REF}.megatron.param_offload": True,
             "critic.megatron.optimizer_offload": True},
            {f"{ACTOR}.fsdp_config.param_offload": True, f"{REF}.fsdp_config.param_offload": True,
             "critic.model.fsdp_config.optimizer_offload": True},
        ),
        (
            {f"{ACTOR}.strategy": "veomni", f"{ACTOR}.veomni.enable_fsdp_offload": True},
            {f"{ACTOR}.fsdp_config.param_offload": True, f"{ACTOR}.fsdp_config.optimizer_offload": True},
        ),
        (
            {f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": 4},
            {f"{ACTOR}.ulysses_sequence_parallel_size": 4},
        ),
        (
            {"critic.model.fsdp_config.ulysses_sequence_parallel_size": 4},
            {"critic.ulysses_sequence_parallel_size": 4},
        ),
        (
            {f"{ACTOR}.megatron.override_transformer_config.recompute_granularity": "full"},
            {f"{MODEL}.enable_gradient_checkpointing": True},
        ),
        (
            {f"{ACTOR}.optim.min_lr": 1e-7, f"{ACTOR}.optim.lr": 1e-6, f"{ACTOR}.optim.lr_scheduler_type": "cosine"},
            {f"{ACTOR}.optim.min_lr_ratio": 0.1},
        ),
        ({f"{ACTOR}.use_rollout_log_probs": True}, {f"{ROLLOUT}.trust_log_probs": True}),
        (
            {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.enable_prefix_caching": False},
            {f"{ROLLOUT}.engine_kwargs.vllm": {"enable_prefix_caching": False}},
        ),
        (
            {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.cudagraph_capture_sizes": [1, 8]},
            {f"{ROLLOUT}.engine_kwargs.vllm": {"compilation_config": {"cudagraph_capture_sizes": [1, 8]}}},
        ),
        (
            {"trainer.remove_previous_ckpt_in_save": True},
            {"trainer.max_actor_ckpt_to_keep": 1, "trainer.max_critic_ckpt_to_keep": 1},
        ),
        ({"trainer.default_hdfs_dir": "/mnt/runs"}, {"trainer.default_local_dir": "/mnt/runs"}),
        ({"_groups_.critic": "megatron_critic"}, {"critic.strategy": "megatron"}),
        (
            {f"{ACTOR}.ppo_micro_batch_size": 128, "trainer.n_gpus_per_node": 8, "trainer.nnodes": 2},
            {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 8},
        ),
        ({"critic.forward_micro_batch_size": 2, "trainer.n_gpus_per_node": 8},
         {"critic.forward_micro_batch_size_per_gpu": 1}),
        ({f"{ACTOR}.ppo_infer_max_token_len_per_gpu": 64}, {f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 64}),
        ({"critic.ppo_infer_micro_batch_size_per_gpu": 3}, {"critic.forward_micro_batch_size_per_gpu": 3}),
        ({f"{MODEL}.custom_chat_template": "{{ x }}"},
         {"data.apply_chat_template_kwargs": {"chat_template": "{{ x }}"}}),
        ({f"{MODEL}.override_config.max_position_embeddings": 32768}, {f"{MODEL}.max_position_embeddings": 32768}),
        ({f"{ACTOR}.use_remove_padding": True}, {f"{MODEL}.use_remove_padding": True}),
        ({"critic.nccl_timeout": 600}, {"actor_rollout_ref.nccl_timeout": 600}),
        ({"data.tool_config_path": "/t.yaml"}, {f"{ROLLOUT}.multi_turn.tool_config_path": "/t.yaml"}),
        ({"reward_model.overlong_buffer.len": 9}, {"reward_model.reward_kwargs.overlong_buffer_cfg.len": 9}),
        ({"model_engine": "torchtitan", f"{ACTOR}.torchtitan.tensor_parallel_size": 2},
         {f"{ACTOR}.torchtitan.tensor_model_parallel_size": 2}),
        # values of our own keys
        ({f"{ROLLOUT}.load_format": "safetensors"}, {f"{ROLLOUT}.load_format": "auto"}),
        ({f"{ROLLOUT}.name": "sglang"}, {f"{ROLLOUT}.name": "vllm"}),
        ({"algorithm.filter_groups.max_num_gen_batches": 0}, {"algorithm.filter_groups.max_num_gen_batches": -1}),
        ({f"{ROLLOUT}.val_kwargs.temperature": 0, f"{ROLLOUT}.val_kwargs.do_sample": True}, {
            f"{ROLLOUT}.val_kwargs.do_sample": False, f"{ROLLOUT}.val_kwargs.temperature": 1.0}),
        ({"trainer.logger": ["console", "file"]}, {"trainer.logger": ["console"]}),
        ({f"{ROLLOUT}.top_k": 0, f"{ROLLOUT}.val_kwargs.top_k": 0},
         {f"{ROLLOUT}.top_k": -1, f"{ROLLOUT}.val_kwargs.top_k": -1}),
    ],
)  # fmt: skip
def test_another_name_or_way_is_ours_and_said(asked: dict[str, Any], here: dict[str, Any]) -> None:
    reading = read(asked)
    assert reading.problems == {}
    assert {key: value_of(reading.cfg, key) for key in here} == here
    assert "renamed" in {note.kind for note in reading.notes}
    assert all(key in str(reading.notes) for key in here if not key.endswith(".vllm"))


def test_micro_batches_that_are_left_open_are_the_default() -> None:
    key = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    reading = read({key: None})
    assert reading.problems == {}
    assert value_of(reading.cfg, key) == known_keys()[key].default


SO_ANYWAY: list[dict[str, Any]] = [
    {f"{ACTOR}.use_torch_compile": False},
    {f"{REF}.use_torch_compile": "false"},
    {f"{ACTOR}.strategy": "megatron", f"{ACTOR}.megatron.grad_offload": True},
    {f"{ACTOR}.fsdp_config.fsdp_size": -1},
    {f"{REF}.fsdp_config.model_dtype": "fp32"},
    {f"{ACTOR}.fsdp_config.mixed_precision.reduce_dtype": "fp32"},
    {f"{MODEL}.use_fused_kernels": True},
    {f"{MODEL}.lora.merge": True},
    {f"{REF}.strategy": "fsdp"},
    {f"{ACTOR}.strategy": "megatron", f"{REF}.strategy": "megatron"},
    {f"{ACTOR}.megatron.tensor_model_parallel_size": 2, f"{REF}.megatron.tensor_model_parallel_size": 2},
    {f"{ACTOR}.megatron.expert_model_parallel_size": 1},
    {f"{ACTOR}.megatron.pipeline_model_parallel_size": 2, f"{REF}.megatron.pipeline_model_parallel_size": 2},
    {f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size": None},
    {f"{ACTOR}.veomni.param_offload": False},
    {f"{ROLLOUT}.max_model_len": 1024},
    {f"{ROLLOUT}.data_parallel_size": 1},
    {f"{ROLLOUT}.expert_parallel_size": 1},
    {f"{ROLLOUT}.multi_turn.enable": False, f"{ROLLOUT}.multi_turn.interaction_config_path": "a.yaml"},
    {f"{ACTOR}.profiler.ranks": [0], f"{ACTOR}.profiler.enable": False},
    {"global_profiler.tool": "npu", "global_profiler.steps": None},
    {"algorithm.adv_estimator": "grpo", "critic.enable": False},
    {"reward_model.reward_manager": "dapo"},
    {"trainer.default_hdfs_dir": None},
    {"actor_rollout_ref.hybrid_engine": True},
    {f"{ACTOR}.rollout_n": 1},
    {f"{ACTOR}.optim.total_training_steps": -1},
    {"distillation.distillation_loss.policy_loss_mode": "vanilla"},
    {"critic.model.lora_rank": 0, "critic.model.lora_alpha": 16},
    {f"{MODEL}.override_config.attention_dropout": 0.0},
    {"critic.model.override_config": {}},
    {f"{ACTOR}.optim.override_optimizer_config": None},
    {"reward.reward_manager.name": "gdpo", "reward.reward_manager.source": "register"},
    {f"{ROLLOUT}.n_gpus_per_node": 8, f"{ROLLOUT}.nnodes": 0},
    {"trainer.v1.trainer_mode": "sync"},
    {"_groups_.actor_rollout_ref.rollout": "rollout"},
    {"algorithm.rollout_correction.rollout_token_veto_threshold": None},
]
NO_EFFECT: list[dict[str, Any]] = [
    {"transfer_queue.storage_backend": "x"},
    {"distillation.teacher_models.math.num_replicas": 2},
    {"distillation.teacher_models.math.inference.name": "vllm", "distillation.enabled": False},
    {"distillation.distillation_loss.use_chunked_topk": True},
    {"data.filter_overlong_prompts_workers": 64},
    {"data.dataloader_num_workers": 8},
    {f"{ROLLOUT}.calculate_log_probs": True},
    {f"{ROLLOUT}.mode": "async"},
    {f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": 4096},
    {f"{ROLLOUT}.layered_summon": True},
    {f"{ROLLOUT}.enable_prefix_caching": True},  # native has no such thing
    {f"{ROLLOUT}.engine_kwargs.sglang.attention_backend": "triton"},
    {f"{ACTOR}.entropy_checkpointing": True},
    {f"{REF}.use_torch_compile": True},
    {f"{ACTOR}.megatron.param_offload": True},
    {f"{ACTOR}.fsdp_config.entropy_from_logits_with_chunking": False},
    {f"{ACTOR}.fsdp_config.forward_prefetch": True},
    {f"{ACTOR}.fsdp_config.fsdp_size": 8},
    {f"{ACTOR}.fsdp_config.mixed_precision.reduce_dtype": "bf16"},
    {f"{REF}.fsdp_config.optimizer_offload": True},
    {f"{REF}.ulysses_sequence_parallel_size": 8},
    {f"{ACTOR}.checkpoint.save_contents": ["model"]},
    {f"{ACTOR}.megatron.override_transformer_config.apply_rope_fusion": True},
    {"reward.reward_model.rollout.name": "vllm"},
    {"critic.use_torch_compile": True, "trainer.nnodes": 2},
    {"critic.use_torch_compile": True, "critic.strategy": "fsdp2"},
    {f"{MODEL}.use_shm": True},
    {f"{MODEL}.override_config.attn_implementation": "flash_attention_2"},
    {"trainer.use_v1": True},
    {"trainer.use_legacy_worker_impl": "disable"},
    {"algorithm.filter_groups.max_inflight_gen_batches": 2},
    {f"{REF}.fsdp_config.grad_offload": True},
    {f"{ACTOR}.torchtitan.attn_type": "flex"},
]


@pytest.mark.parametrize(
    ("asked", "kind"), [*((a, "so anyway") for a in SO_ANYWAY), *((a, "no effect") for a in NO_EFFECT)]
)
def test_what_is_so_anyway_or_has_no_effect_is_taken_with_words(asked: dict[str, Any], kind: str) -> None:
    reading = read(asked)
    assert reading.problems == {}
    ours = {key: value for key, value in asked.items() if is_known_key(key)}
    assert reading.cfg == read(ours).cfg
    assert {note.key for note in reading.notes} == asked.keys() - ours.keys()
    assert {note.kind for note in reading.notes} == {kind}
    assert all(note.why for note in reading.notes)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({f"{ACTOR}.megatron.context_parallel_size": 2}, "=2 is not supported yet: megatron divides"),
        (
            {f"{ACTOR}.megatron.pipeline_model_parallel_size": 2, f"{REF}.megatron.pipeline_model_parallel_size": 4},
            f"the reference is divided as the actor, by {ACTOR}.megatron.pipeline_model_parallel_size=2.",
        ),
        (
            {f"{REF}.megatron.tensor_model_parallel_size": 4},
            f"the reference is divided as the actor, by {ACTOR}.megatron.tensor_model_parallel_size=1.",
        ),
        ({f"{REF}.strategy": "megatron"}, f"Set {ACTOR}.strategy."),
        (
            {f"{MODEL}.compute_dtype": "bfloat16", f"{REF}.fsdp_config.model_dtype": "fp32"},
            f"the reference computes as the actor, {MODEL}.compute_dtype=bfloat16.",
        ),
        ({f"{ACTOR}.fsdp_config.model_dtype": "fp16"}, "set it to float32 or bfloat16."),
        ({f"{ROLLOUT}.max_model_len": 100}, "=100 is less than a prompt and its response may have, 1024 tokens."),
        ({f"{ROLLOUT}.expert_parallel_size": 8}, "Set it to 1."),
        ({f"{ROLLOUT}.agent.agent_loop_manager_class": "a.B"}, "agent processes are paceline's own"),
        ({"critic.enable": False}, "does not fit algorithm.adv_estimator=gae, which needs a critic."),
        ({"algorithm.adv_estimator": "grpo", "critic.enable": True}, "grpo, which has none."),
        ({"reward_model.reward_manager": "mine"}, "Set custom_reward_function.path"),
        (
            {"reward.reward_model.rollout.name": "vllm", "custom_reward_function.path": "a.py"},
            "is not served to your function",
        ),
        ({"trainer.default_hdfs_dir": "hdfs://a/b"}, "mount it as a folder, and set trainer.default_local_dir"),
        ({"async_training.staleness_threshold": 1}, "trainer.schedule"),
        ({"trainer.v1.trainer_mode": "x"}, "trainer.schedule"),
        ({"rollout.nnodes": 1}, "trainer.placement.rollout_devices"),
        ({"rollout.n": 4}, "settings of the rollout stand below actor_rollout_ref.rollout"),
        ({"data.image_key": "images"}, "prompts are text"),
        ({"model_engine": "mindspeed"}, "is no training backend here."),
        ({"_groups_.actor_rollout_ref.actor": "mlite_actor"}, "chooses a yaml file of verl's"),
        ({f"{ACTOR}.optim.min_lr": 1.0, f"{ACTOR}.optim.lr_scheduler_type": "cosine"}, "min_lr_ratio"),
        ({f"{ACTOR}.optim.total_training_steps": 7}, "Set trainer.total_training_steps."),
        ({f"{ACTOR}.rollout_n": 4}, f"set {ROLLOUT}.n, which is 1."),
        ({f"{ROLLOUT}.nnodes": 1}, "trainer.placement.rollout_devices"),
        ({f"{ACTOR}.veomni.router_replay.mode": "R3"}, "=R3 is not supported: a router chooses again in each pass."),
        ({"critic.model.lora_rank": 8}, "=8 is not supported: all weights of the critic are trained."),
        ({"trainer.v1.trainer_mode": "separate_async"}, "=separate_async is not supported: how far the rollout"),
        (
            {"algorithm.rollout_correction.rollout_token_veto_threshold": 1e-4},
            "has another place here: rollout_rs names",
        ),
        ({f"{MODEL}.override_config.rope_theta": 1}, "change config.json in a copy of the model's folder."),
        ({f"{ACTOR}.profiler.enable": True}, "every run writes timeline.json"),
        ({"global_profiler.steps": [1, 2]}, "every run writes timeline.json"),
        ({f"{ACTOR}.fsdp_config.a_key_of_next_year": 1}, "is a setting of verl's FSDP that is not known here."),
        ({f"{ACTOR}.megatron.a_key_of_next_year": 1}, "is a setting of Megatron that is not known here."),
    ],
)
def test_what_we_do_not_have_is_refused_with_what_to_do(asked: dict[str, Any], said: str) -> None:
    reading = read(asked)
    [problem] = reading.problems.values()
    assert said in problem
    assert any(problem.startswith(key) for key in asked)


def test_two_names_of_one_key_must_agree() -> None:
    same = {"critic.fsdp.param_offload": True, "critic.model.fsdp_config.param_offload": True}
    assert read(same).problems == {}
    [problem] = read({f"{ROLLOUT}.prompt_length": 64, "data.max_prompt_length": 128}).problems.values()
    assert problem == (
        f"{ROLLOUT}.prompt_length=64 is data.max_prompt_length=64 here, but data.max_prompt_length=128. Set one."
    )
    [problem] = read({"model_engine": "megatron", f"{ACTOR}.strategy": "fsdp"}).problems.values()
    assert f"but {ACTOR}.strategy=fsdp. Set one." in problem
    [problem] = read({"critic.fsdp.param_offload": True, "critic.fsdp.offload_policy": True, "critic.fsdp_size": 1,
                      }).problems.values()  # fmt: skip
    assert problem == "critic.fsdp_size is not a key."


def test_a_mistake_in_a_family_is_a_mistake() -> None:
    [problem] = read({f"{ACTOR}.fsdp_config.param_offlod": True}).problems.values()
    assert problem.endswith(f"is not a key; did you mean {ACTOR}.fsdp_config.param_offload?")
    [problem] = read({"critic.fsdp.param_offlod": True}).problems.values()
    assert problem == "critic.fsdp.param_offlod is not a key; did you mean critic.model.fsdp_config.param_offload?"
    [problem] = read({"reward.wieghts": 1}).problems.values()
    assert problem == "reward.wieghts is not a key; did you mean reward_model.weights?"


def test_a_refused_section_is_one_message_with_all_its_keys() -> None:
    server = "distillation.teacher_models.a.inference"
    asked = {f"{server}.name": "vllm", f"{server}.max_model_len": 9, f"{server}.gpu_memory_utilization": 0.4}
    [problem] = read({"distillation.enabled": True, **asked}).problems.values()
    assert all(key in problem for key in asked)
    assert "distillation.n_gpus_per_node gives the teachers devices of their own" in problem


def test_what_is_above_may_be_looked_up_in_any_order() -> None:
    asked = {f"{REF}.strategy": "megatron", "model_engine": "megatron"}
    assert read(asked).problems == read(dict(reversed(asked.items()))).problems == {}


def test_interpolations_reach_keys_of_verls() -> None:
    reading = read({f"{ROLLOUT}.max_model_len": 2048, "data.val_batch_size": f"${{{ROLLOUT}.max_model_len}}"})
    assert reading.cfg.data.val_batch_size == 2048


def test_secrets_in_keys_of_verls_are_masked() -> None:
    reading = read({f"{ROLLOUT}.engine_kwargs.sglang.api_key": "hunter2hunter2"})
    assert "hunter2" not in notes_text(reading.notes)
    assert "***" in notes_text(reading.notes)


def test_a_complete_configuration_has_nothing_to_translate() -> None:
    assert read_config(PPOConfig()).notes == []
    assert read({}).notes == []


def test_the_list_has_the_kinds_apart_and_the_line_is_short() -> None:
    reading = read({"model_engine": "veomni", f"{ACTOR}.use_torch_compile": False, f"{ROLLOUT}.mode": "sync"})
    assert notes_text(reading.notes).splitlines() == [
        "Keys of verl's in this configuration",
        "",
        "Renamed, or said in our own way:",
        f"  model_engine=veomni -> {ACTOR}.strategy=veomni critic.strategy=veomni",
        "",
        "Taken, because it is so anyway:",
        f"  {ACTOR}.use_torch_compile=False: layers run uncompiled unless model.use_torch_compile says otherwise.",
        "",
        "Taken, without an effect:",
        f"  {ROLLOUT}.mode=sync: the engine runs in the workers, and the responses are drawn the same way.",
        "",
    ]
    assert notes_line(reading.notes) == (
        f"renamed: model_engine; so anyway: {ACTOR}.use_torch_compile; no effect: {ROLLOUT}.mode"
    )
    assert notes_text([]) == notes_line([]) == ""


# ------------------------------------------------------------------------------------------------ the table itself


def example_of(pattern: str) -> str:
    return pattern.replace("**", "some.thing").replace("*", "some")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.pattern[:60])
def test_every_rule_is_reached_and_says_something(rule: Rule) -> None:
    reached = [name for name in map(example_of, rule.names) if not is_known_key(name) and rule_for(name) is rule]
    assert reached or rule.is_family
    assert len(rule.says) > 5


VALUES = st.sampled_from([None, True, False, 0, 1, 2, 8, -1, 0.5, "", "auto", "bf16", "megatron", "x", [1, 2], ["a"]])
FOREIGN = sorted({name for rule in RULES for name in map(example_of, rule.names) if not is_known_key(name)})


@settings(max_examples=15, deadline=None)
@given(st.dictionaries(st.sampled_from(FOREIGN), VALUES, max_size=12))
def test_no_key_is_lost(asked: dict[str, Any]) -> None:
    """Whatever is asked: each key is in a note or in a problem, nothing crashes, and what comes out is ours."""
    reading = read(asked)
    said = " ".join([*reading.problems, *reading.problems.values(), *(note.key for note in reading.notes)])
    assert [key for key in asked if key not in said] == []
    assert isinstance(reading.cfg, PPOConfig)


@settings(max_examples=15, deadline=None)
@given(st.dictionaries(st.sampled_from(FOREIGN), VALUES, max_size=6), st.randoms())
def test_the_order_of_keys_makes_no_difference(asked: dict[str, Any], random: Any) -> None:
    keys = list(asked)
    random.shuffle(keys)
    one, other = read(asked), read({key: asked[key] for key in keys})
    if not one.problems:
        assert one.cfg == other.cfg
    assert bool(one.problems) == bool(other.problems)


def test_choices_are_of_keys_that_are_here() -> None:
    keys = {key for key, *_ in CHOICES} | {key for _, _, here, _ in CHOICES for key in here}
    assert [key for key in keys | REFUSED_CHOICES.keys() if key not in known_keys()] == []


# ------------------------------------------------------------------------------------------------------ whole lists

LISTS = Path(__file__).parent / "override_lists.json"


@pytest.mark.parametrize("name", json.loads(LISTS.read_text()))
def test_a_whole_launch_list_is_understood(name: str) -> None:
    """Lists as launch scripts have them: the number of problems that is in their names, and no unknown key."""
    from paceline.cli.import_verl import import_overrides

    imported = import_overrides(name, json.loads(LISTS.read_text())[name])
    assert imported.unknown == []
    assert len(imported.problems) == int(name.split()[0]), imported.problems


@pytest.mark.skipif("PACELINE_VERL_LISTS" not in os.environ, reason="PACELINE_VERL_LISTS names no file of lists")
def test_public_launch_lists_are_understood() -> None:
    """PACELINE_VERL_LISTS is a JSON file: name of a script to its list of overrides."""
    from paceline.cli.import_verl import import_overrides, summary

    lists = json.loads(Path(os.environ["PACELINE_VERL_LISTS"]).read_text())
    imported = [import_overrides(name, overrides) for name, overrides in lists.items()]
    assert [problem for one in imported for problem in one.unknown] == []
    of_text = [one for one in imported if one.kind == "text"]
    assert sum(not one.problems for one in of_text) >= 0.75 * len(of_text), summary(imported)


def test_a_hundred_keys_with_forty_problems_are_all_answered_soon() -> None:
    good = [key for key, one in known_keys().items() if isinstance(one.default, bool)][:20]
    foreign = list({key: 1 for asked in (*SO_ANYWAY, *NO_EFFECT) for key in asked if not is_known_key(key)})[:40]
    wrong = [f"{ACTOR}.megatron.override_ddp_config.k{number}" for number in range(10)]
    wrong += [f"data.unknown_{number}" for number in range(30)]
    asked = dict.fromkeys(wrong, True) | dict.fromkeys(good, False) | dict.fromkeys(foreign, 1)
    assert len(asked) == 100
    start = time.monotonic()
    reading = read(asked)
    problems = all_problems(reading.cfg, reading.problems)
    assert time.monotonic() - start < 2
    text = "\n".join(problems)
    assert [key for key in wrong if key not in text] == []


def test_refused_keys_are_all_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"data": {"image_key": "a", "xyz": 1}, "trainer": {"nnodes": "x"}})
    assert len(caught.value.problems) == 3
