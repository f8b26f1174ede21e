"""DAPO's dynamic sampling: a group of equal scores teaches nothing, so those of further prompts take its place."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.algorithms.groups import groups_with_signal
from paceline.errors import ConfigError, RewardError
from paceline.protocol import DataProto
from paceline.rewards import columns_of
from paceline.text import unknown_choice
from paceline.trainer.ppo.phases import nonfinite_places

if TYPE_CHECKING:
    from paceline.trainer.ppo.ray_trainer import RayPPOTrainer

logger = logging.getLogger(__name__)

KEPT = "kept"


def refill_groups(trainer: RayPPOTrainer, batch: DataProto) -> DataProto:
    """`data.train_batch_size` groups with signal, and their scores.

    Further prompts are drawn until there are enough, in `algorithm.filter_groups.max_num_gen_batches` batches at most;
    then the step has to do with what was found.
    """
    settings, n = trainer.config.algorithm.filter_groups, trainer.config.actor_rollout_ref.rollout.n
    wanted, found = trainer.config.data.train_batch_size * n, 0
    kept: list[DataProto] = []
    rows: list[dict[str, Any]] = []  # what graders said of every response, and whether it was kept
    sources: list[Any] = []
    for drawn in itertools.count(1):
        pending = trainer.score(batch)
        batch = batch.union(pending.get())
        if nonfinite_places(batch, ["token_level_scores"]):
            trainer.log.add_scores(pending.info, trainer.scoring.metrics(trainer.scoring.sources(batch), pending.info))
            return batch  # the run stops at them, or leaves the step out
        signal = groups_with_signal(_measured(batch, pending.info, settings.metric), batch.non_tensor_batch["uid"])
        signal &= found + np.cumsum(signal) <= wanted
        kept.append(batch[np.flatnonzero(signal)])
        info = pending.info | {KEPT: signal}
        rows += [{name: column[row] for name, column in info.items()} for row in range(len(batch))]
        sources += trainer.scoring.sources(batch)
        found += int(signal.sum())
        if found == wanted or drawn == settings.max_num_gen_batches:
            break
        requests, labels = trainer.draw_requests(f"training, refill {drawn}")
        batch = labels.union(trainer.generate(requests).get())
    if found == 0:
        raise RewardError(
            f"step {trainer.global_step}: in {drawn} batches every group of responses has equal scores, so there is "
            "nothing to learn. Choose prompts that are neither too easy nor too hard, raise "
            "actor_rollout_ref.rollout.n or algorithm.filter_groups.max_num_gen_batches."
        )
    if found < wanted:
        logger.warning(
            "step %d: %d of %d responses are in groups with signal after %d batches; going on with those",
            trainer.global_step, found, wanted, drawn,
        )  # fmt: skip
    metrics = trainer.scoring.metrics(sources, columns_of(rows))
    metrics |= {"training/gen_batches": float(drawn), "training/share_kept": found / len(rows)}
    trainer.log.add_scores(columns_of([row for row in rows if row.pop(KEPT)]), metrics)
    return _concat([part for part in kept if len(part)])


def _measured(batch: DataProto, info: dict[str, np.ndarray], metric: str) -> np.ndarray:
    """What decides whether responses differ; a response that has no such number is measured by its score."""
    scores = batch.batch["token_level_scores"].sum(dim=-1).numpy()
    known = {"seq_reward": scores} | {name: column for name, column in info.items() if column.dtype != object}
    if metric not in known:
        raise ConfigError(unknown_choice("algorithm.filter_groups.metric", metric, sorted(known)))
    values = known[metric].astype(float)
    return np.where(np.isnan(values), scores, values)


def _concat(parts: list[DataProto]) -> DataProto:
    """All rows; a column that some files lack is None there."""
    names = dict.fromkeys(name for part in parts for name in part.non_tensor_batch)
    for part in parts:
        for name in names:
            part.non_tensor_batch.setdefault(name, np.full(len(part), None, dtype=object))
    return DataProto.concat(parts)
