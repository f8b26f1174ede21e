"""DAPO's dynamic sampling: a group of equal scores teaches nothing, so those of further prompts take its place."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np

from paceline.algorithms.groups import groups_with_signal
from paceline.config import FilterGroupsConfig
from paceline.errors import ConfigError, RewardError
from paceline.protocol import DataProto, DataProtoFuture
from paceline.rewards import UNSHAPED_SCORE
from paceline.text import unknown_choice
from paceline.trainer.ppo.computed_columns import nonfinite_places
from paceline.trainer.ppo.scoring import grader_fields, grader_metrics, reward_components, sources_of

logger = logging.getLogger(__name__)


class Refilled(NamedTuple):
    """Scored responses in groups with signal, and metrics of all that were drawn for them."""

    batch: DataProto
    metrics: dict[str, float]


def refill_groups(
    batch: DataProto,
    score: Callable[[DataProto], DataProtoFuture],
    draw: Callable[[str], DataProto],
    settings: FilterGroupsConfig,
    *,
    step: int,
    wanted: int,
    source_key: str,
    components: Collection[str] = (),
) -> Refilled:
    """`wanted` responses in groups with signal, and their scores, beginning with those of `batch`.

    `draw(purpose)` gives responses to further prompts, until there are enough or `settings.max_num_gen_batches` batches
    were drawn; then the step has to do with what was found. `components` are the parts of the scores that the estimator
    compares one by one, if it does.
    """
    found = 0
    all_drawn: list[DataProto] = []
    kept: list[DataProto] = []
    for drawn in itertools.count(1):
        scores = score(batch).get()
        batch = batch.union(scores.select(meta_info_keys=[]))
        if nonfinite_places(batch, ["token_level_scores"]):
            return Refilled(batch, scores.meta_info["metrics"])  # the run stops at them, or leaves the step out
        uid = batch.non_tensor_batch["uid"]
        measured = _measured(batch, settings.metric, components)
        signal = np.any([groups_with_signal(column, uid) for column in measured], axis=0)
        signal &= found + np.cumsum(signal) <= wanted
        all_drawn.append(batch)
        kept.append(batch[np.flatnonzero(signal)])
        found += int(signal.sum())
        if found == wanted or drawn == settings.max_num_gen_batches:
            break
        batch = draw(f"training, refill {drawn}")
    if found == 0:
        raise RewardError(
            f"step {step}: in {drawn} batches every group of responses has equal scores, so there is nothing to learn. "
            "Choose prompts that are neither too easy nor too hard, raise actor_rollout_ref.rollout.n or "
            "algorithm.filter_groups.max_num_gen_batches."
        )
    if found < wanted:
        logger.warning(
            "step %d: %d of %d responses are in groups with signal after %d batches; going on with those",
            step, found, wanted, drawn,
        )  # fmt: skip
    whole = _concat(all_drawn)
    metrics = grader_metrics(sources_of(whole, source_key), grader_fields(whole))
    metrics |= {"training/gen_batches": float(drawn), "training/share_kept": found / len(whole)}
    return Refilled(_concat([part for part in kept if len(part)]), metrics)


def _measured(batch: DataProto, metric: str | None, components: Collection[str]) -> list[np.ndarray]:
    """What decides whether responses differ, in any of the columns.

    A response that lacks the field that `metric` names is measured by its score.
    """
    if metric is None and components:
        return [column.numpy() for column in reward_components(batch, components).values()]
    scores = batch.batch["token_level_scores"].sum(dim=-1).numpy()
    fields = {name: column for name, column in grader_fields(batch).items() if column.dtype != object}
    known = {**fields, "seq_reward": scores, "seq_final_reward": scores}
    if UNSHAPED_SCORE in fields:
        known["score"] = fields[UNSHAPED_SCORE]
    metric = metric or "seq_reward"
    if metric not in known:
        raise ConfigError(unknown_choice("algorithm.filter_groups.metric", metric, sorted(known)))
    values = known[metric].astype(float)
    return [np.where(np.isnan(values), scores, values)]


def _concat(parts: list[DataProto]) -> DataProto:
    """All rows; a column that some files lack is None there."""
    names = dict.fromkeys(name for part in parts for name in part.non_tensor_batch)
    for part in parts:
        for name in names:
            part.non_tensor_batch.setdefault(name, np.full(len(part), None, dtype=object))
    return DataProto.concat(parts)
