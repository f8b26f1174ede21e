"""Who scores which row: a rule, the reward model, both; and rows that nobody scores, which are an error."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.config.reward import DEFAULT_SOURCE
from paceline.errors import ConfigError, DataError, UnknownDataSourceError
from paceline.rewards.by_source import MODEL_SOURCES
from paceline.rewards.combine import Weights, rows_of_model, uses_model
from paceline.text import did_you_mean

__all__ = ["Coverage", "ground_truth", "wants_model"]

logger = logging.getLogger(__name__)


def ground_truth(reward_model: object) -> object:
    """The ground truth in a row's `reward_model`, or None."""
    return reward_model.get("ground_truth") if isinstance(reward_model, dict) else None


def wants_model(reward_model: object) -> bool:
    """Whether a row says itself that a reward model scores it."""
    return isinstance(reward_model, dict) and reward_model.get("style") == "model"


@dataclass(frozen=True)
class Coverage:
    """Rows of a batch or a dataset, and what there is to score them."""

    sources: Sequence[object]
    reward_models: Sequence[object]
    has_rule: Sequence[bool]
    known: Collection[str]
    """Sources that have a scorer."""
    weights: Weights
    has_model: bool
    key: str = "data_source"
    """The column that names sources."""

    def refuse_unscored(self) -> None:
        """Raise if there are rows that neither a rule nor the model scores."""
        unscored = [row for row, has_rule in enumerate(self.has_rule) if not has_rule and not self._model_scores(row)]
        if not unscored:
            return
        names = Counter(self.sources[row] for row in unscored)
        unknown = {name: count for name, count in names.items() if name not in self.known and name is not None}
        muted = {name: count for name, count in unknown.items() if self.has_model and name in self.weights}
        if muted:
            raise ConfigError(
                f"reward_model.weights gives the model no part in {self._counts(muted)}, and no rule scores them. Give "
                "them a weight `model` above 0."
            )
        for_models = {name: count for name, count in unknown.items() if name in MODEL_SOURCES}
        if for_models and len(for_models) == len(unknown):
            raise UnknownDataSourceError(
                f"{self.key} {self._counts(for_models)} has no rule: a reward model scores it. Set "
                f"reward_model.enable=True and reward_model.model.path, or custom_reward_function.path. {self._known()}"
            )
        if unknown:
            hint = did_you_mean(str(next(iter(unknown))), self.known)
            by_model = ", or name it in reward_model.weights for the model to score it" if self.has_model else ""
            raise UnknownDataSourceError(
                f"No scorer for {self.key} {self._counts(unknown)}.{hint} {self._known()} Set "
                f"custom_reward_function.path, add one with paceline.rewards.register_scorer{by_model}."
            )
        if None in names:
            raise DataError(
                f"{names[None]} of {len(self.sources)} rows have no {self.key!r}, which names the scorer. Add "
                "the column to the data files, set data.reward_fn_key, or set custom_reward_function.path."
            )
        first = unscored[0]
        by_model = ", or give the source a weight `model` in reward_model.weights" if self.has_model else ""
        raise DataError(
            f"{len(unscored)} of {len(self.sources)} rows have no reward_model.ground_truth, the first is row {first} "
            f"({self.key}={self.sources[first]!r}). Add it, or set custom_reward_function.path{by_model}."
        )

    def refuse_idle_model(self) -> None:
        """Raise if there is a model that no row uses; warn of weights for sources that no row has."""
        if not rows_of_model(self.sources, self.has_rule, self.weights).any():
            name = next((source for source in self.sources if source is not None), DEFAULT_SOURCE)
            raise ConfigError(
                f"reward_model.enable=True, but the model scores none of the {len(self.sources)} rows: all have a "
                "rule, and reward_model.weights gives the model no weight. Set "
                f"'reward_model.weights={{{name}: {{rule: 1.0, model: 0.2}}}}', or reward_model.enable=False."
            )
        idle = sorted(set(self.weights) - {DEFAULT_SOURCE} - set(self.sources))
        if idle:
            found = sorted({str(source) for source in self.sources})
            logger.warning(
                "reward_model.weights names %s, but no row has this %s; the data has %s",
                ", ".join(idle), self.key, ", ".join(found),
            )  # fmt: skip

    def _model_scores(self, row: int) -> bool:
        """Whether a row without a rule goes to the model. A source that nobody knows does not: it may be a typo."""
        source, reward_model = self.sources[row], self.reward_models[row]
        if not self.has_model:
            return False
        if source in self.weights:
            return uses_model(source, False, self.weights)
        return source is None or source in MODEL_SOURCES or source in self.known or wants_model(reward_model)

    def _counts(self, names: Mapping[Any, int]) -> str:
        return ", ".join(f"{name!r} ({count} of {len(self.sources)} rows)" for name, count in names.items())

    def _known(self) -> str:
        return f"Sources with a rule: {', '.join(sorted(self.known))}."
