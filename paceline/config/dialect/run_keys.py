"""Keys of verl's about the run as a whole: sections under other names, data, algorithm, rewards, trainer."""

from __future__ import annotations

from paceline.catalog import ESTIMATORS
from paceline.config.dialect.rule_kinds import (
    Asked,
    Became,
    Outcome,
    Refused,
    Rule,
    Taken,
    is_on,
    is_same,
    no_effect,
    number,
    refused,
    renamed,
    show,
    so_anyway,
    translated,
)
from paceline.config.keys import ACTOR, MODEL, ROLLOUT

BACKEND_OF = {"dp": None, "fsdp": "fsdp", "fsdp2": "fsdp2", "megatron": "megatron", "veomni": "veomni"} | {
    "torchtitan": "torchtitan"
}
"""verl's names of what trains a model; dp is its FSDP, for which the default stands."""

SCHEDULE = (
    "is not supported: how far the rollout runs ahead of the training is trainer.schedule here, with devices of its "
    "own by trainer.placement.rollout_devices. Leave it out, and see trainer.schedule.name and max_staleness."
)
DISTILLATION_LOSS = "distillation.distillation_loss"
IMAGES = "is not supported yet: prompts are text. Leave it out."
PROFILER = (
    "is not supported: every run writes timeline.json, which `paceline report` draws; ray_kwargs.timeline_json_file "
    "has Ray's own. Leave it out."
)

_MANAGERS = ("naive", "dapo", "prime", "batch", "gdpo", "remote")
_USUAL_GROUPS = ("rollout", "hf_model", "legacy_data", "rollout_correction", "reward", "reward_model", "optim")
"""Yaml files of verl's that its own main file chooses, too."""

RENAMED_SECTIONS: tuple[Rule, ...] = (
    renamed("{critic.fsdp,critic.fsdp_config}.**", r"critic.model.fsdp_config.\2"),
    renamed("reward_model.fsdp_config.**", r"reward_model.model.fsdp_config.\1"),
    renamed(f"{DISTILLATION_LOSS}.{{clip_ratio,clip_ratio_low,clip_ratio_high}}", rf"{ACTOR}.\1"),
    renamed("reward.custom_reward_function.**", r"custom_reward_function.\1"),
    renamed("reward.reward_manager.name", "reward_model.reward_manager"),
    renamed("{reward.reward_model,reward_model}.model_path", "reward_model.model.path"),
    renamed("reward.reward_model.**", r"reward_model.\1"),
    renamed("reward.**", r"reward_model.\1"),
    renamed("ray_init.timeline_json_file", "ray_kwargs.timeline_json_file"),
    renamed("ray_init.**", r"ray_kwargs.ray_init.\1"),
    renamed(f"{ACTOR}.policy_loss.{{tau_pos,tau_neg}}", rf"{ACTOR}.\1"),
    renamed(f"{{{ACTOR},critic}}.optim.clip_grad", r"\1.grad_clip"),
    renamed(f"{{{ACTOR},critic}}.optim.{{warmup_style,lr_decay_style}}", r"\1.optim.lr_scheduler_type"),
    renamed(f"{ROLLOUT}.{{prompt_length,response_length}}", r"data.max_\1"),
    renamed("data.trust_remote_code", f"{MODEL}.trust_remote_code"),
    renamed("data.tokenizer", f"{MODEL}.tokenizer_path"),
    renamed(f"{MODEL}.lora.{{rank,alpha}}", rf"{MODEL}.lora_\1"),
    renamed(f"{MODEL}.lora.{{target_modules,exclude_modules}}", rf"{MODEL}.\1"),
    renamed("critic.model.external_lib", f"{MODEL}.external_lib"),
    renamed("reward_model.sandbox_fusion.{url,max_concurrent,memory_limit_mb}", r"reward_model.sandbox.\1"),
    renamed(f"{{{ACTOR},actor_rollout_ref.ref}}.fsdp_config.strategy", r"\1.strategy"),
    renamed("{critic,reward_model}.model.fsdp_config.strategy", r"\1.strategy"),
    renamed(f"{{{ACTOR},critic}}.torchtitan.tensor_parallel_size", r"\1.torchtitan.tensor_model_parallel_size"),
    renamed(f"{{{ACTOR},actor_rollout_ref.ref}}.use_remove_padding", f"{MODEL}.use_remove_padding"),
    renamed("critic.use_remove_padding", "critic.model.use_remove_padding"),
    renamed("{critic,actor_rollout_ref.actor,actor_rollout_ref.ref}.nccl_timeout", "actor_rollout_ref.nccl_timeout"),
    renamed(
        "{actor_rollout_ref.model,critic.model,reward_model.model}.override_config."
        "{max_position_embeddings,model_config.max_position_embeddings}",
        r"\1.max_position_embeddings",
    ),
    renamed("data.tool_config_path", f"{ROLLOUT}.multi_turn.tool_config_path"),
    renamed(
        "reward_model.overlong_buffer.{enable,len,penalty_factor,log}",
        r"reward_model.reward_kwargs.overlong_buffer_cfg.\1",
    ),
    renamed("trainer.val_generations_to_log_to_wandb", "trainer.log_val_generations"),
)
"""First of all, so that the other rules need to know one name of a key only."""


