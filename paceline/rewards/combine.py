"""The score of a row, put together: the rule's and the reward model's, by the weights of its source, and the penalty of
a long response. Nothing else adds up scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.config.reward import DEFAULT_SOURCE, SourceWeights
from paceline.errors import RewardError

__all__ = [
    "UNSHAPED_SCORE",
    "Overlong",
    "Weights",
    "add_model_scores",
    "at_last_token",
    "combine_scores",
    "overlong_penalty",
    "rows_of_model",
    "source_weights",
    "uses_model",
]

Weights = Mapping[str, SourceWeights | Mapping[str, float]]
"""As `reward_model.weights`: by data_source, `{"rule": 1.0, "model": 0.2}`."""

MODEL_ALONE = SourceWeights(rule=0.0, model=1.0)

UNSHAPED_SCORE = "unshaped_score"
"""The column of what the rule gave, before the penalty of a long response."""


def source_weights(source: object, has_rule: bool, weights: Weights) -> SourceWeights:
    """The weights of a row: those of its source; else the model alone if it has no rule, `default` if it has.

    >>> source_weights("gsm8k", True, {"default": {"model": 0.2}})
    SourceWeights(rule=1.0, model=0.2)
    """
    named = weights.get(source) if isinstance(source, str) else None
    if named is None:
        named = weights.get(DEFAULT_SOURCE, SourceWeights()) if has_rule else MODEL_ALONE
    return named if isinstance(named, SourceWeights) else SourceWeights(**named)


def uses_model(source: object, has_rule: bool, weights: Weights) -> bool:
    """Whether the model's score matters for a row."""
    return source_weights(source, has_rule, weights).model > 0


def rows_of_model(sources: Sequence[object], has_rule: Sequence[bool] | np.ndarray, weights: Weights) -> np.ndarray:
    """`uses_model` of each row, bool (batch,)."""
    rows = zip(sources, has_rule, strict=True)
    return np.array([uses_model(source, bool(rule), weights) for source, rule in rows], dtype=bool)


def combine_scores(
    rule_scores: torch.Tensor,
    has_rule: Sequence[bool] | np.ndarray | torch.Tensor,
    rm_scores: torch.Tensor,
    sources: Sequence[object],
    weights: Weights,
    *,
    penalty: torch.Tensor | None = None,
    require_finite: bool = True,
) -> torch.Tensor:
    """Scores (batch, response): weight * rule score + weight * model score, row by row.

    Args:
        rule_scores: (batch, response) from the RewardManager. What it gave a row without a rule (nothing, or the
            overlong penalty) stays as it is.
        has_rule: (batch,), the manager's column of that name.
        rm_scores: (batch, response) from the reward model. Not looked at where the model has no weight.
        sources: the data_source of each row; None where it has none.
        penalty: (batch, response), the part of rule_scores that no weight changes: the overlong penalty.
        require_finite: a model's score that counts and is not finite is an error; else it goes into the row's.
    """
    rows = [source_weights(source, bool(rule), weights) for source, rule in zip(sources, has_rule, strict=True)]
    rule = torch.tensor([row.rule if has else 1.0 for row, has in zip(rows, has_rule, strict=True)]).unsqueeze(-1)
    model = torch.tensor([row.model for row in rows]).unsqueeze(-1)
    bad = ~torch.isfinite(rm_scores).all(dim=-1) & (model.squeeze(-1) > 0)
    if require_finite and bad.any():
        first = int(bad.nonzero()[0])
        raise RewardError(
            f"the reward model gave {int(bad.sum())} of {len(rows)} responses a score that is not finite; the first is "
            f"row {first}, of source {sources[first]!r}. Check the model at reward_model.model.path."
        )
    combined = rule * rule_scores + torch.where(model > 0, model * rm_scores, 0.0)
    return combined if penalty is None else combined + (1 - rule) * penalty


def add_model_scores(
    scores: torch.Tensor,
    info: Mapping[str, np.ndarray],
    rm_scores: torch.Tensor,
    *,
    mask: torch.Tensor,
    sources: Sequence[object],
    weights: Weights,
    require_finite: bool = True,
) -> tuple[torch.Tensor, dict[str, np.ndarray]]:
    """A RewardManager's `reward_tensor` and `reward_extra_info` with the model's scores in.

    The new info has the whole `score`, and `model_score`, NaN where the model has no weight or the response no token.
    `mask` (batch, response) is true on the tokens of responses.
    """
    penalty = None
    if "overlong_penalty" in info:
        penalty = at_last_token(torch.from_numpy(info["overlong_penalty"]), mask)
    combined = combine_scores(
        scores, info["has_rule"], rm_scores, sources, weights, penalty=penalty, require_finite=require_finite
    )
    has_score = rows_of_model(sources, info["has_rule"], weights) & mask.bool().any(dim=-1).cpu().numpy()
    model_score = np.where(has_score, rm_scores.sum(dim=-1).float().cpu().numpy(), np.nan).astype(np.float32)
    return combined, {**info, "score": combined.sum(dim=-1).cpu().numpy(), "model_score": model_score}


def at_last_token(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(batch, response): each of the values (batch,) at the last true place of its row of the mask, 0 elsewhere.

    >>> at_last_token(torch.tensor([5.0, 7.0]), torch.tensor([[True, True, False], [False, False, False]]))
    tensor([[0., 5., 0.],
            [0., 0., 0.]])
    """
    mask = mask.bool()
    positions = torch.arange(mask.shape[-1], device=mask.device)
    is_last = mask & (positions == (mask * positions).argmax(dim=-1, keepdim=True))
    return torch.where(is_last, values.to(mask.device, torch.float32).unsqueeze(-1), 0.0)


@dataclass(frozen=True)
class Overlong:
    """DAPO's soft overlong punishment: a response loses the more, the nearer it comes to the length limit."""

    max_len: int
    buffer_len: int
    penalty_factor: float = 1.0
    log: bool = False
    """Whether it is reported in the metrics."""

    def add_to(self, info: dict[str, np.ndarray], lengths: torch.Tensor) -> dict[str, np.ndarray]:
        """A RewardManager's `reward_extra_info` with the penalty of responses of these lengths (batch,) in `score`."""
        penalty = overlong_penalty(lengths, self.max_len, self.buffer_len, self.penalty_factor).numpy()
        shaped = {"score": info["score"] + penalty, UNSHAPED_SCORE: info["score"], "overlong_penalty": penalty}
        info = {**info, **shaped}
        return {**info, "overlong": (lengths > self.max_len - self.buffer_len).numpy()} if self.log else info


def overlong_penalty(lengths: torch.Tensor, max_len: int, buffer_len: int, penalty_factor: float) -> torch.Tensor:
    """What is added to the scores of responses of these lengths (batch,), in tokens: 0 or less.

    0 up to max_len - buffer_len tokens, then linearly down to -penalty_factor at max_len and beyond (Yu et al. 2025,
    arXiv:2503.14476, equation 13).

    >>> overlong_penalty(torch.tensor([80, 90, 100, 120]), max_len=100, buffer_len=20, penalty_factor=1.0)
    tensor([ 0.0000, -0.5000, -1.0000, -1.0000])
    """
    left = (max_len - buffer_len - lengths).clamp(-buffer_len, 0)
    return left.float() / buffer_len * penalty_factor
