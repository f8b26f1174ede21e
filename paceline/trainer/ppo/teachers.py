"""Which teacher scores which row of a batch, and what it is asked for. Pure but for the calls that it is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from paceline.config import DistillationConfig, PPOConfig
from paceline.config.derived import top_k
from paceline.errors import DataError
from paceline.protocol import DataProto, DataProtoFuture

TAUGHT = ("teacher_log_probs", "top_log_probs")
"""Columns of a teacher's log-probs; a run has one of them."""

Ask = Callable[[DataProto, Mapping[str, object]], DataProtoFuture]
"""A call on the teachers with some rows, and what it is to say of them."""


class Teachers:
    """The teachers of a run."""

    def __init__(self, section: DistillationConfig, asked: Mapping[str, object]) -> None:
        self.section = section
        self.asked = asked

    def issue(self, batch: DataProto, ask: Ask) -> DataProtoFuture:
        """Ask each teacher for its rows; the answers come in the rows' order."""
        rows_of = self.rows_of(batch)
        if len(rows_of) == 1:
            return ask(batch, {**self.asked, "teacher": next(iter(rows_of))})
        answers = [ask(batch[rows], {**self.asked, "teacher": name}) for name, rows in rows_of.items()]
        places = np.argsort(np.concatenate(list(rows_of.values())))
        return DataProtoFuture.concat(answers).then(lambda joined: joined[places])

    def rows_of(self, batch: DataProto) -> dict[str, np.ndarray]:
        """By the name of a teacher its rows of the batch; teachers without any are left out."""
        column = batch.non_tensor_batch.get(self.section.teacher_key)
        names = np.array(teacher_names(self.section, [None] * len(batch) if column is None else list(column)))
        return {name: np.flatnonzero(names == name) for name in self.section.teacher_models if name in names}


def make_teachers(cfg: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> Teachers | None:
    """None where distillation is off."""
    if not cfg.distillation.enabled:
        return None
    asked: dict[str, object] = {}
    if (count := top_k(cfg)) is not None:
        # Of the teacher's tokens those that the policy has, too.
        asked = {"top_k": count, "vocabulary": max(tokenizer.get_vocab().values()) + 1}
    return Teachers(cfg.distillation, asked)


def teacher_names(section: DistillationConfig, keys: Sequence[object]) -> list[str]:
    """The teacher of each row, by what the rows have in distillation.teacher_key; a DataError for those without."""
    by_key = {teacher.key: name for name, teacher in section.teacher_models.items()}
    names = [by_key.get(None, by_key.get(key if isinstance(key, str) else None)) for key in keys]
    lacking = sorted({str(key) for key, name in zip(keys, names, strict=True) if name is None})
    if lacking:
        raise DataError(
            f"no teacher has rows with {section.teacher_key}={', '.join(lacking[:5])}; distillation.teacher_models has "
            f"{', '.join(str(key) for key in by_key)}. Set the `key` of a teacher to it, or give one teacher no key."
        )
    return [name for name in names if name is not None]
