"""Which scorer grades which `data_source`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from paceline.errors import ConfigError, UnknownDataSourceError
from paceline.rewards.score import code, gsm8k, hellaswag, math
from paceline.text import did_you_mean

__all__ = [
    "CODE_SOURCES",
    "MODEL_SOURCES",
    "Scorer",
    "_select_rm_score_fn",
    "get_scorer",
    "known_sources",
    "register_scorer",
    "registered_scorers",
]

ScoreFn = Callable[..., float | dict[str, Any]]
"""`fn(solution_str, ground_truth, extra_info=None)`: a score, or a dict with `score` and whatever else to keep."""
BatchScoreFn = Callable[[Sequence[str], Sequence[Any], Sequence[Any]], Sequence[float | dict[str, Any] | Exception]]
"""The same for many rows: solutions, ground truths and extra infos in; for each a result, or what went wrong."""


@dataclass(frozen=True)
class Scorer:
    """A scorer of one response, and of many at once if it has a faster way."""

    one: ScoreFn
    many: BatchScoreFn | None = None
    check: Callable[[], None] | None = None
    """Called once before a run whose data has the source: raises if the scorer can't work."""
    check_truth: Callable[[Any], None] | None = None
    """Called before a run for every ground truth of the source: raises a `DataError` if it is of no use."""


_SCORERS: dict[str, Scorer] = {}
MODEL_SOURCES = ("Dahoas/full-hh-rlhf",)
"""Sources that no rule can score: a reward model does."""
CODE_SOURCES = ("codecontests", "apps", "codeforces", "taco", "paceline/code")
"""Sources of programs, which run in a sandbox."""


def register_scorer(name: str, fn: ScoreFn, batch: BatchScoreFn | None = None) -> None:
    """Grade rows of `data_source=name` with `fn`, or with `batch` where many come at once. Replaces an earlier one."""
    _check_keywords(fn, ("solution_str", "ground_truth", "extra_info"), f"The scorer of {name!r}")
    _SCORERS[name] = Scorer(fn, batch)


def get_scorer(data_source: str) -> Scorer:
    """The scorer of a source; an `UnknownDataSourceError` lists the known ones."""
    scorer = _SCORERS.get(data_source)
    if scorer is None and data_source in MODEL_SOURCES:
        raise UnknownDataSourceError(
            f"data_source={data_source!r} has no rule: a reward model scores it. Set reward_model.enable=True, or "
            f"custom_reward_function.path. Sources with a rule: {', '.join(known_sources())}."
        )
    if scorer is None:
        hint = did_you_mean(str(data_source), _SCORERS)
        raise UnknownDataSourceError(
            f"No scorer for data_source={data_source!r}.{hint} Known: {', '.join(known_sources())}. "
            "Set custom_reward_function.path, or add one with paceline.rewards.register_scorer."
        )
    return scorer


def _select_rm_score_fn(data_source: str) -> ScoreFn:
    """The function that scores one response of a source."""
    return get_scorer(data_source).one


def registered_scorers() -> Mapping[str, Scorer]:
    """All scorers of this process, by source."""
    return MappingProxyType(_SCORERS)


def known_sources() -> list[str]:
    """Sources that have a scorer."""
    return sorted(_SCORERS)


def _check_keywords(fn: Callable[..., Any], wanted: Sequence[str], what: str) -> None:
    """Raise a `ConfigError` unless `fn` can be called with exactly these keyword arguments."""
    if not callable(fn):
        raise ConfigError(f"{what} must be a function, not {type(fn).__name__}.")
    signature = inspect.signature(fn)
    try:
        signature.bind(**dict.fromkeys(wanted))
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise ConfigError(
            f"{what} is called with the keywords {', '.join(wanted)}, but is {name}{signature}: {error}. "
            f"Write it as {name}({', '.join(wanted)})."
        ) from None


for _name in ("openai/gsm8k", "gsm8k", "paceline/sums"):
    register_scorer(_name, gsm8k.compute_score, gsm8k.compute_scores)
for _name in (
    "lighteval/MATH",
    "DigitalLearningGmbH/MATH-lighteval",
    "hendrycks/competition_math",
    "EleutherAI/hendrycks_math",
    "HuggingFaceH4/MATH-500",
    "MATH",
    "numina_amc_aime",
    "numina_aops_forum",
    "numina_cn_k12",
    "numina_olympiads",
    "numina_synthetic_amc",
    "numina_synthetic_math",
):
    register_scorer(_name, math.compute_score, math.compute_scores)
# The prompts of these ask for a last line `Answer: 42`.
_AIME = [f"aime{gap}{year}" for gap in ("", "_") for year in (24, 25, 26, 2024, 2025, 2026)]
for _name in ("math_dapo", "aime", *_AIME):
    register_scorer(_name, *(partial(fn, method="answer_line") for fn in (math.compute_score, math.compute_scores)))
for _name in ("Rowan/hellaswag", "hellaswag"):
    register_scorer(_name, hellaswag.compute_score, hellaswag.compute_scores)
for _name in CODE_SOURCES:
    _SCORERS[_name] = Scorer(code.compute_score, code.compute_scores, check_truth=code.check_ground_truth)