def _model_engine(asked: Asked) -> Outcome:
    """Sets the strategy of the actor, with it of the reference, and of the critic; dp is the default."""
    name = str(asked.value)
    if name not in BACKEND_OF:
        known = ", ".join(BACKEND_OF)
        return Refused(f"is no training backend here. Set {ACTOR}.strategy; known here are {known}.", True)
    strategy = BACKEND_OF[name]
    if strategy is None:
        return Taken("FSDP trains unless a strategy says otherwise")
    keys = [f"{ACTOR}.strategy"] if asked.key.startswith(ACTOR) else [f"{ACTOR}.strategy", "critic.strategy"]
    return Became(dict.fromkeys(keys, strategy))


def _group(asked: Asked) -> Outcome:
    """A choice of one of verl's yaml files: dp_actor, megatron_actor and so on set a strategy, others are refused."""
    package, name = asked.parts[0], str(asked.value)
    engine = name.rpartition("_")[0]
    if name.removesuffix(".yaml") in _USUAL_GROUPS:
        return Taken("the defaults are those of one file")
    if engine not in BACKEND_OF or package not in (ACTOR, "actor_rollout_ref.ref", "critic", "reward_model"):
        return Refused("chooses a yaml file of verl's, and there is none here. Set the keys that it has.", True)
    if BACKEND_OF[engine] is None:
        return Taken("FSDP trains unless a strategy says otherwise")
    return Became({f"{package}.strategy": BACKEND_OF[engine]})


def _trainer_mode(asked: Asked) -> Outcome:
    """sync is so anyway. The others become a choice of trainer.schedule and trainer.placement, which is yours."""
    if asked.value is None or is_same(asked.value, "sync"):
        return Taken("trainer.schedule.name says it, and is sync by default")
    return Refused(SCHEDULE, True)


def _profiler(asked: Asked) -> Outcome:
    """Has no part while no profiler is on; else it is refused: every run writes timeline.json."""
    section = asked.parts[0]
    switch = asked.look_up(f"{section}.profiler.enable") if section != "global_profiler" else None
    steps = asked.look_up("global_profiler.steps") or asked.look_up("trainer.profile_steps")
    if is_on(switch) or (steps not in (None, []) and section in ("global_profiler", "trainer")):
        return Refused(PROFILER)
    return Taken("no profiler is on")


def _has_critic(asked: Asked) -> Outcome:
    """Must be what algorithm.adv_estimator says: gae has a critic, the others have none."""
    name = str(asked.look_up("algorithm.adv_estimator"))
    estimator = ESTIMATORS.get(name)
    needs = estimator is not None and estimator.needs_critic
    if asked.value is None or is_on(asked.value) == needs:
        return Taken(f"algorithm.adv_estimator={name} has {'a' if needs else 'no'} critic")
    found = "needs a critic" if needs else "has none"
    return Refused(f"does not fit algorithm.adv_estimator={name}, which {found}. Leave it out, or set another.", True)


def _reward_manager(asked: Asked) -> Outcome:
    """naive, dapo, prime, batch, gdpo and remote: one manager does what they do; others are refused."""
    if str(asked.value) in (*_MANAGERS, "None"):
        return Taken(
            "one manager grades in processes of its own, by rule or by functions for one response or a batch, and adds "
            "reward_model.reward_kwargs.overlong_buffer_cfg"
        )
    return Refused(
        "is not supported yet: there is one manager. Set custom_reward_function.path to a function for one response or "
        "for a batch, async or not, with custom_reward_function.reward_kwargs.",
        True,
    )


