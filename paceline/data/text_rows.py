"""Rows of texts to train on, tokenised once at the start: conversations, and pairs of a better and a worse reply.

A malformed or overlong row is found then, and not in the middle of a run. Token ids are kept in one flat array.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from paceline.config.path_checks import data_files
from paceline.config.supervised import DialogueDataConfig, PairDataConfig, RatedPairDataConfig, TextDataConfig
from paceline.config.tables import read_table, table_format
from paceline.data.chat_tokens import ConversationTokens, Messages, TrainedConversation, TrainedTokens
from paceline.errors import DataError
from paceline.text import shorten

logger = logging.getLogger(__name__)

Section = TypeVar("Section", bound=TextDataConfig)
Columns = dict[str, Any]
_CHUNK = 1000


class TextItem(NamedTuple):
    """One row: its sequences, and what it is worth."""

    sequences: list[tuple[np.ndarray, np.ndarray]]
    """Token ids, and 1 where they are trained."""
    margin: float


class _Place(NamedTuple):
    file: str
    row: int

    def __str__(self) -> str:
        return f"Row {self.row} of {self.file}"


class TextRows(torch.utils.data.Dataset, Generic[Section]):
    """Rows of token sequences from data files.

    A batch (`collate`) has the columns `input_ids`, `attention_mask`, `position_ids` (rows, sequences x length) and
    `response_mask` (rows, sequences x (length - 1)), which is 1 on tokens that are trained: the sequences of a row lie
    one after another, each padded on the left to the longest of the batch, so that a row is dealt as one.
    """

    sequences_per_row: ClassVar[int] = 1

    def __init__(
        self,
        files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        config: Section,
        max_samples: int = -1,
    ) -> None:
        self.config = config
        self._pad = int(tokenizer.pad_token_id or 0)
        self._tokens = ConversationTokens(tokenizer, config.apply_chat_template_kwargs)
        self.num_dropped = self.num_cut = 0
        ids: list[np.ndarray] = []
        trained: list[np.ndarray] = []
        margins: list[float] = []
        self._num_read = 0
        self.places: list[_Place] = []
        for place, row, sequences in self._read(files, max_samples):
            kept = [self._fitted(tokens, place) for tokens in sequences]
            fitting = [one for one in kept if one is not None]
            if len(fitting) < len(kept):
                self.num_dropped += 1
                continue
            ids += [np.asarray(tokens.ids, dtype=np.int32) for tokens in fitting]
            trained += [np.asarray(tokens.trained, dtype=np.int8) for tokens in fitting]
            margins.append(self._margin(row, place))
            self.places.append(place)
        if not self._num_read:
            raise DataError(f"There are no rows in {files} (max_samples={max_samples}).")
        if not ids:
            raise DataError(f"All {self._num_read} rows were left out, as {self._limit()}.")
        self._ends = np.cumsum([len(part) for part in ids])
        self._ids, self._trained = np.concatenate(ids), np.concatenate(trained)
        self._margins = margins
        self._say_what_was_lost()
        self.ends_with_eos = bool((self._ids[self._ends - 1] == tokenizer.eos_token_id).any())
        """Whether any text ends with the token by which a rollout ends."""

    def __len__(self) -> int:
        return len(self._margins)

    def __getitem__(self, item: int) -> TextItem:
        if not 0 <= item < len(self):  # ends a plain for loop
            raise IndexError(f"row {item} of {len(self)}")
        first = item * self.sequences_per_row
        spans = [self._span(number) for number in range(first, first + self.sequences_per_row)]
        return TextItem([(self._ids[span], self._trained[span]) for span in spans], self._margins[item])

    def _span(self, number: int) -> slice:
        return slice(int(self._ends[number - 1]) if number else 0, int(self._ends[number]))

    def largest_token(self) -> int:
        """The largest id: the model must have an embedding for it."""
        return int(self._ids.max())

    @property
    def num_trained_tokens(self) -> int:
        return int(self._trained.sum())

    def collate(self, items: Sequence[TextItem]) -> dict[str, Tensor]:
        """A batch of rows."""
        sequences = [sequence for item in items for sequence in item.sequences]
        length = max(2, *(len(ids) for ids, _ in sequences))
        shape = (len(sequences), length)
        columns = {
            "input_ids": torch.full(shape, self._pad, dtype=torch.int64),
            "attention_mask": torch.zeros(shape, dtype=torch.int64),
            "response_mask": torch.zeros(shape, dtype=torch.int64),
        }
        for row, (ids, trained) in enumerate(sequences):
            start = length - len(ids)
            columns["input_ids"][row, start:] = torch.from_numpy(ids.astype(np.int64))
            columns["attention_mask"][row, start:] = 1
            columns["response_mask"][row, start:] = torch.from_numpy(trained.astype(np.int64))
        columns["position_ids"] = (columns["attention_mask"].cumsum(-1) - 1).clamp(min=0)
        # No first token is predicted, so a mask of one column less says where each is predicted from.
        columns["response_mask"] = columns["response_mask"][:, 1:]
        batch = {name: column.reshape(len(items), -1) for name, column in columns.items()}
        return batch | {"margin": torch.tensor([item.margin for item in items])}

    # What a kind of rows defines.

    @abstractmethod
    def _columns(self, names: Sequence[str]) -> list[str]:
        """Which of a file's columns are read."""

    @abstractmethod
    def _conversations(self, row: Columns) -> list[TrainedConversation]:
        """The texts of a row. Raises DataError whose text goes on after the name of the row."""

    def _margin(self, row: Columns, place: _Place) -> float:
        return 0.0

    # Reading.

    def _read(
        self, files: str | Sequence[str], max_samples: int
    ) -> Iterator[tuple[_Place, Columns, list[TrainedTokens]]]:
        for file in data_files(files):
            table = self._table(file)
            left = table.num_rows if max_samples < 0 else min(table.num_rows, max_samples - self._num_read)
            self._num_read += max(left, 0)
            for start in range(0, left, _CHUNK):
                rows = table.slice(start, min(_CHUNK, left - start)).to_pylist()
                yield from self._tokenised(rows, file, start)

    def _tokenised(
        self, rows: Sequence[Columns], file: str, start: int
    ) -> Iterator[tuple[_Place, Columns, list[TrainedTokens]]]:
        places = [_Place(file, start + number) for number in range(len(rows))]
        try:
            conversations = [one for row in rows for one in self._conversations(row)]
            tokens = list(self._tokens.tokenise(conversations))
        except DataError:
            self._raise_for_first(rows, places)
            raise
        for number, (place, row) in enumerate(zip(places, rows, strict=True)):
            first = number * self.sequences_per_row
            yield place, row, tokens[first : first + self.sequences_per_row]

    def _raise_for_first(self, rows: Sequence[Columns], places: Sequence[_Place]) -> None:
        """Name the first row that is not as it should be."""
        for place, row in zip(places, rows, strict=True):
            try:
                list(self._tokens.tokenise(self._conversations(row)))
            except DataError as error:
                raise DataError(f"{place} {error}") from error

    def _table(self, file: str) -> pa.Table:
        if table_format(file) != "parquet":
            table = read_table(file)
            return table.select(self._columns(table.column_names))
        try:
            return pq.read_table(file, columns=self._columns(pq.read_schema(file).names))
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{file} can't be read as parquet: {error}") from error

    def _fitted(self, tokens: TrainedTokens, place: _Place) -> TrainedTokens | None:
        limit, how = self.config.max_length, self.config.truncation
        if len(tokens.ids) > limit:
            if how == "error":
                raise DataError(
                    f"{place} has {len(tokens.ids)} tokens, more than data.max_length={limit}. Raise "
                    "it, leave longer rows out with data.truncation=drop, or cut them with left or right."
                )
            if how == "drop":
                return None
            self.num_cut += 1
            part = slice(-limit, None) if how == "left" else slice(limit)
            tokens = TrainedTokens(tokens.ids[part], [0, *tokens.trained[part][1:]])
        return tokens if any(tokens.trained) else None

    def _limit(self) -> str:
        return (
            f"they are longer than data.max_length={self.config.max_length} (data.truncation="
            f"{self.config.truncation}), or nothing of them is trained"
        )

    def _say_what_was_lost(self) -> None:
        if self.num_dropped:
            logger.warning("%d of %d rows are left out, as %s", self.num_dropped, self._num_read, self._limit())
        if self.num_cut:
            logger.warning("%d texts are cut to data.max_length=%d tokens", self.num_cut, self.config.max_length)


