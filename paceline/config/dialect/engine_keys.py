"""Keys of verl's about models and how they are trained: the model's own, optimizers, FSDP, Megatron, VeOmni."""

from __future__ import annotations

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
    show,
    so_anyway,
    switched,
    translated,
)
from paceline.config.keys import ACTOR, MODEL, ROLLOUT

REF = "actor_rollout_ref.ref"
ROLES = f"{ACTOR},{REF},critic,reward_model"
FSDP_SECTIONS = f"{ACTOR}.fsdp_config,{REF}.fsdp_config,critic.model.fsdp_config,reward_model.model.fsdp_config"
ANY = f"{{{ROLES},{FSDP_SECTIONS},critic.model,reward_model.model}}"
FSDP = f"{{{FSDP_SECTIONS}}}"
MODELS = "{actor_rollout_ref.model,critic.model,reward_model.model}"
MEGATRON = f"{{{ROLES}}}.megatron"
TRANSFORMER = f"{MEGATRON}.override_transformer_config"
VEOMNI = f"{{{ROLES}}}.veomni"

_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
_TWO_WAYS = (
    "is not supported yet: megatron divides models by megatron.tensor_model_parallel_size and "
    "pipeline_model_parallel_size. Leave it out."
)
_RECOMPUTE = "megatron recomputes whole layers, one at a time"


def _role(key: str) -> str:
    """The role that a key belongs to: actor_rollout_ref.actor, actor_rollout_ref.ref, critic or reward_model."""
    return next(role for role in (*ROLES.split(","), MODEL) if key.startswith(f"{role}."))


def _compute_dtype_key(role: str) -> str:
    return f"{role}.model.compute_dtype" if role in ("critic", "reward_model") else f"{MODEL}.compute_dtype"


def _compute_dtype(asked: Asked) -> Outcome:
    """bfloat16 or float32 is model.compute_dtype; weights and optimizer stay float32. The reference has the actor's."""
    if asked.value is None:
        return Taken("model.compute_dtype says it")
    role = _role(asked.key)
    dtype, key = _DTYPES.get(str(asked.value), str(asked.value)), _compute_dtype_key(role)
    if dtype not in ("float32", "bfloat16"):
        return Refused("is not supported: set it to float32 or bfloat16.", True)
    if role != REF:
        return Became({key: dtype}, "weights and optimizer stay float32")
    found = asked.look_up(key)
    if dtype == "float32" and found != dtype:
        return Refused(f"has one place here: the reference computes as the actor, {key}={show(found)}.", True)
    return Taken(f"the reference computes as the actor, {key}={show(found)}, and its weights are float32")


def _reduce_dtype(asked: Asked) -> Outcome:
    """float32 is so anyway; another has no effect: gradients are summed in float32, which is more exact."""
    is_so = _DTYPES.get(str(asked.value), str(asked.value)) in ("float32", "None")
    return Taken("gradients are summed in float32", "so anyway" if is_so else "no effect")


