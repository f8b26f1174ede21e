"""From config to loss functions: what the engine calls on each micro-batch.

Losses are shares of the aggregate over the *global* mini-batch, so that their sum over micro-batches and ranks is that
aggregate, however the mini-batch was cut. Metrics come as sums, and `MiniBatch` knows what to divide them by.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypedDict

from tensordict import TensorDict
from torch import Tensor

from paceline.algorithms.aggregation import Aggregate, LossNormaliser, agg_loss
from paceline.algorithms.correction_metrics import PREFIX
from paceline.algorithms.kl import kl_loss, kl_penalty
from paceline.algorithms.masking import masked_mean, masked_sum, zero_outside
from paceline.algorithms.policy_loss import clipped_policy_loss, get_policy_loss, loss_in_use, loss_traits
from paceline.algorithms.rollout_correction import (
    MAX_LOG_RATIO,
    NO_CORRECTION,
    SMALLEST_MEAN,
    RolloutCorrection,
    importance_weights,
    kept_tokens,
    log_ratio_of,
    response_weights,
)
from paceline.algorithms.teacher_divergence import top_k_divergence
from paceline.algorithms.value_loss import clipped_value_loss
from paceline.catalog import LossEntry
from paceline.config import ActorConfig, CriticConfig, DistillationLossConfig
from paceline.engine import Engine, LossFn
from paceline.protocol import DataProto


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step's worth of responses, as dealt by the driver.

    `rows_per_shard` counts a rank's rows, padding and empty responses included; the other two count the whole
    mini-batch without either.
    """

    rows_per_shard: int
    num_tokens: int
    num_sequences: int
    mean_weight: float = 1.0
    """What importance weights are divided by, where the update makes them: see `with_mean_weight`."""

    def per_token(self, total: Tensor) -> Tensor:
        """A sum over tokens as this micro-batch's share in the mean over the mini-batch's; 0 if it has no token."""
        return total / max(self.num_tokens, 1)

    def aggregate(self, mask: Tensor, kept: Tensor, mode: str, length: float | None = None) -> Aggregate:
        """The share of a micro-batch with this mask in the mini-batch's aggregate.

        What was not kept counts as 0 in the sums and in full in the divisors: that a token is rejected makes no other
        weigh more. `length` is the constant of seq-mean-token-sum-norm, if it is not the width.
        """
        normaliser = LossNormaliser(self.num_tokens, self.num_sequences, length or mask.shape[-1])
        return lambda matrix: agg_loss(zero_outside(matrix, kept), mask, mode, normaliser)


