"""The workers of the training loop: an engine (and a rollout) under a role's name.

`ActorRolloutRefWorker` is actor, rollout, reference or any mix of them; `TrainingWorker` is the critic or the reward
model. Every method returns a future. Inputs are read only; outputs are new columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from paceline.config import (
    ActorRolloutRefConfig,
    CriticConfig,
    PolicyModelConfig,
    RefConfig,
    RewardModelConfig,
    RolloutConfig,
)
from paceline.config.derived import (
    FORWARD_ROWS,
    UPDATE_ROWS,
    actor_goes_by_tokens,
    by_tokens,
    pipeline_parallel_size,
    tensor_parallel_size,
)
from paceline.data.tokenizer import load_tokenizer
from paceline.engine import Engine, LossFn, MicroBatchSize
from paceline.engine.distributed import ensure_process_group
from paceline.engine.hf_models import build_model
from paceline.engine.lora import LoraSpec
from paceline.errors import ConfigError
from paceline.protocol import DataProto
from paceline.rewards.combine import at_last_token
from paceline.rollout import RolloutEngine, RolloutSpec, SamplingParams, get_rollout
from paceline.rollout.postprocess import prompt_token_lists, to_batch
from paceline.rollout.rollout_interface import DTYPES
from paceline.single_controller.base import Dispatch
from paceline.workers.agent_calls import AgentCalls
from paceline.workers.losses import MiniBatch, actor_loss, critic_loss, with_mean_weight
from paceline.workers.reward_text import JudgedText
from paceline.workers.role_worker import RoleWorker, RunContext, built, micro_batches, role_method
from paceline.workers.weight_calls import WeightCalls
from paceline.workers.weight_sync import WeightSync


def lora_of(model: PolicyModelConfig) -> LoraSpec | None:
    """The adapters that are trained; None: all weights are."""
    return LoraSpec(model.lora_rank, model.lora_alpha, model.target_modules) if model.lora_rank > 0 else None


class ActorRolloutRefWorker(AgentCalls, WeightCalls):
    """Actor, rollout and reference, or any of them, as `role` says (such as "actor_rollout" or "ref")."""

    leaves_inputs_alone = True

    def __init__(self, config: ActorRolloutRefConfig, role: str, run: RunContext) -> None:
        super().__init__(role, run)
        self.config = config
        parts = set(role.split("_"))
        if not parts or parts - {"actor", "rollout", "ref"}:
            raise ConfigError(f"role {role!r} is not a mix of actor, rollout and ref, such as actor_rollout.")
        self.is_actor, self.is_rollout, self.is_ref = (part in parts for part in ("actor", "rollout", "ref"))
        self.reference: Engine | None = None
        self.rollout_is_stale = False

    @property
    def trained_engine(self) -> Engine | None:
        return self.actor

    @property
    def reference_is_actor(self) -> bool:
        """Whether the reference is the actor's model without its adapters, and no second copy."""
        return self.is_actor and lora_of(self.config.model) is not None

    @role_method(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        config = self.config
        if self.is_actor:
            self.actor = self.build_engine(
                config.actor.strategy,
                config.model,
                kind="causal_lm",
                optim=config.actor.optim,
                grad_clip=config.actor.grad_clip,
                tensor_model_parallel_size=tensor_parallel_size(config.actor),
                pipeline_model_parallel_size=pipeline_parallel_size(config.actor),
                ulysses_sequence_parallel_size=config.actor.ulysses_sequence_parallel_size,
                lora=lora_of(config.model),
                offload=config.actor.fsdp_config,
            )
        if self.is_ref and not self.reference_is_actor:
            self.reference = self.build_engine(
                config.actor.strategy,
                config.model,
                kind="causal_lm",
                tensor_model_parallel_size=tensor_parallel_size(config.actor),
                pipeline_model_parallel_size=pipeline_parallel_size(config.actor),
                ulysses_sequence_parallel_size=config.actor.ulysses_sequence_parallel_size,
                offload=config.ref.fsdp_config,
            )
        if self.is_rollout:
            if config.rollout.tensor_model_parallel_size > 1:  # these ranks share engines, and may have no actor
                ensure_process_group(self.run.device, self.run.collective_timeout_seconds)
            self.rollout = self._build_rollout()
            self.weight_sync = WeightSync(self.rollout, config.rollout.on_weight_mismatch)
            self.rollout_is_stale = self.is_actor and config.rollout.load_format != "auto"

    def _build_rollout(self) -> RolloutEngine:
        return get_rollout(self.config.rollout.name).from_spec(
            RolloutSpec(
                model=self.config.model,
                module=self._module_to_sample_from,
                config=self.config.rollout,
                max_prompt_length=self.run.max_prompt_length,
                max_response_length=self.run.max_response_length,
                eos_token_ids=frozenset(self.run.eos_token_ids) - {None},
                pad_token_id=self.run.pad_token_id,
                device=self.run.device,
                dtype=DTYPES[self.config.rollout.dtype or self.config.model.compute_dtype],
            )
        )

    def _module_to_sample_from(self) -> PreTrainedModel:
        """The actor's own module where it lies whole in this process, else a copy that follows it."""
        shared = self.actor.module if self.actor is not None else None
        if shared is not None:
            return shared
        copy = build_model(self.config.model, "causal_lm", train=False)
        # torch orders a product by whether its weights want gradients, also where none are taken; so that a copy gives
        # the actor's own log-probs to the last bit, its weights say what the actor's say.
        copy.requires_grad_(True)
        return copy.to(self.run.device)  # type: ignore[arg-type]  # its decorator hides its arguments

    def on_new_weights(self) -> None:
        # A copy is refreshed when it is next used, so that a save between two updates costs no gather.
        self.rollout_is_stale = self.is_rollout and not self._samples_from_actor
        if self.is_rollout and self._samples_from_actor:
            built(self.rollout).weights_changed(self.version, self.kv_cache)
            built(self.weight_sync).say_shared()

    @property
    def _samples_from_actor(self) -> bool:
        """Whether the rollout uses the actor's own module."""
        shared = self.actor is not None and self.actor.module is not None
        return shared and not built(self.rollout).keeps_own_weights

    @role_method(Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """One response per row, sampled as `meta_info["sampling"]` says with the row's own seed.

        With `meta_info["with_versions"]` there is the column `policy_versions`. `meta_info["version"]` is that of the
        weights that the driver counts on.
        """
        rollout = built(self.rollout)
        sampling = SamplingParams(max_tokens=self.run.max_response_length, **prompts.meta_info["sampling"])
        with self.rollout_on_device(prompts.meta_info.get("version")):
            completions = rollout.generate(prompt_token_lists(prompts), sampling, prompts.batch["seeds"].tolist())
        rollout.sleep()
        return to_batch(
            prompts,
            completions,
            self.run.max_response_length,
            self.run.pad_token_id,
            with_versions=prompts.meta_info.get("with_versions", False),
        )

    @contextmanager
    def rollout_on_device(self, version: int | None = None) -> Iterator[None]:
        rollout, sync = built(self.rollout), built(self.weight_sync)
        if self.rollout_is_stale:
            actor = built(self.actor)
            sync.bring(
                lambda: self.named_policy(adapter=rollout.takes_adapter),
                self.version,
                self.kv_cache,
                any_process=lambda found: actor.sum_over_ranks(float(found)) > 0,
            )
            self.rollout_is_stale = False
        sync.require_version(version)
        # The actor's own module may be offloaded.
        with built(self.actor).on_device() if self._samples_from_actor else nullcontext():
            yield

    @role_method(Dispatch.ONE_TO_ALL)
    def set_version(self, version: int) -> None:
        """Say which version the policy has, where it did not come by an update: after a checkpoint was loaded."""
        self.version = version
        if self.is_rollout and not self.rollout_is_stale:
            built(self.rollout).version = version

    @role_method(Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Log-probs of the responses under the policy as it is now, and what else `meta_info` asks for.

        With `compared` the rollout's stand beside them.
        """
        # An engine of a user's own need not know the word.
        asked: dict[str, Any] = {"sum_pi_squared": True} if data.meta_info.get("sum_pi_squared") else {}
        sizes = self._log_prob_sizes(self.config.rollout)
        output = built(self.actor).infer_batch(data, temperature=self.config.rollout.temperature, **asked, **sizes)
        columns = {"old_log_probs": output["log_probs"], **{name: output[name] for name in asked}}
        if data.meta_info.get("compared"):
            columns["rollout_log_probs"] = data.batch["rollout_log_probs"]
        return DataProto.from_dict(tensors=columns)

    @role_method(Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Log-probs of the responses under the frozen reference."""
        engine = built(self.actor if self.reference_is_actor else self.reference)
        with engine.without_adapter():
            output = engine.infer_batch(
                data, temperature=self.config.rollout.temperature, **self._log_prob_sizes(self.config.ref)
            )
        return DataProto.from_dict(tensors={"ref_log_prob": output["log_probs"]})

    @role_method(Dispatch.DP_COMPUTE_METRIC)
    def update_actor(self, data: DataProto) -> dict[str, float]:
        """PPO's policy update over the dealt mini-batches; metrics of the whole update.

        The policy is then of version `meta_info["version"]`, or one more than before.
        """
        config, correction, engine = self.config.actor, self.run.correction, built(self.actor)
        temperature = self.config.rollout.temperature
        sizes = micro_batches(
            actor_goes_by_tokens(config),
            config.ppo_micro_batch_size_per_gpu,
            config.ppo_max_token_len_per_gpu,
            usual_rows=UPDATE_ROWS,
        )

        def make_loss(shard: DataProto, mini_batch: MiniBatch) -> LossFn:
            if correction.weighs_in_update and correction.normalise:
                log_probs = engine.infer_batch(shard, temperature=temperature, **sizes)["log_probs"]
                mini_batch = with_mean_weight(mini_batch, engine, shard, log_probs, correction)
            return actor_loss(config, mini_batch, correction, self.run.distillation)

        metrics = self.train(engine, data, make_loss, prefix="actor", temperature=temperature, **sizes)
        self.version = data.meta_info.get("version", self.version + 1)
        self.on_new_weights()
        return metrics

    def _log_prob_sizes(self, section: RolloutConfig | RefConfig) -> MicroBatchSize:
        actor, rows = self.config.actor, section.log_prob_micro_batch_size_per_gpu
        return micro_batches(
            by_tokens(section.log_prob_use_dynamic_bsz, rows, otherwise=actor_goes_by_tokens(actor)),
            rows,
            section.log_prob_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu,
            usual_rows=FORWARD_ROWS,
        )


class TrainingWorker(RoleWorker):
    """The critic, or the reward model, as its section of the config says.

    Subclass it to change the critic's model, values or loss, or to score with a model of your own (`score`).
    """

    leaves_inputs_alone = True

    def __init__(self, config: CriticConfig | RewardModelConfig, role: str, run: RunContext) -> None:
        super().__init__(role, run)
        self.config = config
        self.engine: Engine | None = None
        self.judged_text: JudgedText | None = None

    @property
    def trained_engine(self) -> Engine | None:
        return None if isinstance(self.config, RewardModelConfig) else self.engine

    @role_method(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        if isinstance(self.config, RewardModelConfig):
            self.init_reward_model(self.config)
        else:
            config = self.config
            self.engine = self.build_engine(
                config.strategy,
                config.model,
                kind="value",
                optim=config.optim,
                grad_clip=config.grad_clip,
                tensor_model_parallel_size=tensor_parallel_size(config),
                pipeline_model_parallel_size=pipeline_parallel_size(config),
                ulysses_sequence_parallel_size=config.ulysses_sequence_parallel_size,
                offload=config.model.fsdp_config,
            )

    def init_reward_model(self, config: RewardModelConfig) -> None:
        """Read the model and its tokenizer."""
        model = config.model
        self.engine = self.build_engine(
            config.strategy,
            model,
            kind="sequence_classification",
            tensor_model_parallel_size=tensor_parallel_size(config),
            pipeline_model_parallel_size=pipeline_parallel_size(config),
            ulysses_sequence_parallel_size=config.ulysses_sequence_parallel_size,
            offload=model.fsdp_config,
        )
        policy, judge = (
            load_tokenizer(str(path), trust_remote_code=model.trust_remote_code)
            for path in (model.input_tokenizer, model.tokenizer_path or model.path)
        )
        self.judged_text = JudgedText(policy, judge, config.max_length)

    @role_method(Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """The model's score of each response, at its last token; an empty response gets none."""
        scores = at_last_token(self.score(data), data.batch["response_mask"])
        return DataProto.from_dict(tensors={"rm_scores": scores})

    def score(self, data: DataProto) -> torch.Tensor:
        """One number (batch,) for each response. `data` has the model inputs and the chats, as column `raw_prompt`."""
        inputs = DataProto.from_tensordict(built(self.judged_text)(data))
        config = cast(RewardModelConfig, self.config)
        sizes = micro_batches(
            config.use_dynamic_bsz,
            config.micro_batch_size_per_gpu,
            config.forward_max_token_len_per_gpu,
            usual_rows=FORWARD_ROWS,
        )
        return built(self.engine).infer_batch(inputs, **sizes)["scores"]

    @role_method(Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        """The value of the state before each response token."""
        config = cast(CriticConfig, self.config)
        max_tokens = config.forward_max_token_len_per_gpu or config.ppo_max_token_len_per_gpu
        rows = config.forward_micro_batch_size_per_gpu
        sizes = micro_batches(config.use_dynamic_bsz, rows, max_tokens, usual_rows=FORWARD_ROWS)
        output = built(self.engine).infer_batch(data, **sizes)
        return DataProto.from_dict(tensors={"values": output["values"]})

    @role_method(Dispatch.DP_COMPUTE_METRIC)
    def update_critic(self, data: DataProto) -> dict[str, float]:
        """The value update over the dealt mini-batches; metrics of the whole update."""
        config = cast(CriticConfig, self.config)
        return self.train(
            built(self.engine),
            data,
            lambda _, mini_batch: critic_loss(config, mini_batch),
            prefix="critic",
            **micro_batches(
                config.use_dynamic_bsz,
                config.ppo_micro_batch_size_per_gpu,
                config.ppo_max_token_len_per_gpu,
                usual_rows=UPDATE_ROWS,
            ),
        )
