"""Validation: sample responses to held-out prompts and score them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.protocol import DataProto
from paceline.report.validation_metrics import CORE, validation_metrics
from paceline.trainer.ppo.phases import make_requests
from paceline.trainer.ppo.scoring import PendingScores

if TYPE_CHECKING:
    from paceline.trainer.ppo.ray_trainer import RayPPOTrainer


def validate(trainer: RayPPOTrainer, batches: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Metrics `val-core/<data_source>/{reward,acc}/mean@n` and `val-aux/.../{best,maj}@n` over all batches.

    Seeds depend on the place of a prompt alone, so each validation of a run asks the same questions with the same luck,
    whatever the size of the batches. Responses are graded while those of the next batch are sampled.
    """
    sampling = trainer.config.actor_rollout_ref.rollout.val_kwargs
    seed = trainer.config.trainer.seed
    graded: list[tuple[DataProto, PendingScores]] = []
    num_prompts = 0
    for rows in batches:
        requests, labels = make_requests(
            rows, n=sampling.n, seed=seed, purpose="validation", step=0, first_row=num_prompts
        )
        batch = labels.union(trainer.generate(requests, sampling).get())
        graded.append((batch, trainer.score(batch, validation=True)))
        num_prompts += len(batch) // sampling.n
        trainer.log.validated(num_prompts)
    columns: dict[str, list[np.ndarray]] = defaultdict(list)
    for batch, scores in graded:
        batch = batch.union(scores.get())
        trainer.log.add_validated(batch, scores.info, trainer.tokenizer)
        columns["reward"].append(batch.batch["token_level_scores"].sum(dim=-1).numpy())
        columns["acc"].append(_numbers(scores.info, "acc", len(batch)))
        columns["pred"].append(np.asarray(scores.info.get("pred", [None] * len(batch)), dtype=object))
        columns["uid"].append(batch.non_tensor_batch["uid"])
        columns["source"].append(np.array(trainer.scoring.sources(batch), dtype=object))
    whole = {name: np.concatenate(parts) for name, parts in columns.items()}
    core = {name: whole[name] for name in CORE}
    return validation_metrics(whole["source"], whole["uid"], core, n=sampling.n, answers=whole["pred"])


def _numbers(info: dict[str, np.ndarray], name: str, num_rows: int) -> np.ndarray:
    """A column of the graders', NaN where it is missing or holds no numbers."""
    column = info.get(name)
    return np.full(num_rows, np.nan) if column is None or column.dtype == object else column.astype(float)