def actor_loss(
    config: ActorConfig,
    mini_batch: MiniBatch,
    correction: RolloutCorrection = NO_CORRECTION,
    distillation: DistillationLossConfig | None = None,
) -> LossFn:
    """Policy loss, the loss to the teacher or both, less the entropy bonus, plus the KL loss."""
    from_rewards = distillation is None or distillation.use_task_rewards
    name = loss_in_use(config.policy_loss.loss_mode, bypass=correction.bypass)
    policy_loss, traits = get_policy_loss(name), loss_traits(name)
    settings, vanilla = loss_settings(config, traits), loss_traits("vanilla")
    clips = loss_settings(config, vanilla)

    def loss_fn(output: dict[str, Tensor], micro_batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        log_probs, entropy, mask = output["log_probs"], output["entropy"], micro_batch["response_mask"]
        # Without an old-log-prob pass this is the only optimizer step on the batch: the old policy is this one.
        old_log_probs = micro_batch.get("old_log_probs", None)
        old_log_probs = log_probs.detach() if old_log_probs is None else old_log_probs
        if correction.bypass:
            kept, weights, metrics = correct_in_update(log_probs, old_log_probs, mask, correction, mini_batch)
        else:
            kept, weights, metrics = kept_mask(micro_batch), micro_batch.get("rollout_is_weights", None), {}
        agg = mini_batch.aggregate(
            mask, kept, config.loss_agg_mode or traits.loss_agg_mode, length=config.loss_scale_factor
        )
        metrics["entropy"] = mini_batch.per_token(masked_sum(entropy.detach(), mask))
        loss = log_probs.new_zeros(())
        if from_rewards:
            loss, token_sums = policy_loss(
                old_log_probs,
                log_probs,
                micro_batch["advantages"],
                kept,
                agg=agg if weights is None else weighted(agg, weights, kept, traits),
                chosen=micro_batch.get("high_covariance", None),
                loss_type=correction.loss_type,
                **settings,
            )
            metrics |= {name: mini_batch.per_token(total) for name, total in token_sums.items()}
            metrics["pg_loss"] = loss.detach()
        if distillation is not None:
            by_sampling = agg if weights is None else weighted(agg, weights, kept, vanilla)
            term, token_sums = teacher_loss(
                distillation, output, micro_batch, old_log_probs, kept, agg=agg, by_sampling=by_sampling, clips=clips
            )
            metrics["actor/distillation/loss"] = term.detach()
            metrics |= {f"actor/distillation/{name}": mini_batch.per_token(sums) for name, sums in token_sums.items()}
            loss = loss + distillation.distillation_loss_coef * term
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * agg(entropy)
        if config.use_kl_loss:
            sampled_by = old_log_probs if config.unbiased_kl_loss else None
            divergence = agg(kl_loss(log_probs, micro_batch["ref_log_prob"], config.kl_loss_type, sampled_by))
            metrics["kl_loss"] = divergence.detach()
            loss = loss + config.kl_loss_coef * divergence
        return loss, metrics

    return loss_fn


def teacher_loss(
    config: DistillationLossConfig,
    output: dict[str, Tensor],
    micro_batch: TensorDict,
    old_log_probs: Tensor,
    kept: Tensor,
    *,
    agg: Aggregate,
    by_sampling: Aggregate,
    clips: LossSettings,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The distance to the teacher as a loss, or as an advantage in PPO's loss; and sums over tokens for metrics.

    `by_sampling` aggregates with the importance weights of the samples, which a policy gradient wants.
    """
    log_probs, sums = output["log_probs"], {}
    if config.loss_mode.startswith("forward_kl_topk"):
        student, teacher = output["top_log_probs"], micro_batch["top_log_probs"]
        with_tail = config.loss_mode == "forward_kl_topk_tail"
        distance = top_k_divergence(student, teacher, floor=config.log_prob_min_clamp, with_tail=with_tail)
        for name, column in (("student_mass", student), ("teacher_mass", teacher)):
            sums[name] = masked_sum(column.detach().exp().sum(dim=-1), kept)
    else:
        distance = kl_penalty(log_probs, micro_batch["teacher_log_probs"], config.loss_mode)
    sums["abs_loss"] = masked_sum(distance.detach().abs(), kept)
    if config.loss_max_clamp is not None:
        distance = distance.clamp(-config.loss_max_clamp, config.loss_max_clamp)
    if not config.use_policy_gradient:
        return agg(distance), sums
    loss, clipped = clipped_policy_loss(old_log_probs, log_probs, -distance.detach(), kept, agg=by_sampling, **clips)
    return loss, sums | clipped


class LossSettings(TypedDict):
    """Numbers of the configuration, by the names under which a policy loss takes them."""

    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_c: float
    tau_pos: float
    tau_neg: float
    ppo_kl_coef: float
    dro_beta: float | None


def loss_settings(config: ActorConfig, traits: LossEntry) -> LossSettings:
    """The settings of a loss, with what the configuration leaves open filled in."""
    low, high, c = config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c
    return {
        "clip_ratio_low": config.clip_ratio if low is None else low,
        "clip_ratio_high": config.clip_ratio if high is None else high,
        "clip_ratio_c": traits.clip_ratio_c if c is None else c,
        "tau_pos": config.tau_pos,
        "tau_neg": config.tau_neg,
        "ppo_kl_coef": config.policy_loss.ppo_kl_coef,
        "dro_beta": config.policy_loss.dro_beta,
    }


def kept_mask(micro_batch: TensorDict) -> Tensor:
    """1 on the response tokens that train; rows of padding have a copy of another row's `loss_mask`."""
    mask, kept = micro_batch["response_mask"], micro_batch.get("loss_mask", None)
    return mask if kept is None else mask * kept


def weighted(agg: Aggregate, weights: Tensor, kept: Tensor, traits: LossEntry) -> Aggregate:
    """`agg` of token losses times their importance weights."""
    of_tokens = response_weights(weights, kept) if traits.weighs_responses else weights
    return lambda matrix: agg(of_tokens * matrix)


def correct_in_update(
    log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, correction: RolloutCorrection, mini_batch: MiniBatch
) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """The kept tokens, their weights if the loss takes any, and metrics, by the policy as it is now.

    The clipped surrogate takes none: its ratio to the rollout is the weight already. Metrics are those of
    `correction_metrics` that are means over tokens or responses, so that micro-batches add up.
    """
    log_ratio = log_ratio_of(log_probs.detach(), rollout_log_probs, mask)
    kept = kept_tokens(log_ratio, mask, correction.rejections)
    limited = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    token_sums = {
        "kl": masked_sum(-log_ratio, mask),
        "k3_kl": masked_sum(limited.expm1() - limited, mask),
        "chi2_token": masked_sum((2 * limited).expm1(), mask),
    }
    weights = None
    if correction.weighs_in_update:
        weights = importance_weights(log_ratio, mask, correction)
        token_sums["rollout_is_mean"] = masked_sum(weights, mask)
        weights = weights / mini_batch.mean_weight
    metrics = {PREFIX + name: mini_batch.per_token(total) for name, total in token_sums.items()}
    if correction.rejections:
        num_lost = (mask.bool().any(dim=-1) & ~kept.bool().any(dim=-1)).sum()
        metrics |= {
            f"{PREFIX}rollout_rs_masked_fraction": mini_batch.per_token((mask.bool() & ~kept.bool()).sum()),
            f"{PREFIX}rollout_rs_seq_masked_fraction": num_lost / max(mini_batch.num_sequences, 1),
        }
    return kept, weights, metrics


def with_mean_weight(
    mini_batch: MiniBatch, engine: Engine, shard: DataProto, log_probs: Tensor, correction: RolloutCorrection
) -> MiniBatch:
    """The mini-batch with the mean weight of its tokens or responses, over all ranks.

    `log_probs` are those of this rank's rows under the policy as it is now, from a pass of their own: a mean over a
    micro-batch would depend on its size.
    """
    assert correction.level is not None
    mask = shard.batch["response_mask"]
    log_ratio = log_ratio_of(log_probs, shard.batch["old_log_probs"], mask)
    weights = importance_weights(log_ratio, mask, correction)
    by_token = correction.level == "token"
    total = masked_sum(weights, mask) if by_token else masked_mean(weights, mask, dim=-1).sum()
    count = mini_batch.num_tokens if by_token else mini_batch.num_sequences
    mean = engine.sum_over_ranks(float(total)) / max(count, 1)
    return replace(mini_batch, mean_weight=mean if mean > SMALLEST_MEAN else 1.0)


def critic_loss(config: CriticConfig, mini_batch: MiniBatch) -> LossFn:
    """Clipped value loss."""

    def loss_fn(output: dict[str, Tensor], micro_batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        values, mask, kept = output["values"], micro_batch["response_mask"], kept_mask(micro_batch)
        vf_loss, token_sums = clipped_value_loss(
            values,
            micro_batch["values"],
            micro_batch["returns"],
            kept,
            agg=mini_batch.aggregate(mask, kept, config.loss_agg_mode),
            cliprange_value=config.cliprange_value,
        )
        metrics = {name: mini_batch.per_token(total) for name, total in token_sums.items()}
        metrics["vf_loss"] = vf_loss.detach()
        metrics["vpred_mean"] = mini_batch.per_token(masked_sum(values.detach(), mask))
        return vf_loss, metrics

    return loss_fn


def mean_metrics(steps: list[dict[str, float]], prefix: str) -> dict[str, float]:
    """Metrics of several optimizer steps as one: means, and the last learning rate; of none, nothing.

    A name with an area of its own keeps it.

    >>> mean_metrics([{"pg_loss": 1.0, "lr": 0.1}, {"pg_loss": 3.0, "lr": 0.2}], "actor")
    {'actor/pg_loss': 2.0, 'actor/lr': 0.2}
    """
    return {
        name if "/" in name else f"{prefix}/{name}": steps[-1][name]
        if name == "lr"
        else sum(step[name] for step in steps) / len(steps)
        for name in (steps[0] if steps else ())
    }