class Dialogues(TextRows[DialogueDataConfig]):
    """Conversations, or prompts with a response each."""

    def _columns(self, names: Sequence[str]) -> list[str]:
        config = self.config
        return [config.messages_key] if config.messages_key in names else [config.prompt_key, config.response_key]

    def _conversations(self, row: Columns) -> list[TrainedConversation]:
        config = self.config
        if config.messages_key in row:
            messages = _checked_chat(row[config.messages_key], config.messages_key)
            return [TrainedConversation(messages, turns=config.trained_turns)]
        return [_reply_to(row[config.prompt_key], row[config.response_key], config.prompt_key, config.response_key)]


class Pairs(TextRows[PairDataConfig]):
    """Two sequences a row: the prompt with the chosen reply, and with the rejected one."""

    sequences_per_row = 2

    def _columns(self, names: Sequence[str]) -> list[str]:
        config = self.config
        wanted = [config.prompt_key, config.chosen_key, config.rejected_key]
        if isinstance(config, RatedPairDataConfig) and config.margin_key in names:
            wanted.append(config.margin_key)
        return wanted

    def _conversations(self, row: Columns) -> list[TrainedConversation]:
        config = self.config
        keys = (config.chosen_key, config.rejected_key)
        return [_reply_to(row[config.prompt_key], row[key], config.prompt_key, key) for key in keys]

    def _margin(self, row: Columns, place: _Place) -> float:
        value = row.get(self.config.margin_key) if isinstance(self.config, RatedPairDataConfig) else None
        if value is None:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise DataError(f"{place} has {value!r} in the column of data.margin_key; it must be a number >= 0.")
        return float(value)


def _reply_to(prompt: object, reply: object, prompt_key: str, reply_key: str) -> TrainedConversation:
    """A prompt, as a chat or a string, with one reply, whose last turn is trained."""
    if isinstance(prompt, str):
        if not isinstance(reply, str) or not reply or not prompt:
            raise DataError(f"wants text in the columns {prompt_key!r} and {reply_key!r}; it has {_seen(reply)}.")
        return TrainedConversation(prompt=prompt, reply=reply)
    messages = _checked_chat(prompt, prompt_key)
    if isinstance(reply, str) and reply:
        return TrainedConversation([*messages, {"role": "assistant", "content": reply}], turns="last")
    if isinstance(reply, list):
        return TrainedConversation([*messages, *_checked_chat(reply, reply_key)], turns="last")
    raise DataError(f"has {_seen(reply)} in the column {reply_key!r}; it must be text, and not be empty.")


def _checked_chat(value: object, key: str) -> Messages:
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in value)
    ):
        raise DataError(
            f'has {_seen(value)} in the column {key!r}; it must be a chat: a list of {{"role": ..., "content": ...}}.'
        )
    # Arrow adds null fields to make all messages alike; templates ask whether fields exist.
    return [{name: item for name, item in message.items() if item is not None} for message in value]


def _seen(value: object) -> str:
    return shorten(repr(value), 200)
