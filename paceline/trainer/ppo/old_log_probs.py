"""Log-probs of the policy before its update: whose they are, and how the rollout's are verified.

A rollout that computes as the actor does gives the actor's log-probs with its responses. They are used then, and not
believed: at every step a share of the rows is computed again and compared. Beyond a bound the step computes all rows.
Pure functions; `Phases.compute_old_log_probs` calls the actor.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch

from paceline.algorithms.policy_loss import loss_traits
from paceline.config import PPOConfig
from paceline.config.derived import learns_from_rewards, uses_sum_pi_squared
from paceline.protocol import DataProto
from paceline.trainer.ppo.corrected_columns import correction_of
from paceline.trainer.ppo.dealing import num_mini_batches

CHECKED_SHARE = 1 / 32
"""Of a batch's rows, computed again at every step."""
BOUNDS = {"float32": 1e-3, "bfloat16": 0.1}
"""By the numbers that both compute in: the largest difference between two probabilities of a sampled token that can be
rounding. Other weights, another temperature or another mask give more on the first rows."""
LARGEST_DIFFERENCE = "training/rollout_probs_diff_max"


def sampled_by_current_weights(config: PPOConfig) -> bool:
    """Whether every token of a step was sampled by the weights that its update starts from.

    With no staleness it was: a step generates when the actor's update before it was issued, and calls on the actor keep
    their order.
    """
    return config.trainer.schedule.max_staleness == 0


def rollout_has_log_probs(config: PPOConfig) -> bool:
    """Whether the rollout's log-probs are taken for those of the policy before its update."""
    policy = config.actor_rollout_ref
    if not sampled_by_current_weights(config) or correction_of(config).is_on or uses_sum_pi_squared(config):
        return False  # what corrects for a difference compares the two, and the squares come from the same pass
    if policy.rollout.trust_log_probs is not None:
        return policy.rollout.trust_log_probs
    return computes_as_the_actor(config)


def computes_as_the_actor(config: PPOConfig) -> bool:
    """Whether rollout and actor make the same numbers of the same weights, but for rounding.

    With LoRA they may not have the same weights: those of a copy have the adapters merged into them.
    """
    policy = config.actor_rollout_ref
    rollout, dtype = policy.rollout, policy.model.compute_dtype
    at_one_temperature = rollout.do_sample or rollout.temperature == 1.0  # greedy log-probs are those at 1
    return (
        rollout.name == "native"
        and (rollout.dtype or dtype) == dtype
        and policy.model.lora_rank == 0
        and at_one_temperature
    )


def update_has_log_probs(config: PPOConfig, num_rows: int) -> bool:
    """Whether the update's own forward pass gives the old log-probs: it is the only one on these rows, and nothing
    before it asks for them."""
    policy = config.actor_rollout_ref
    rows_per_update = policy.actor.ppo_mini_batch_size * policy.rollout.n
    one_update = policy.actor.ppo_epochs == 1 and num_mini_batches(num_rows, rows_per_update) == 1
    return one_update and not (config.algorithm.use_kl_in_reward or chooses_tokens(config))


def chooses_tokens(config: PPOConfig) -> bool:
    """Whether the policy loss wants tokens of high covariance."""
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    return learns_from_rewards(config) and loss_traits(loss_mode).chooses_tokens


def rows_to_check(response_mask: torch.Tensor, seed: int, step: int) -> np.ndarray:
    """The rows of a step that are computed again, in order, of those that have a token: the same for the same seed and
    step.

    >>> rows_to_check(torch.ones(64, 8), seed=1, step=1)
    array([15, 17])
    """
    rows = np.flatnonzero(response_mask.bool().any(dim=-1).numpy())
    rows = rows if len(rows) else np.arange(len(response_mask))
    generator = np.random.default_rng([seed, zlib.crc32(b"rows to check"), step])
    return np.sort(rows[generator.permutation(len(rows))[: max(1, round(len(rows) * CHECKED_SHARE))]])


def probs_difference(batch: DataProto, computed: torch.Tensor) -> dict[str, float]:
    """How far the probabilities of the sampled tokens differ between rollout and actor, as metrics.

    `computed` are the actor's log-probs (rows, response) of the batch's rows. Nothing where there is no token, or where
    an engine gives no log-probs.
    """
    mask = batch.batch["response_mask"].bool()
    if "rollout_log_probs" not in batch.batch or not mask.any():
        return {}
    trainer, rollout = computed[mask].exp(), batch.batch["rollout_log_probs"][mask].exp()
    difference = (trainer - rollout).abs()
    metrics = {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_mean": difference.mean().item(),
        LARGEST_DIFFERENCE: difference.max().item(),
        "training/rollout_probs_diff_std": difference.std(correction=0).item(),
    }
    of_trainer, of_rollout = trainer - trainer.mean(), rollout - rollout.mean()
    scale = (of_trainer.square().sum() * of_rollout.square().sum()).sqrt()
    if scale > 0:  # probabilities that are all the same correlate with nothing
        metrics["training/rollout_actor_probs_pearson_corr"] = ((of_trainer * of_rollout).sum() / scale).item()
    return metrics


def bound_of(config: PPOConfig) -> float | None:
    """The largest difference that is taken for rounding; None where a run takes the rollout's log-probs anyway."""
    policy = config.actor_rollout_ref
    return None if policy.rollout.trust_log_probs else BOUNDS[policy.model.compute_dtype]


def rollouts_own(batch: DataProto) -> DataProto:
    """The rollout's log-probs as those of the policy before its update."""
    return batch.select(["rollout_log_probs"], [], []).rename("rollout_log_probs", "old_log_probs")
