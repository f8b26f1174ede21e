"""DAPO's dynamic sampling: a group of equal scores teaches nothing, so those of further prompts take its place."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING

import numpy as np

from paceline.algorithms.groups import groups_with_signal
from paceline.config.keys import unknown_choice
from paceline.errors import ConfigError, RewardError
from paceline.protocol import DataProto

if TYPE_CHECKING:
    from paceline.trainer.ppo.ray_trainer import RayPPOTrainer

logger = logging.getLogger(__name__)


def refill_groups(trainer: RayPPOTrainer, batch: DataProto) -> DataProto:
    """As many responses as `batch` has, all in groups with signal, with their scores.

    Further prompts are drawn until there are enough, in `algorithm.filter_groups.max_num_gen_batches` batches at most;
    then the step has to do with what was found.
    """
    settings = trainer.config.algorithm.filter_groups
    wanted, kept, infos = len(batch), [], []
    for drawn in itertools.count(1):
        pending = trainer.score(batch)
        batch = batch.union(pending.get())
        measured = {"seq_reward": batch.batch["token_level_scores"].sum(dim=-1).numpy(), **pending.info}
        if settings.metric not in measured:
            raise ConfigError(unknown_choice("algorithm.filter_groups.metric", settings.metric, sorted(measured)))
        rows = np.flatnonzero(groups_with_signal(measured[settings.metric], batch.non_tensor_batch["uid"]))
        kept.append(batch[rows])
        infos.append({name: values[rows] for name, values in pending.info.items()})
        found = sum(map(len, kept))
        if found >= wanted or drawn == settings.max_num_gen_batches:
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
    full = DataProto.concat([part for part in kept if len(part)])[:wanted]
    info = {name: np.concatenate([info[name] for info in infos])[:wanted] for name in infos[0]}
    metrics = {"training/gen_batches": float(drawn), "training/groups_with_signal": found / (drawn * wanted)}
    trainer.log.add_scores(info, trainer.scoring.metrics(full, info) | metrics)
    return full
