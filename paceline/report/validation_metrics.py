"""The numbers of a validation, by data source, from the scores of all responses to all prompts.

With n responses to a prompt:

    mean@n    the mean score
    best@n    the highest score: what one could have with a perfect choice
    maj@n     the score of the answer that most responses give

each averaged over the prompts of a source. For n=1 they are the same, and only mean@1 is given.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

CORE = ("reward", "acc")
"""Scores whose mean is a headline, `val-core/...`; everything else is `val-aux/...`."""
HEADLINE = "val-core/"


def validation_metrics(
    sources: Sequence[str],
    uids: Sequence[Hashable],
    scores: Mapping[str, np.ndarray],
    *,
    n: int,
    answers: Sequence[object] | None = None,
) -> dict[str, float]:
    """`val-core/<source>/<name>/mean@n`, `val-aux/<source>/<name>/{best,maj}@n` for each of `scores`.

    Args:
        sources, uids: of each response: its data source, and which prompt it answers.
        scores: arrays (responses,) by name. NaN is no score: the response does not count, and a source without any
            score of a name has no metric of it.
        answers: the answer that was read from each response, "" if there was none to read; None where the scorer
            reads none. Sources in which all are None have no maj@n.

    >>> validation_metrics(["s", "s"], ["0", "0"], {"acc": np.array([1.0, 0.0])}, n=2, answers=["4", "5"])
    {'val-core/s/acc/mean@2': 0.5, 'val-aux/s/acc/best@2': 1.0, 'val-aux/s/acc/maj@2': 1.0}
    """
    given = [None] * len(sources) if answers is None else [_answer(answer) for answer in answers]
    metrics: dict[str, float] = {}
    for source in dict.fromkeys(sources):
        in_source = [row for row, other in enumerate(sources) if other == source]
        has_answers = any(given[row] is not None for row in in_source)
        for name, values in scores.items():
            prompts: dict[Hashable, list[int]] = {}
            for row in in_source:
                if not np.isnan(values[row]):
                    prompts.setdefault(uids[row], []).append(row)
            if not prompts:
                continue
            groups = [values[rows] for rows in prompts.values()]
            area = HEADLINE if name in CORE else "val-aux/"
            metrics[f"{area}{source}/{name}/mean@{n}"] = _mean([group.mean() for group in groups])
            if n > 1:
                metrics[f"val-aux/{source}/{name}/best@{n}"] = _mean([group.max() for group in groups])
            if n > 1 and has_answers:
                elected = [rows[_majority([given[row] for row in rows])] for rows in prompts.values()]
                metrics[f"val-aux/{source}/{name}/maj@{n}"] = _mean(values[elected])
    return metrics


def pass_at(k: int, groups: Sequence[np.ndarray]) -> float:
    """The chance that at least one of k responses is right, averaged over prompts.

    Each group has a 0 or 1 for each of n >= k responses to one prompt. With c right ones, k of the n drawn at random
    are all wrong with the chance C(n-c, k) / C(n, k): the unbiased estimate, and not that of the first k alone.

    >>> pass_at(2, [np.array([1.0, 0.0, 0.0, 0.0])])
    0.5
    """
    chances = [1 - math.comb(len(group) - int(group.sum()), k) / math.comb(len(group), k) for group in groups]
    return _mean(chances)


def headlines(names: Iterable[str]) -> list[str]:
    """Of metrics, the accuracies of validation, and the rewards of sources that have no accuracy."""
    core = [name for name in dict.fromkeys(names) if name.startswith(HEADLINE)]
    return [name for name in core if "/reward/" not in name or name.replace("/reward/", "/acc/") not in core]


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values, dtype=float))


def _answer(answer: object) -> str | None:
    is_missing = answer is None or (isinstance(answer, float | np.floating) and np.isnan(answer))
    return None if is_missing else str(answer)


def _majority(answers: Sequence[str | None]) -> int:
    """The place of the first response with the most common answer; of answers equally common, the first to come.

    A response without an answer has no vote. Where there are no votes at all, the first response stands.
    """
    votes = Counter(answer for answer in answers if answer)
    return answers.index(votes.most_common(1)[0][0]) if votes else 0
