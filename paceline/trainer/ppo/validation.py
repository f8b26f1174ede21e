"""Validation: sample responses to held-out prompts and score them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np

from paceline.data.rl_dataset import Batch
from paceline.protocol import DataProto, DataProtoFuture
from paceline.report.validation_metrics import CORE, validation_metrics
from paceline.trainer.ppo.conversations import (
    conversation_metrics,
    is_of_conversations,
    join_labels,
    whole_conversations,
)
from paceline.trainer.ppo.run_log import RunLog
from paceline.trainer.ppo.scoring import grader_fields, sources_of
from paceline.trainer.ppo.step import make_requests


def validate(
    prompts: Iterable[Batch],
    generate: Callable[[DataProto, DataProto], DataProtoFuture],
    score: Callable[[DataProto], DataProtoFuture],
    log: RunLog,
    *,
    n: int,
    seed: int,
    source_key: str,
    by_turns: bool = False,
) -> dict[str, float]:
    """Metrics `val-core/<data_source>/{reward,acc}/mean@n` and `val-aux/.../{best,maj}@n` over all batches of prompts.

    Seeds depend on the place of a prompt alone, so each validation of a run asks the same questions with the same luck,
    whatever the size of the batches. Responses are graded while those of the next batch are sampled. `by_turns`: turns
    of conversations have rewards of their own.
    """
    graded: list[tuple[DataProto, DataProtoFuture]] = []
    num_prompts = 0
    for rows in prompts:
        requests, labels = make_requests(rows, n=n, seed=seed, purpose="validation", step=0, first_row=num_prompts)
        batch = join_labels(labels, generate(requests, labels).get())
        graded.append((batch, score(batch)))
        num_prompts += len(labels) // n
        log.validated(num_prompts)
    columns: dict[str, list[np.ndarray]] = defaultdict(list)
    of_agents: dict[str, list[float]] = defaultdict(list)
    for batch, scores in graded:
        batch = batch.union(scores.get())
        if is_of_conversations(batch):
            batch = whole_conversations(batch, "token_level_scores", by_turns=by_turns)
            for name, number in conversation_metrics(batch).items():
                of_agents[f"val-aux/{name}"].append(number)
        fields = grader_fields(batch)
        log.add_validated(batch, fields)
        columns["reward"].append(batch.batch["token_level_scores"].sum(dim=-1).numpy())
        columns["acc"].append(_numbers(fields, "acc", len(batch)))
        columns["pred"].append(np.asarray(fields.get("pred", [None] * len(batch)), dtype=object))
        columns["uid"].append(batch.non_tensor_batch["uid"])
        columns["source"].append(np.array(sources_of(batch, source_key), dtype=object))
    whole = {name: np.concatenate(parts) for name, parts in columns.items()}
    core = {name: whole[name] for name in CORE}
    sources, uids, answers = (whole[name].tolist() for name in ("source", "uid", "pred"))
    metrics = validation_metrics(sources, uids, core, n=n, answers=answers)
    return metrics | {name: float(np.mean(numbers)) for name, numbers in of_agents.items()}


def _numbers(info: dict[str, np.ndarray], name: str, num_rows: int) -> np.ndarray:
    """A column of the graders', NaN where it is missing or holds no numbers."""
    column = info.get(name)
    return np.full(num_rows, np.nan) if column is None or column.dtype == object else column.astype(float)
