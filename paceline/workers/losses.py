"""From config to loss functions: what the engine calls on each micro-batch.

Losses are shares of the aggregate over the *global* mini-batch, so that their sum over micro-batches and ranks is that
aggregate, however the mini-batch was cut. Metrics come as sums, and `MiniBatch` knows what to divide them by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tensordict import TensorDict
from torch import Tensor

from paceline.algorithms.aggregation import LossNormaliser, agg_loss
from paceline.algorithms.kl import kl_penalty
from paceline.algorithms.masking import masked_sum
from paceline.algorithms.policy_loss import get_policy_loss, truncated_importance_weights, usual_loss_agg_mode
from paceline.algorithms.value_loss import clipped_value_loss
from paceline.config import ActorConfig, CriticConfig
from paceline.engine import LossFn


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step's worth of responses, as dealt by the driver.

    `rows_per_shard` counts a rank's rows, padding and empty responses included; the other two count the whole
    mini-batch without either.
    """

    rows_per_shard: int
    num_tokens: int
    num_sequences: int

    def per_token(self, total: Tensor) -> Tensor:
        """A sum over tokens as this micro-batch's share in the mean over the mini-batch's; 0 if it has no token."""
        return total / max(self.num_tokens, 1)

    def aggregate(self, mask: Tensor, mode: str) -> Callable[[Tensor], Tensor]:
        """The share of a micro-batch with this mask in the mini-batch's aggregate."""
        normaliser = LossNormaliser(self.num_tokens, self.num_sequences, mask.shape[-1])
        return lambda matrix: agg_loss(matrix, mask, mode, normaliser)


def actor_loss(config: ActorConfig, mini_batch: MiniBatch) -> LossFn:
    """Policy loss, less the entropy bonus, plus the KL loss."""
    policy_loss = get_policy_loss(config.policy_loss.loss_mode)
    agg_mode = config.loss_agg_mode or usual_loss_agg_mode(config.policy_loss.loss_mode)
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high

    def loss_fn(output: dict[str, Tensor], micro_batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        log_probs, entropy, mask = output["log_probs"], output["entropy"], micro_batch["response_mask"]
        agg = mini_batch.aggregate(mask, agg_mode)
        policy_agg = agg
        # Without an old-log-prob pass this is the only optimizer step on the batch: the old policy is this one.
        old_log_probs = micro_batch.get("old_log_probs", None)
        old_log_probs = log_probs.detach() if old_log_probs is None else old_log_probs
        if config.tis_imp_ratio_cap > 0:
            weights = truncated_importance_weights(
                old_log_probs, micro_batch["rollout_log_probs"], config.tis_imp_ratio_cap
            )
            policy_agg = lambda matrix: agg(weights * matrix)  # noqa: E731
        pg_loss, token_sums = policy_loss(
            old_log_probs,
            log_probs,
            micro_batch["advantages"],
            mask,
            agg=policy_agg,
            clip_ratio_low=low,
            clip_ratio_high=high,
            clip_ratio_c=config.clip_ratio_c,
        )
        metrics = {name: mini_batch.per_token(total) for name, total in token_sums.items()}
        metrics["pg_loss"] = pg_loss.detach()
        metrics["entropy"] = mini_batch.per_token(masked_sum(entropy.detach(), mask))
        loss = pg_loss
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * agg(entropy)
        if config.use_kl_loss:
            kl_loss = agg(kl_penalty(log_probs, micro_batch["ref_log_prob"], config.kl_loss_type))
            metrics["kl_loss"] = kl_loss.detach()
            loss = loss + config.kl_loss_coef * kl_loss
        return loss, metrics

    return loss_fn


def critic_loss(config: CriticConfig, mini_batch: MiniBatch) -> LossFn:
    """Clipped value loss."""

    def loss_fn(output: dict[str, Tensor], micro_batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        values, mask = output["values"], micro_batch["response_mask"]
        vf_loss, token_sums = clipped_value_loss(
            values,
            micro_batch["values"],
            micro_batch["returns"],
            mask,
            agg=mini_batch.aggregate(mask, config.loss_agg_mode),
            cliprange_value=config.cliprange_value,
        )
        metrics = {name: mini_batch.per_token(total) for name, total in token_sums.items()}
        metrics["vf_loss"] = vf_loss.detach()
        metrics["vpred_mean"] = mini_batch.per_token(masked_sum(values.detach(), mask))
        return vf_loss, metrics

    return loss_fn


def mean_metrics(steps: list[dict[str, float]], prefix: str) -> dict[str, float]:
    """Metrics of several optimizer steps as one: means, and the last learning rate; of none, nothing.

    >>> mean_metrics([{"pg_loss": 1.0, "lr": 0.1}, {"pg_loss": 3.0, "lr": 0.2}], "actor")
    {'actor/pg_loss': 2.0, 'actor/lr': 0.2}
    """
    return {
        f"{prefix}/{name}": steps[-1][name] if name == "lr" else sum(step[name] for step in steps) / len(steps)
        for name in (steps[0] if steps else ())
    }
