"""Keys of verl's about how responses are sampled."""

from __future__ import annotations

from paceline.config.dialect.rule_kinds import (
    Asked,
    Became,
    Outcome,
    Refused,
    Rule,
    Taken,
    is_on,
    no_effect,
    number,
    refused,
    show,
    so_anyway,
    switched,
    translated,
)
from paceline.config.keys import ACTOR, ROLLOUT

_DEVICES = "has another place here: set trainer.placement.rollout_devices, devices that do nothing but generate."


def _longest(asked: Asked) -> Outcome:
    """At least the longest prompt and response together is so anyway: engines are started for that. Less is refused."""
    lengths = [number(asked.look_up(f"data.max_{part}_length")) for part in ("prompt", "response")]
    longest, limit = int(sum(length or 0 for length in lengths)), number(asked.value)
    if limit is None or limit >= longest:
        return Taken(f"the engine is started for a prompt and a response together, {longest} tokens")
    return Refused(
        f"is less than a prompt and its response may have, {longest} tokens. Set it to that, or lower "
        "data.max_prompt_length or data.max_response_length.",
        True,
    )


def _of_vllm(asked: Asked) -> Outcome:
    """With rollout.name=vllm it goes to vLLM by rollout.engine_kwargs.vllm; other engines have no such thing."""
    if asked.look_up(f"{ROLLOUT}.name") != "vllm":
        return Taken(f"the {show(asked.look_up(f'{ROLLOUT}.name'))} rollout has no such thing", "no effect")
    if asked.value is None:
        return Taken("vLLM chooses it")
    nested = {"cudagraph_capture_sizes": "compilation_config.cudagraph_capture_sizes"}
    name = asked.key.rpartition(".")[2]
    return Became({f"{ROLLOUT}.engine_kwargs.vllm.{nested.get(name, name)}": asked.value})


def _replicas(asked: Asked) -> Outcome:
    """1 is so anyway, and more too where no experts are divided: every device of the pool belongs to some engine."""
    experts = number(asked.look_up(f"{ROLLOUT}.expert_parallel_size"))
    if (number(asked.value) or 1) <= 1 or (experts or 1) <= 1:
        return Taken("all devices generate, in as many engines as tensor_model_parallel_size gives")
    return Refused("is not supported yet with divided experts. Set it to 1.", True)


def _own_devices(asked: Asked) -> Outcome:
    """Without nodes of its own (nnodes=0) a rollout shares the actor's devices, as here; with them it is refused."""
    if not number(asked.look_up(f"{ROLLOUT}.nnodes")):
        return Taken("the rollout shares the actor's devices unless trainer.placement says otherwise")
    return Refused(_DEVICES, True)


def _trusted(asked: Asked) -> Outcome:
    """True is rollout.trust_log_probs=True."""
    return (
        Became({f"{ROLLOUT}.trust_log_probs": True}) if is_on(asked.value) else Taken("the actor computes them again")
    )


ROLLOUT_RULES: tuple[Rule, ...] = (
    no_effect(f"{ROLLOUT}.mode", "the engine runs in the workers, and the responses are drawn the same way"),
    no_effect(f"{ROLLOUT}.calculate_log_probs", "responses always come with the engine's log-probs"),
    translated(f"{ACTOR}.use_rollout_log_probs", _trusted),
    translated(f"{ROLLOUT}.max_model_len", _longest),
    translated(
        f"{ROLLOUT}.{{enable_prefix_caching,disable_log_stats,cudagraph_capture_sizes,scheduling_policy,quantization}}",
        _of_vllm,
    ),
    translated(f"{ROLLOUT}.data_parallel_size", _replicas),
    so_anyway(f"{ROLLOUT}.{{expert_parallel_size,pipeline_model_parallel_size}}", 1,
              why="an engine is divided by tensor_model_parallel_size alone",
              otherwise="is not supported yet: an engine is divided by tensor_model_parallel_size alone. Set it to 1."),
    no_effect(f"{ROLLOUT}.{{update_weights_bucket_megabytes,layered_summon,multi_stage_wake_up,"
              "enable_sleep_mode}", "new weights go to the engine in memory, some at a time"),
    no_effect(f"{ROLLOUT}.checkpoint_engine.**", "new weights go to the engine in memory, some at a time"),
    no_effect(f"{ROLLOUT}.skip_tokenizer_init", "an engine takes and gives token ids"),
    so_anyway(f"{ROLLOUT}.logprobs_mode", "processed_logprobs", why="log-probs are those at the sampling temperature",
              otherwise="is not supported: log-probs are those at the sampling temperature. Leave it out."),
    so_anyway(f"{ROLLOUT}.{{repetition_penalty,val_kwargs.repetition_penalty}}", 1, why="no token is penalised",
              otherwise="is not supported: the policy is what the model says. Leave it out."),
    so_anyway(f"{ROLLOUT}.{{presence_penalty,frequency_penalty,min_p}}", 0, why="no token is penalised",
              otherwise="is not supported: the policy is what the model says. Leave it out."),
    so_anyway(f"{ROLLOUT}.over_sample_rate", 0, why="every prompt gets its responses",
              otherwise="is not supported: every prompt gets its responses. Leave it out."),
    so_anyway(f"{ROLLOUT}.{{enable_rollout_routing_replay,use_fire_sampling,skip_rollout}}", False,
              why="every response is sampled anew", otherwise="is not supported. Set it to False."),
    no_effect(f"{ROLLOUT}.{{skip_dump_dir,limit_images}}", "every response is sampled anew, to prompts of text"),
    refused(f"{ROLLOUT}.quantization_config_file", "is not supported: give a quantized model to vLLM by "
            "rollout.engine_kwargs.vllm. Leave it out."),
    switched(f"{ROLLOUT}.skip", "is not supported: every response is sampled anew. Leave it out.",
             why="every response is sampled anew"),
    no_effect(f"{ROLLOUT}.multi_turn.{{use_inference_chat_template,tokenization_sanity_check_mode,num_repeat_rollouts}}",
              "sampled tokens are kept as they came, and observations are what the template writes"),
    switched(f"{ROLLOUT}.multi_turn", "is not supported. Leave it out.", why="a response is one turn"),
    refused(f"{ROLLOUT}.agent.**", "is not supported: agent processes are paceline's own. Leave it out.",
            is_family=True),
    switched(f"{ROLLOUT}.prometheus", "is not supported: metrics.jsonl and trackers have the metrics. Leave it out.",
             why="metrics.jsonl and the trackers have the metrics"),
    switched(f"{ROLLOUT}.mtp", "is not supported. Leave it out.", why="models predict one token at a time"),
    refused(f"{ROLLOUT}.trace.**", "is not supported: trainer.rollout_data_dir keeps all responses. Leave it out."),
    translated(f"{ROLLOUT}.{{nnodes,n_gpus_per_node}}", _own_devices),
    no_effect(f"{ROLLOUT}.seed", "all random numbers come from trainer.seed"),
    no_effect(f"{ROLLOUT}.engine_kwargs.{{sglang,trtllm}}.**", "it is for an engine that is not here"),
    refused(f"{ROLLOUT}.{{server,custom,replica,disaggregation}}.**", "is not supported: engines run in the workers. "
            "Leave it out."),
)  # fmt: skip
