"""An estimator, a policy loss and a reward model of one's own.

They are in a module of their own, beside the script, because worker processes import it: the loss is used there.
"""

import torch

from paceline.algorithms.advantages import register_adv_estimator
from paceline.algorithms.policy_loss import register_policy_loss
from paceline.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker


@register_adv_estimator("median", needs_critic=False, needs_groups=True)
def median_advantage(*, token_level_rewards, response_mask, index, **_):
    """Score minus the median of the group: one lucky response does not make the others look bad."""
    scores = (token_level_rewards * response_mask).sum(dim=-1)
    advantages = torch.zeros_like(scores)
    for group in set(index):
        rows = torch.tensor([name == group for name in index])
        advantages[rows] = scores[rows] - scores[rows].median()
    advantages = advantages[:, None] * response_mask
    return advantages, advantages


@register_policy_loss("unclipped")
def unclipped_loss(old_log_prob, log_prob, advantages, response_mask, *, agg, **_):
    """The plain policy gradient with importance weights. `agg` makes one number of a matrix of token losses."""
    ratio = (log_prob - old_log_prob).exp()
    weights = (ratio.detach() * response_mask).sum()
    return agg(-advantages * ratio), {"importance_weight": weights}


class Actor(ActorRolloutRefWorker):
    """Nothing new but its module, which registers the loss in the worker's process."""


class DigitJudge(TrainingWorker):
    """A reward model of three lines: the share of digits in a response, by token ids."""

    def init_reward_model(self, config):
        from paceline.data.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(config.model.input_tokenizer)
        self.digits = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")))

    def score(self, data):
        is_digit = torch.isin(data.batch["responses"], self.digits) & data.batch["response_mask"].bool()
        return is_digit.sum(dim=-1) / data.batch["response_mask"].sum(dim=-1).clamp(min=1)