def _of_all_devices(asked: Asked) -> Outcome:
    """A number for all devices together: divided by them it is the key that ends with _per_gpu, at least 1. null is
    the default."""
    key = f"{asked.key}_per_gpu"
    count = number(asked.value)
    if count is None:
        return Taken("micro-batches are counted per device")
    sizes = [number(asked.look_up(f"trainer.{name}")) or 1 for name in ("nnodes", "n_gpus_per_node")]
    return Became({key: max(1, int(count // (sizes[0] * sizes[1])))}, "on each device")


def _inferred(asked: Asked) -> Outcome:
    """Forward passes without gradients are by critic.forward_..., and rollout.log_prob_... of the actor."""
    role, name = _role(asked.key), asked.key.rpartition(".")[2].removeprefix("ppo_infer_")
    if asked.value is None:
        return Taken("null asks for nothing")
    return Became({f"critic.forward_{name}" if role == "critic" else f"{ROLLOUT}.log_prob_{name}": asked.value})


def _critic_adapter(asked: Asked) -> Outcome:
    """A rank of 0 is so anyway: all weights of the critic are trained. Another is refused."""
    if not number(asked.look_up("critic.model.lora_rank")):
        return Taken("all weights of the critic are trained")
    return Refused("is not supported: all weights of the critic are trained. Set critic.model.lora_rank=0.", True)


def _chat_template(asked: Asked) -> Outcome:
    """Becomes chat_template of data.apply_chat_template_kwargs, which the tokenizer takes in place of its own."""
    if asked.value is None:
        return Taken("the tokenizer's own template is taken")
    return Became({"data.apply_chat_template_kwargs.chat_template": asked.value}, "for prompts and agents")


def _sequence_parallel(asked: Asked) -> Outcome:
    """The role's own ulysses_sequence_parallel_size. The reference shares sequences as the actor does."""
    role = _role(asked.key)
    if asked.value is None:
        return Taken("null asks for nothing")
    if role == REF:
        return Taken("the reference shares sequences between devices as the actor does", "no effect")
    return Became({f"{role}.ulysses_sequence_parallel_size": asked.value})


def _compile(asked: Asked) -> Outcome:
    """True is model.use_torch_compile with strategy local, which compiles the layers of the model; has no effect with
    another. The reference has the actor's."""
    role = _role(asked.key)
    if role == REF:
        return Taken("the reference is compiled where the actor is", "no effect" if is_on(asked.value) else "so anyway")
    if not is_on(asked.value):
        return Taken("layers run uncompiled unless model.use_torch_compile says otherwise")
    strategy = asked.look_up(f"{role}.strategy")
    if strategy is None:
        is_alone = all(is_same(asked.look_up(f"trainer.{name}"), 1) for name in ("nnodes", "n_gpus_per_node"))
        strategy = "local" if is_alone else "fsdp2"
    if strategy != "local":
        return Taken(
            f"strategy {show(strategy)} runs layers uncompiled; local, on one device, compiles them", "no effect"
        )
    return Became({f"{MODEL if role == ACTOR else f'{role}.model'}.use_torch_compile": True})


def _shard_size(asked: Asked) -> Outcome:
    """A model is sharded over all devices of its pool, as -1 asks; a smaller number would take more memory, and
    changes no result."""
    size = number(asked.value)
    is_all = size is None or size < 1
    return Taken("a model is sharded over all devices of its pool", "so anyway" if is_all else "no effect")


def _offload_policy(asked: Asked) -> Outcome:
    """True keeps weights and optimizer in main memory between calls, as param_offload and optimizer_offload do."""
    if not is_on(asked.value):
        return Taken("weights stay on the device unless param_offload says otherwise")
    section = asked.parts[0]
    if section.startswith((REF, "reward_model")):
        return Became({f"{section}.param_offload": True})
    return Became({f"{section}.param_offload": True, f"{section}.optimizer_offload": True}, "between calls")


def _backend_offload(asked: Asked) -> Outcome:
    """Becomes fsdp_config.param_offload and optimizer_offload, which all backends but torchtitan take; gradients are
    there during an update alone. Has no part where another backend trains."""
    if not is_on(asked.value):
        return Taken("weights stay on the device unless fsdp_config.param_offload says otherwise")
    role, backend, name = _role(asked.key), *asked.key.split(".")[-2:]
    strategy = asked.look_up(f"{ACTOR if role == REF else role}.strategy")
    if strategy != backend:
        return Taken(f"the strategy is {show(strategy)}", "no effect")
    if name == "grad_offload":
        return Taken("gradients are there during an update alone")
    section = f"{role}.fsdp_config" if role in (ACTOR, REF) else f"{role}.model.fsdp_config"
    parts = [name] if name in ("param_offload", "optimizer_offload") else ["param_offload", "optimizer_offload"]
    if role in (REF, "reward_model"):
        parts = [part for part in parts if part == "param_offload"]
        if not parts:
            return Taken("it has no optimizer", "no effect")
    return Became({f"{section}.{part}": True for part in parts}, "between calls")


def _reference_strategy(asked: Asked) -> Outcome:
    """The reference has the actor's backend; fsdp beside fsdp2 makes no difference to a result."""
    actor = str(asked.look_up(f"{ACTOR}.strategy") or "fsdp2")
    if asked.value is None or is_same(asked.value, actor) or {str(asked.value), actor} <= {"fsdp", "fsdp2"}:
        return Taken(f"the reference has the actor's backend, {actor}")
    return Refused(f"has one place here: the reference has the actor's backend. Set {ACTOR}.strategy.", True)


def _reference_megatron(asked: Asked) -> Outcome:
    """The reference is divided as the actor: what is equal to the actor's is so anyway, another value is refused."""
    key = f"{ACTOR}.{asked.parts[0]}.{asked.parts[1]}"
    actors = asked.look_up(key)
    if asked.value in (None, "", False) or is_same(asked.value, actors) or (actors is None and is_same(asked.value, 1)):
        return Taken("the reference is divided as the actor")
    if actors is None and asked.parts[1].endswith("mbridge"):
        return Refused(f"has one place here: the reference has the actor's backend. Set {key}.", True)
    return Refused(f"has one place here: the reference is divided as the actor, by {key}={show(actors)}.", True)


def _min_lr(asked: Asked) -> Outcome:
    """Becomes optim.min_lr_ratio, the share of optim.lr at which a schedule ends; a constant rate has none."""
    section = asked.key.rpartition(".")[0]
    low, high = number(asked.value), number(asked.look_up(f"{section}.lr"))
    if asked.look_up(f"{section}.lr_scheduler_type") in (None, "constant") or not low:
        return Taken("a constant rate has no end, and other schedules end at 0", "no effect" if low else "so anyway")
    if not high or low > high:
        return Refused(f"is more than {section}.lr. Set {section}.min_lr_ratio.", True)
    return Became({f"{section}.min_lr_ratio": low / high})


def _activation_offload(asked: Asked) -> Outcome:
    """True is enable_gradient_checkpointing: activations are not moved to main memory, but computed again."""
    if not is_on(asked.value):
        return Taken("activations stay on the device")
    return Became({f"{asked.parts[0]}.enable_gradient_checkpointing": True}, "computed again instead of moved")


def _recompute(asked: Asked) -> Outcome:
    """full or selective is enable_gradient_checkpointing."""
    role = _role(asked.key)
    key = (
        f"{role}.model.enable_gradient_checkpointing" if role == "critic" else f"{MODEL}.enable_gradient_checkpointing"
    )
    return Taken("nothing is recomputed") if asked.value is None else Became({key: True}, _RECOMPUTE)


def _veomni_activations(asked: Asked) -> Outcome:
    """True is enable_gradient_checkpointing: activations are not moved to main memory, but computed again."""
    if not is_on(asked.value):
        return Taken("activations stay on the device")
    role = _role(asked.key)
    model = f"{role}.model" if role == "critic" else MODEL
    return Became({f"{model}.enable_gradient_checkpointing": True}, "computed again instead of moved")


def _dist_checkpoint(asked: Asked) -> Outcome:
    """Weights come from the Hugging Face folder of model.path; those of a Megatron checkpoint are refused."""
    switch = asked.look_up(f"{_role(asked.key)}.megatron.use_dist_checkpointing")
    if not is_on(switch):
        return Taken("weights come from the folder of model.path")
    return Refused(
        "is not supported: weights come from a Hugging Face folder. Leave it out, and set model.path to one."
    )


_MODEL_RULES: tuple[Rule, ...] = (
    so_anyway(f"{MODELS}.use_fused_kernels", True, False,
              why="log-probs and entropies come from hidden states in chunks, without whole logits",
              otherwise="is not supported. Leave it out."),
    no_effect(f"{MODELS}.fused_kernel_options.**", "log-probs and entropies are computed in chunks by PyTorch"),
    no_effect(f"{MODELS}.use_liger", "models run in the layers of transformers"),
    translated(f"{MODELS}.enable_activation_offload", _activation_offload),
    so_anyway(f"{MODEL}.lora.merge", True, why="the rollout gets the weights with the adapter merged",
              otherwise="is not supported: the rollout gets merged weights. Leave it out."),
    so_anyway(f"{MODEL}.lora.{{dropout,lora_dropout}}", 0, why="adapters have no dropout",
              otherwise="is not supported: adapters have no dropout. Leave it out."),
    so_anyway(f"{MODEL}.lora.type", "lora", why="adapters are LoRA's", otherwise="is not supported; use lora."),
    refused(f"{MODEL}.lora.**", "is not supported. Leave it out.", is_family=True),
    refused(f"{MODEL}.exclude_modules", "is not supported: name the layers that get an adapter in "
            f"{MODEL}.target_modules."),
    refused(f"{MODEL}.lora_adapter_path", "is not supported: merge the adapter into the model, and give "
            f"{MODEL}.path."),
    translated("critic.model.{lora_rank,lora_alpha,target_modules}", _critic_adapter),
    translated(f"{MODEL}.custom_chat_template", _chat_template),
    no_effect("{critic,reward_model}.model.custom_chat_template", "it reads the token ids of the policy"),
    refused(f"{MODELS}.hf_config_path", "is not supported: put it into the model's folder, in config.json."),
    no_effect(f"{MODELS}.override_config.{{attn_implementation,use_cache}}", "which kernels compute a layer changes "
              "speed alone"),
    so_anyway(f"{MODELS}.override_config.{{attention_dropout,attn_pdrop,embd_pdrop,resid_pdrop,hidden_dropout,"
              "classifier_dropout,summary_dropout_prob}", 0, why="models run without dropout",
              otherwise="is not supported: models run without dropout. Leave it out."),
    refused(f"{MODELS}.override_config.**", "is not supported: change config.json in a copy of the model's folder."),
    so_anyway(f"{{{ACTOR},{REF},critic,reward_model}}.use_fused_kernels", True, False,
              why="log-probs and entropies come from hidden states in chunks", otherwise="is not supported."),
    switched(f"{MODELS}.mtp", "is not supported: models predict one token at a time. Leave it out.",
             why="models predict one token at a time"),
    switched(f"{MODELS}.tiled_mlp", "is not supported: lower ppo_max_token_len_per_gpu instead. Leave it out.",
             why="an MLP takes a micro-batch at once", switch="enabled"),
    no_effect("{critic,reward_model}.model.tokenizer_path", "it reads the token ids of the policy"),
)  # fmt: skip

_TRAINING_RULES: tuple[Rule, ...] = (
    translated(f"{ANY}.use_torch_compile", _compile),
    no_effect(f"{ANY}.entropy_from_logits_with_chunking", "log-probs and entropies are always computed in chunks"),
    no_effect(f"{ANY}.{{entropy_checkpointing,sum_pi_squared_checkpointing}}", "logits beyond a chunk are always "
              "computed again in the backward pass"),
    translated(f"{{{REF},{FSDP_SECTIONS},critic.model,reward_model.model}}.ulysses_sequence_parallel_size",
               _sequence_parallel),
    no_effect(f"{ANY}.{{use_prefix_grouper,pad_to_length}}", "every response is computed with its prompt, whatever its "
              "length; the result is the same"),
    no_effect(f"{{{ROLES}}}.checkpoint.**", "a checkpoint has weights, optimizer, random states and the place in the "
              "data, and is written beside the next step; `paceline export` makes a Hugging Face folder of it"),
    no_effect(f"{{{ROLES}}}.data_loader_seed", "all random numbers come from trainer.seed"),
    so_anyway(f"{{{ROLES}}}.load_weight", True, why="weights are read from model.path",
              otherwise="is not supported. Leave it out."),
    so_anyway(f"{ACTOR}.freeze_vision_tower", False, why="models are of text",
              otherwise="is not supported yet: models are of text. Leave it out."),
    no_effect(f"{ACTOR}.{{calculate_entropy,calculate_sum_pi_squared}}", "what the estimator and the metrics need is "
              "computed"),
    translated(f"{{{ACTOR}.ppo_micro_batch_size,{REF}.log_prob_micro_batch_size,{ROLLOUT}.log_prob_micro_batch_size,"
               "critic.ppo_micro_batch_size,critic.forward_micro_batch_size,reward_model.micro_batch_size}",
               _of_all_devices),
    translated(f"{{{ACTOR},critic}}.{{ppo_infer_micro_batch_size_per_gpu,ppo_infer_max_token_len_per_gpu}}", _inferred),
    no_effect(f"{REF}.{{ppo_micro_batch_size,ppo_micro_batch_size_per_gpu,ppo_max_token_len_per_gpu,use_dynamic_bsz,"
              "ppo_infer_micro_batch_size_per_gpu,ppo_infer_max_token_len_per_gpu}", "its log_prob_... say it"),
    switched(f"{ACTOR}.qat", "is not supported. Leave it out.", why="weights are float32"),
    so_anyway(f"{{{ROLES}}}.{{router_replay,megatron.router_replay,veomni.router_replay}}.mode", "disabled",
              why="a router chooses again in each pass",
              otherwise="is not supported: a router chooses again in each pass. Leave it out."),
    refused(f"{{{ROLES}}}.{{router_replay,megatron.router_replay,veomni.router_replay}}.**", "is not supported. Leave "
            "it out."),
    refused(f"{{{ROLES}}}.engine.**", f"is not supported: set {ACTOR}.strategy to a training backend that is here."),
    translated(f"{REF}.strategy", _reference_strategy),
    so_anyway(f"{REF}.enable", True, why="there is a reference where a KL term needs one",
              otherwise="is not supported: turn the KL terms off. Leave it out."),
    # optimizers
    so_anyway(f"{{{ACTOR},critic}}.optim.optimizer", "AdamW", "adam", "adamw_torch", why="the optimizer is AdamW",
              otherwise="is not supported: the optimizer is AdamW. Leave it out."),
    so_anyway(f"{{{ACTOR},critic}}.optim.optimizer_impl", "torch.optim", why="the optimizer is PyTorch's",
              otherwise="is not supported: the optimizer is PyTorch's. Leave it out."),
    so_anyway(f"{{{ACTOR},critic}}.optim.num_cycles", 0.5, why="a cosine goes down once",
              otherwise="is not supported: a cosine goes down once. Leave it out."),
    translated(f"{{{ACTOR},critic}}.optim.min_lr", _min_lr),
    so_anyway(f"{{{ACTOR},critic}}.optim.lr_warmup_init", 0, why="a warm-up begins at 0",
              otherwise="is not supported: a warm-up begins at 0. Leave it out."),
    so_anyway(f"{{{ACTOR},critic}}.optim.weight_decay_incr_style", "constant", why="weight decay is constant",
              otherwise="is not supported: weight decay is constant. Leave it out."),
    refused(f"{{{ACTOR},critic}}.optim.{{lr_decay_steps,lr_wsd_decay_style,lr_wsd_decay_steps}}",
            "is not supported: a schedule is as long as the run. Leave it out."),
    no_effect(f"{{{ACTOR},critic}}.optim.use_checkpoint_opt_param_scheduler", "a resumed run goes on with its plan"),
    refused(f"{{{ACTOR},critic}}.optim.override_optimizer_config.**", "is not supported: the optimizer is AdamW in "
            "float32, with the keys beside it; optimizer_offload keeps its state in main memory between updates."),
    refused(f"{{{ACTOR},critic}}.optim.**", "is not supported: the optimizer is AdamW, with the keys beside it.",
            is_family=True),
)  # fmt: skip

_FSDP_RULES: tuple[Rule, ...] = (
    translated(f"{FSDP}.fsdp_size", _shard_size),
    no_effect(f"{FSDP}.reshard_after_forward", "the weights of a layer are given back after its forward pass"),
    no_effect(f"{FSDP}.{{forward_prefetch,use_orig_params,forward_only}}", "FSDP chooses it"),
    no_effect(f"{FSDP}.wrap_policy.**", "each decoder layer is one unit"),
    no_effect(f"{FSDP}.grad_offload", "gradients are there during an update alone"),
    translated(f"{FSDP}.offload_policy", _offload_policy),
    no_effect(f"{{{REF}.fsdp_config,reward_model.model.fsdp_config}}.optimizer_offload", "it has no optimizer"),
    translated(f"{FSDP}.{{model_dtype,dtype,mixed_precision.param_dtype}}", _compute_dtype),
    translated(f"{FSDP}.mixed_precision.reduce_dtype", _reduce_dtype),
    no_effect(f"{FSDP}.mixed_precision.buffer_dtype", "buffers keep the dtype that the model gives them"),
    no_effect(f"{FSDP}.{{seed,use_dynamic_bsz,max_token_len_per_gpu}}", "trainer.seed and the keys of the role say it"),
    so_anyway(f"{FSDP}.full_determinism", False, why="kernels are PyTorch's choice",
              otherwise="is not supported: one trainer.seed gives one result on a CPU; kernels are PyTorch's choice "
              "on a GPU. Leave it out."),
    switched(f"{FSDP}.qat", "is not supported. Leave it out.", why="weights are float32"),
    refused(f"{FSDP}.**", "is a setting of verl's FSDP that is not known here. Leave it out.", is_family=True),
)  # fmt: skip

_MEGATRON_RULES: tuple[Rule, ...] = (
    translated(f"{{{ROLES}}}.{{megatron,veomni,torchtitan}}.{{param_offload,grad_offload,optimizer_offload,"
               "offload_policy,enable_fsdp_offload}", _backend_offload),
    translated(f"{REF}.{{megatron,veomni,torchtitan}}.**", _reference_megatron),
    so_anyway(f"{MEGATRON}.{{virtual_pipeline_model_parallel_size,context_parallel_size,expert_model_parallel_size,"
              "expert_tensor_parallel_size}", 1, why="megatron divides models by tensor_model_parallel_size and "
              "pipeline_model_parallel_size alone", otherwise=_TWO_WAYS),
    no_effect(f"{MEGATRON}.{{sequence_parallel,use_distributed_optimizer}}", "it changes memory and speed alone"),
    no_effect(f"{MEGATRON}.{{use_mbridge,vanilla_mbridge}}", "weights come from and go to Hugging Face folders"),
    translated(f"{MEGATRON}.{{use_dist_checkpointing,dist_checkpointing_path,dist_checkpointing_prefix}}",
               _dist_checkpoint),
    so_anyway(f"{MEGATRON}.{{use_megatron_fsdp,use_remove_padding}}", False, why="megatron does neither here",
              otherwise="is not supported. Set it to False."),
    translated(f"{MEGATRON}.dtype", _compute_dtype),
    no_effect(f"{MEGATRON}.{{seed,entropy_from_logits_with_chunking}}", "trainer.seed says it, and log-probs come in "
              "chunks"),
    translated(f"{TRANSFORMER}.recompute_granularity", _recompute),
    no_effect(f"{TRANSFORMER}.{{recompute_method,recompute_num_layers,recompute_modules}}", _RECOMPUTE),
    no_effect(f"{TRANSFORMER}.*_fusion", "which kernels compute a layer changes speed alone"),
    no_effect(f"{TRANSFORMER}.{{use_flash_attn,attention_backend,use_fused_rmsnorm,use_fused_swiglu,use_naive_l2norm,"
              "persist_layer_norm,deallocate_pipeline_outputs,moe_grouped_gemm,use_fused_mhc}",
              "which kernels compute a layer changes speed alone"),
    no_effect(f"{TRANSFORMER}.{{normalization,swiglu,sequence_parallel,use_distributed_optimizer}}", "the model's "
              "config.json says how it is built"),
    refused(f"{MEGATRON}.{{override_transformer_config,override_ddp_config,override_mcore_model_config}}.**",
            "is not supported yet: the model's config.json says how it is built. Leave it out."),
    refused(f"{MEGATRON}.**", "is a setting of Megatron that is not known here. Leave it out.", is_family=True),
)  # fmt: skip

_OTHER_BACKENDS: tuple[Rule, ...] = (
    translated(f"{{{ACTOR},critic}}.veomni.activation_offload", _veomni_activations),
    so_anyway(f"{VEOMNI}.{{expert_parallel_size,ulysses_parallel_size,context_parallel_size}}", 1,
              why="veomni shards a model over all devices, and a sequence stays on one",
              otherwise="is not supported yet: veomni shards a model over all devices, and a sequence stays on one. "
              "Set it to 1."),
    so_anyway(f"{VEOMNI}.enable_full_shard", True, why="veomni shards a model over all devices",
              otherwise="is not supported. Set it to True."),
    translated(f"{VEOMNI}.fsdp_size", _shard_size),
    no_effect(f"{VEOMNI}.*_implementation", "which kernels compute a layer changes speed alone"),
    translated(f"{VEOMNI}.{{dtype,model_dtype,mixed_precision.param_dtype}}", _compute_dtype),
    no_effect(f"{VEOMNI}.{{seed,forward_prefetch,enable_reentrant}}", "it changes no result here"),
    refused(f"{VEOMNI}.**", "is a setting of VeOmni that is not known here. Leave it out.", is_family=True),
    no_effect(f"{{{ROLES}}}.torchtitan.{{attn_type,data_parallel_shard_size,reshard_after_forward,max_seq_len,seed,"
              "forward_prefetch}", "it shards over the devices that are left, and which kernels compute a layer "
              "changes speed alone"),
    translated(f"{{{ROLES}}}.torchtitan.{{dtype,model_dtype,mixed_precision.param_dtype}}", _compute_dtype),
    so_anyway(f"{{{ROLES}}}.torchtitan.{{pipeline_parallel_size,context_parallel_size,expert_parallel_size,"
              "expert_tensor_parallel_size,data_parallel_replicate_size}", 1,
              why="torchtitan divides models by tensor_model_parallel_size, and shards over the other devices",
              otherwise="is not supported yet: torchtitan divides models by tensor_model_parallel_size. Set it to 1."),
    so_anyway(f"{{{ROLES}}}.torchtitan.use_torch_compile", False, why="models run uncompiled",
              otherwise="is not supported yet: models run uncompiled. Set it to False."),
    refused(f"{{{ROLES}}}.torchtitan.**", "is a setting of torchtitan that is not known here. Leave it out.",
            is_family=True),
)  # fmt: skip

ENGINE_RULES: tuple[Rule, ...] = (
    *_MODEL_RULES,
    *_TRAINING_RULES,
    *_FSDP_RULES,
    *_MEGATRON_RULES,
    *_OTHER_BACKENDS,
)
