"""Which scorer grades which `data_source`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from paceline.catalog import Catalog, NameEntry, Registry
from paceline.config.reward import SandboxConfig
from paceline.errors import UnknownDataSourceError
from paceline.rewards.score import code, gsm8k, hellaswag, math
from paceline.rewards.scorer import RULE_KEYWORDS, BatchScoreFn, ScoreFn, Scorer, check_keywords
from paceline.text import did_you_mean

__all__ = [
    "CODE_SOURCES",
    "MODEL_SOURCES",
    "_select_rm_score_fn",
    "code_scorer",
    "code_scorers",
    "get_scorer",
    "known_sources",
    "register_scorer",
    "registered_scorers",
]

_SCORERS: Registry[Scorer, NameEntry] = Registry(Catalog("data_source", {}))
_SHIPPED: dict[str, Scorer] = {}
MODEL_SOURCES = ("Dahoas/full-hh-rlhf",)
"""Sources that no rule can score: a reward model does."""
CODE_SOURCES = ("codecontests", "apps", "codeforces", "taco", "paceline/code")
"""Sources of programs, which run in a sandbox."""


def register_scorer(name: str, fn: ScoreFn, batch: BatchScoreFn | None = None, *, override: bool = False) -> None:
    """Grade rows of `data_source=name` with `fn`, or with `batch` where many come at once.

    One of ours may be replaced. Another scorer for a source that has one of the user's is a ConfigError, unless
    `override` says that it is to be replaced.
    """
    check_keywords(fn, RULE_KEYWORDS, f"The scorer of {name!r}")
    is_shipped = name in _SHIPPED and registered_scorers().get(name) is _SHIPPED[name]
    _SCORERS.register(name, override=override or is_shipped)(Scorer(fn, batch))


def code_scorer(sandbox: SandboxConfig) -> Scorer:
    """The scorer of programs, with the sandbox that a configuration asks for."""
    grader = code.CodeGrader(sandbox)
    return Scorer(grader, grader.many, grader.check, code.check_ground_truth)


def code_scorers(sandbox: SandboxConfig) -> dict[str, Scorer]:
    """The same by source; what the user registered for a source stays."""
    shipped = [source for source in CODE_SOURCES if get_scorer(source).one is code.compute_score]
    return dict.fromkeys(shipped, code_scorer(sandbox))


def get_scorer(data_source: str) -> Scorer:
    """The scorer of a source; an `UnknownDataSourceError` lists the known ones."""
    scorer = registered_scorers().get(data_source)
    if scorer is None and data_source in MODEL_SOURCES:
        raise UnknownDataSourceError(
            f"data_source={data_source!r} has no rule: a reward model scores it. Set reward_model.enable=True, or "
            f"custom_reward_function.path. Sources with a rule: {', '.join(known_sources())}."
        )
    if scorer is None:
        hint = did_you_mean(str(data_source), known_sources())
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
    return _SCORERS.entries


def known_sources() -> list[str]:
    """Sources that have a scorer."""
    return sorted(registered_scorers())


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
    _one, _many = partial(math.compute_score, method="answer_line"), partial(math.compute_scores, method="answer_line")
    register_scorer(_name, _one, _many)
for _name in ("Rowan/hellaswag", "hellaswag"):
    register_scorer(_name, hellaswag.compute_score, hellaswag.compute_scores)
for _name in CODE_SOURCES:
    _SCORERS.register(_name)(Scorer(code.compute_score, code.compute_scores, check_truth=code.check_ground_truth))
_SHIPPED |= _SCORERS.entries