def _reward_server(asked: Asked) -> Outcome:
    """Has no effect here: the reward model runs on the critic's pool. Refused with a custom function that would ask
    it."""
    if asked.look_up("custom_reward_function.path") is not None:
        return Refused(
            "is not supported: a reward model here gives one number for a response, and is not served to your "
            "function. Start a server of its own, and give its address by custom_reward_function.reward_kwargs."
        )
    return Taken("the reward model scores on the critic's devices, in a training backend", "no effect")


def _teacher_server(asked: Asked) -> Outcome:
    """Has no part while distillation is off; else it is refused: a teacher scores in a training backend, and not yet
    on a server."""
    if not is_on(asked.look_up("distillation.enabled")):
        return Taken("distillation is off", "no effect")
    return Refused(
        "is not supported yet: a teacher scores in a training backend, and not on a server. Leave it out; "
        "distillation.n_gpus_per_node gives the teachers devices of their own."
    )


def _hdfs(asked: Asked) -> Outcome:
    """null is so anyway. A path of a mounted disk is where the run's folder goes; hdfs:// is refused."""
    path = asked.value
    if path is None:
        return Taken("runs stay in trainer.default_local_dir")
    if "://" in str(path):
        return Refused("is not supported: mount it as a folder, and set trainer.default_local_dir to a path there.")
    return Became({"trainer.default_local_dir": path}, "the run's folder is there from the start")


def _keep_one(asked: Asked) -> Outcome:
    """True keeps the newest checkpoint alone; the old one is removed when the new one is complete."""
    if not is_on(asked.value):
        return Taken("all checkpoints are kept unless trainer.max_actor_ckpt_to_keep says otherwise")
    return Became({"trainer.max_actor_ckpt_to_keep": 1, "trainer.max_critic_ckpt_to_keep": 1})


def _total_steps(asked: Asked) -> Outcome:
    """-1 is so anyway: a schedule has the run's length. Another number must be that of trainer.total_training_steps."""
    of_run = asked.look_up("trainer.total_training_steps")
    if number(asked.value) in (None, -1) or is_same(asked.value, of_run):
        return Taken("a learning-rate schedule is as long as the run")
    return Refused("is not supported: a schedule is as long as the run. Set trainer.total_training_steps.", True)


def _copies(asked: Asked) -> Outcome:
    """Must be rollout.n, which it is by default."""
    count = asked.look_up(f"{ROLLOUT}.n")
    if asked.value is None or is_same(asked.value, count):
        return Taken(f"it is {ROLLOUT}.n")
    return Refused(f"has one place here: set {ROLLOUT}.n, which is {show(count)}.", True)


