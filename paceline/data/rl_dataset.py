"""Prompts from data files, tokenised once at the start, or in an earlier run.

All prompts are tokenised when the dataset is made, so that a malformed or overlong one is found then and not in the
middle of a run. Token ids are kept in one flat array, other columns as Arrow tables, from which a row becomes Python
objects when it is asked for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from transformers import PreTrainedTokenizerBase

from paceline.config import DataConfig
from paceline.data.prompt_files import PromptFile, read_prompt_files
from paceline.data.prompt_images import PromptImages
from paceline.data.token_cache import cache_folder, cache_key, load_tokens, save_tokens
from paceline.errors import ConfigError, DataError
from paceline.protocol.image_columns import GRIDS, PIXELS
from paceline.text import shorten

logger = logging.getLogger(__name__)

Item = dict[str, Any]
"""One prompt: its tensors, and the cells of its other columns."""
Chat = list[dict[str, str]]
Batch = dict[str, torch.Tensor | np.ndarray]
_CHUNK = 1000
_PROGRESS_SECONDS = 10.0


class RLHFDataset(torch.utils.data.Dataset):
    """Prompts as token ids, with the other columns of the files for the rewards.

    Args:
        files: parquet, JSON lines or CSV; `~` and globs are expanded.
        tokenizer: has a padding token, and a chat template if prompts are chats.
        config: `prompt_key`, `reward_fn_key`, `keep_columns`, `max_prompt_length`, `truncation`,
            `filter_overlong_prompts`, `apply_chat_template_kwargs`, `return_raw_chat`, `cache_dir`.
        max_samples: use only the first rows; -1 is all.
        images: reads the images of `image_key`, which the prompts have then, as columns of `image_columns`.

    A prompt that is a chat (a list of `{"role", "content"}`) goes through the chat template with a generation prompt.
    A prompt that is a string is tokenised as it is.

    An item is a dict: `input_ids`, `attention_mask`, `position_ids` (each `(max_prompt_length,)` int64, padded on the
    left), `index` (the row's number in the files, unless they have such a column), `raw_prompt` if asked for, and the
    file's other columns: all of them, unless they are wide or `keep_columns` says which.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        max_samples: int = -1,
        images: PromptImages | None = None,
    ) -> None:
        if tokenizer.pad_token_id is None:
            raise DataError("The tokenizer has no padding token. Load it with paceline.data.load_tokenizer.")
        self.tokenizer = tokenizer
        self.config = config
        if config.image_key is not None and images is None:
            raise DataError(
                f"data.image_key={config.image_key}: images are read in training alone so far. Leave it out here, with "
                "prompts of text."
            )
        self._images = images if config.image_key is not None else None
        self._patches: list[list[int]] = []
        """Of each image of each row of the files."""
        self._files = read_prompt_files(files, config, max_samples)
        tokens = self._token_ids()
        lengths = np.array([len(ids) for ids in tokens])
        self._rows = self._select(lengths)
        if self._images is not None:
            patches = [self._patches[row] for row in self._rows]
            self._most = max(map(sum, patches)), max(map(len, patches))
            """Patches and images of the prompts with the most of them."""
        self.num_cut = int((lengths[self._rows] > config.max_prompt_length).sum())
        kept = [self._truncate(tokens[row]) for row in self._rows]
        self._ends = np.cumsum([len(ids) for ids in kept])
        self._tokens = np.concatenate(kept)
        if not config.return_raw_chat:
            self._files = [
                PromptFile(file.path, file.table.drop_columns([config.prompt_key]), file.first) for file in self._files
            ]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, item: int) -> Item:
        if item < 0:
            item += len(self)
        if not 0 <= item < len(self):  # ends a plain for loop
            raise IndexError(f"prompt {item} of {len(self)}")
        start = int(self._ends[item - 1]) if item else 0
        ids = torch.from_numpy(self._tokens[start : self._ends[item]].astype(np.int64))
        length = self.config.max_prompt_length
        input_ids = torch.full((length,), self.tokenizer.pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros(length, dtype=torch.int64)
        input_ids[length - len(ids) :] = ids
        attention_mask[length - len(ids) :] = 1
        row = int(self._rows[item])
        file = self._file_of(row)
        columns = file.table.slice(row - file.first, 1).to_pylist()[0]
        if self.config.return_raw_chat:
            prompt = columns.pop(self.config.prompt_key)
            columns["raw_prompt"] = prompt if isinstance(prompt, str) else _without_nulls(prompt)
        if self._images is not None:
            cells = columns.pop(self.config.image_key)
            columns |= zip((PIXELS, GRIDS), self._images.padded(cells, *self._most), strict=True)
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(0) - 1).clamp(min=0),
            "index": row,
            **columns,
        }

    def largest_token(self) -> int:
        """The largest id in the prompts: the model must have an embedding for it."""
        return int(self._tokens.max())

    def column(self, name: str) -> list[Any]:
        """The values of an extra column for all prompts, None where it was not in the file or not kept."""
        values = self._all_values(name)
        return [values[row] for row in self._rows]

    def _all_values(self, name: str) -> list[Any]:
        values: list[Any] = []
        for file in self._files:
            has_it = name in file.table.column_names
            values += file.table.column(name).to_pylist() if has_it else [None] * file.table.num_rows
        return values

    def reward_labels(self) -> list[dict[str, str | bool | None] | None]:
        """For each prompt `style`, and True or None for a `ground_truth`: the truths themselves may be large."""
        labels: list[dict[str, str | bool | None] | None] = []
        for file in self._files:
            table = file.table
            if "reward_model" not in table.column_names:
                labels += [None] * table.num_rows
                continue
            column = table.column("reward_model")
            fields = {field.name for field in column.type} if pa.types.is_struct(column.type) else set()
            styles = pc.struct_field(column, "style").to_pylist() if "style" in fields else [None] * len(column)
            truths = pc.struct_field(column, "ground_truth").is_valid().to_pylist() if "ground_truth" in fields else []
            labels += [
                {"style": style, "ground_truth": truth or None}
                for style, truth in zip(styles, truths or [None] * len(column), strict=True)
            ]
        return [labels[row] for row in self._rows]

    def ground_truth(self, item: int) -> object:
        """The `ground_truth` of one prompt, or None."""
        row = int(self._rows[item])
        file = self._file_of(row)
        label = file.table.column("reward_model")[row - file.first].as_py()
        return label.get("ground_truth") if isinstance(label, dict) else None

    def place(self, item: int) -> str:
        """Where a prompt comes from, for messages."""
        return self._describe(int(self._rows[item]))

    def _file_of(self, row: int) -> PromptFile:
        firsts = [file.first for file in self._files]
        return self._files[int(np.searchsorted(firsts, row, side="right")) - 1]

    def _describe(self, row: int) -> str:
        file = self._file_of(row)
        return f"row {row - file.first} of {file.path}"

    def _token_ids(self) -> list[np.ndarray]:
        """The token ids of each prompt, from the cache or made now. Either way the prompts were checked."""
        folder = cache_folder(self.config.cache_dir)
        if self._images is not None:  # their sizes have a part in it
            return self._with_images(self._tokenise(), self._images)
        prompts = [file.table.column(self.config.prompt_key) for file in self._files]
        key = cache_key(prompts, self.tokenizer, self.config.apply_chat_template_kwargs) if folder else None
        if folder is None or key is None:
            tokens = self._tokenise()
            reason = f"{type(self.tokenizer).__name__} has code of its own" if folder else "data.cache_dir is ''"
            logger.info("tokenised %d prompts, without a cache: %s", len(tokens), reason)
            return tokens
        cached = load_tokens(folder, key, num_prompts=sum(map(len, prompts)))
        if cached is not None:
            logger.info("took the tokens of %d prompts from the cache in %s", len(cached), folder)
            return cached
        tokens = self._tokenise()
        if save_tokens(folder, key, tokens):
            logger.info("tokenised %d prompts, cached for the next run in %s", len(tokens), folder)
        else:
            logger.info("tokenised %d prompts", len(tokens))
        return tokens

    def _with_images(self, tokens: list[np.ndarray], images: PromptImages) -> list[np.ndarray]:
        """The tokens of each prompt with those of its images, whose patches are noted."""
        for row, cells in enumerate(self._all_values(str(self.config.image_key))):
            try:
                if not cells:
                    raise DataError("has no image, and all prompts must have one where data.image_key is set")
                patches = images.num_patches(cells)
                tokens[row] = np.asarray(images.expanded(tokens[row].tolist(), patches), dtype=np.int32)
                self._patches.append(patches)
            except DataError as error:
                raise DataError(f"The prompt in {self._describe(row)} {error}.") from error
        return tokens

    def _tokenise(self) -> list[np.ndarray]:
        tokens: list[np.ndarray] = []
        total = sum(file.table.num_rows for file in self._files)
        last_report = time.monotonic()
        for file in self._files:
            prompts = file.table.column(self.config.prompt_key)
            for start in range(0, len(prompts), _CHUNK):
                chunk = prompts.slice(start, _CHUNK).to_pylist()
                texts = [self._text(prompt, file.first + start + row) for row, prompt in enumerate(chunk)]
                # A template writes its own special tokens; a plain string gets those that the tokenizer adds.
                are_strings = isinstance(chunk[0], str)
                encoded = self.tokenizer(texts, add_special_tokens=are_strings)["input_ids"]
                tokens += [np.asarray(ids, dtype=np.int32) for ids in encoded]
                if time.monotonic() - last_report > _PROGRESS_SECONDS:
                    last_report = time.monotonic()
                    logger.info("tokenised %d of %d prompts", len(tokens), total)
        for row, ids in enumerate(tokens):
            if not len(ids):
                raise DataError(f"The prompt in {self._describe(row)} is empty: it has no tokens. Remove the row.")
        return tokens

    def _text(self, prompt: object, row: int) -> str:
        """The prompt as the model sees it, after the chat template."""
        if isinstance(prompt, str):
            return prompt
        if not isinstance(prompt, list) or not prompt or not all(_is_message(message) for message in prompt):
            raise DataError(
                f"The prompt in {self._describe(row)} is {shorten(repr(prompt), 200)}. Column "
                f"{self.config.prompt_key!r} must "
                'hold a string, or a chat: a list of at least one {"role": ..., "content": ...}, both strings.'
            )
        if self.tokenizer.chat_template is None and "chat_template" not in self.config.apply_chat_template_kwargs:
            raise DataError(
                f"The prompt in {self._describe(row)} is a chat, but the tokenizer has no chat template. Use the "
                "tokenizer of an instruction-tuned model (actor_rollout_ref.model.tokenizer_path), or give prompts as "
                "strings."
            )
        try:
            chat = _without_nulls(prompt)
            text = self.tokenizer.apply_chat_template(
                chat if self._images is None else self._images.with_parts(chat),
                add_generation_prompt=True,
                tokenize=False,
                **self.config.apply_chat_template_kwargs,
            )
        except Exception as error:  # a template raises what it likes, such as for roles that do not alternate
            raise DataError(f"The chat template rejects the prompt in {self._describe(row)}: {error}") from error
        assert isinstance(text, str)  # of one chat, and not of its tokens
        return text

    def _select(self, lengths: np.ndarray) -> np.ndarray:
        """The rows to keep, by their lengths in tokens."""
        limit = self.config.max_prompt_length
        overlong = lengths > limit
        count, total = int(overlong.sum()), len(lengths)
        longest = int(lengths.argmax())
        example = f"the longest, {self._describe(longest)}, has {lengths[longest]} tokens"
        if self.config.filter_overlong_prompts:
            if count == total:
                raise DataError(
                    f"All {total} prompts are longer than data.max_prompt_length={limit}; {example}, the shortest "
                    f"{lengths.min()}. Raise data.max_prompt_length."
                )
            logger.info(
                "kept %d of %d prompts; %d are longer than data.max_prompt_length=%d",
                total - count, total, count, limit,
            )  # fmt: skip
            return np.flatnonzero(~overlong)
        if count and self.config.truncation == "error":
            raise DataError(
                f"{count} of {total} prompts are longer than data.max_prompt_length={limit}; {example}. Raise "
                "data.max_prompt_length, leave them out with data.filter_overlong_prompts=True, or cut them with "
                "data.truncation=left, right or middle."
            )
        if count:
            logger.warning(
                "%d of %d prompts are longer than data.max_prompt_length=%d and are cut (data.truncation=%s)",
                count, total, limit, self.config.truncation,
            )  # fmt: skip
        return np.arange(total)

    def _truncate(self, ids: np.ndarray) -> np.ndarray:
        limit = self.config.max_prompt_length
        if len(ids) <= limit:
            return ids
        match self.config.truncation:
            case "left":
                return ids[-limit:]
            case "right":
                return ids[:limit]
            case "middle":
                head = limit // 2
                return np.concatenate([ids[:head], ids[len(ids) - (limit - head) :]])
            case other:
                raise ConfigError(f"data.truncation={other!r}; choose error, left, right or middle.")


def collate_fn(items: Sequence[Item]) -> Batch:
    """Stack tensors; put everything else into object arrays. A column that a row lacks is None there."""
    batch: Batch = {}
    for key in dict.fromkeys(key for item in items for key in item):
        values = [item.get(key) for item in items]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if len(tensors) == len(values):
            batch[key] = torch.stack(tensors)
        else:
            column = np.empty(len(values), dtype=object)
            column[:] = values
            batch[key] = column
    return batch


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
    )


def _without_nulls(chat: Chat) -> Chat:
    """A chat without the null fields that Arrow adds to make all messages alike; templates ask whether fields exist."""
    return [{key: value for key, value in message.items() if value is not None} for message in chat]