RUN_RULES: tuple[Rule, ...] = (
    translated(f"{{model_engine,{ACTOR}.model_engine}}", _model_engine),
    translated("_groups_.**", _group),
    translated("distillation.teacher_models.*.inference.**", _teacher_server),
    no_effect("distillation.teacher_models.*.num_replicas", "all devices of the teachers share the responses"),
    so_anyway(f"{DISTILLATION_LOSS}.policy_loss_mode", "vanilla", why="its policy gradient is PPO's",
              otherwise="is not supported: its policy gradient is PPO's. Leave it out."),
    no_effect(f"{DISTILLATION_LOSS}.{{use_chunked_topk,chunked_topk_chunk_size}}", "logits are made a part at a time"),
    no_effect("trainer.use_v1", "there is one loop, with its order in trainer.schedule"),
    translated("trainer.v1.trainer_mode", _trainer_mode),
    refused("{trainer.v1,async_training,trainer.async_training}.**", SCHEDULE),
    refused("rollout.**", f"is not a key here: settings of the rollout stand below {ROLLOUT}; how far it runs ahead of "
            "the training is trainer.schedule, with devices of its own by trainer.placement.rollout_devices."),
    translated("{global_profiler}.**", _profiler),
    translated("{trainer}.{profile_steps,profile_continuous_steps}", _profiler),
    translated("{trainer}.{worker_nsight_options,controller_nsight_options,npu_profile}.**", _profiler),
    translated(
        f"{{{ACTOR},{ROLLOUT},actor_rollout_ref.ref,critic,reward_model,actor_rollout_ref}}.profiler.**", _profiler
    ),
    no_effect("transfer_queue.**", "its storage is the one that it brings, of num_storage_units processes"),
    # data
    no_effect("data.filter_overlong_prompts_workers", "prompts are tokenised once by the tokenizer's own threads, and "
              "kept for later runs"),
    no_effect("data.dataloader_num_workers", "prompts are in memory as tokens before the first step"),
    no_effect("data.{return_raw_input_ids,return_full_prompt}", "the raw chat is there with data.return_raw_chat"),
    no_effect("data.validation_shuffle", "the order of validation prompts changes no result"),
    no_effect("data.{return_multi_modal_inputs,image_patch_size}", "prompts are text"),
    no_effect("data.gen_batch_size", "prompts are drawn data.train_batch_size at a time until a batch is full"),
    no_effect("{data,actor_rollout_ref.model,critic.model,reward_model.model}.use_shm", "files are read where they "
              "are"),
    refused("data.{image_key,video_key,audio_key}", IMAGES),
    refused("data.{datagen.path,datagen.name}", "is not supported yet: prompts come from files. Leave "
            "it out."),
    # algorithm
    no_effect("algorithm.filter_groups.max_inflight_gen_batches", "batches are generated one after the other until one "
              "is full"),
    refused("algorithm.rollout_correction.{rollout_token_veto_threshold,rollout_is_threshold_lower,"
            "rollout_rs_threshold_lower}", "has another place here: rollout_rs names criteria, and "
            "rollout_rs_threshold their bounds, as low_up where there are two. Leave it out."),
    refused("algorithm.rollout_correction.**", "is none of the keys of rollout correction that there are: see "
            "docs/algorithms/rollout_correction.md. Leave it out.", is_family=True),
    refused("algorithm.{rollout_is,rollout_is_threshold,rollout_is_level,rollout_is_mode,rollout_rs}",
            "has another place here: algorithm.rollout_correction.rollout_is is the level (token or sequence), and "
            "rollout_is_threshold, rollout_rs and rollout_rs_threshold stand beside it."),
    # critic
    translated("critic.enable", _has_critic),
    # rewards
    translated("reward_model.reward_manager", _reward_manager),
    so_anyway("reward_model.reward_manager.source", "register", why="one manager does what those of verl's do",
              otherwise="is not supported yet: there is one manager. Set custom_reward_function.path."),
    refused("reward_model.reward_manager.**", "is not supported yet: there is one manager. Set "
            "custom_reward_function.path."),
    translated("reward_model.rollout.**", _reward_server),
    no_effect("reward_model.{launch_reward_fn_async,use_reward_loop,reward_loop_class_name,reward_loop_source,"
              "reward_loop_module_path}", "rewards are graded in processes beside the loop"),
    no_effect("reward_model.data_processor_config.**", "a reward model reads the chat in its own template"),
    refused("reward_model.sandbox_fusion.**", "has another place here: see reward_model.sandbox."),
    # trainer
    translated("trainer.default_hdfs_dir", _hdfs),
    translated("trainer.remove_previous_ckpt_in_save", _keep_one),
    so_anyway("trainer.del_local_ckpt_after_load", False, why="checkpoints stay where they are",
              otherwise="is not supported: checkpoints stay where they are. Leave it out."),
    so_anyway("trainer.esi_redundant_time", 0, why="no instance is waited for",
              otherwise="is not supported: set trainer.save_on_interrupt=True, which saves on SIGTERM. Leave it out."),
    no_effect("trainer.ray_wait_register_center_timeout", "trainer.heartbeat_timeout_seconds watches workers"),
    no_effect("trainer.use_legacy_worker_impl", "there is one kind of workers"),
    so_anyway("trainer.hybrid_engine", True, why="actor and rollout share devices unless trainer.placement says "
              "otherwise", otherwise="has another place here: set trainer.placement.rollout_devices."),
    so_anyway("actor_rollout_ref.hybrid_engine", True, why="actor and rollout share devices unless trainer.placement "
              "says otherwise", otherwise="has another place here: set trainer.placement.rollout_devices."),
    translated(f"{{{ACTOR},critic,actor_rollout_ref.ref}}.rollout_n", _copies),
    translated(f"{{{ACTOR},critic}}.optim.total_training_steps", _total_steps),
)  # fmt: skip
