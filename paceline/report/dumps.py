"""Every response of a step with what it was worth: rows to look at, and files of them.

    rows = generation_rows(batch, tokenizer, step=3, scores=token_level_scores, info=reward_extra_info)
    dump_generations("dumps/validation", 3, rows)      # dumps/validation/3.jsonl, one line per response

A row is `{"step": 3, "data_source": "openai/gsm8k", "uid": "validation-0-4", "prompt": "...", "response": "...",
"ground_truth": "42", "score": 1.0, ...}` and what the scorer gave besides, such as `acc` and `pred`.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from paceline.files import write_atomically
from paceline.protocol import DataProto
from paceline.report.json_lines import Row, json_line, plain


def generation_rows(
    batch: DataProto,
    tokenizer: PreTrainedTokenizerBase,
    *,
    step: int,
    scores: torch.Tensor | None = None,
    info: Mapping[str, np.ndarray] | None = None,
    reward_fn_key: str = "data_source",
) -> list[Row]:
    """One row per response of `batch`, in its order, with texts as the graders read them.

    Args:
        batch: `prompts`, `responses`, `attention_mask`; and, where it has them, the non-tensor columns
            `reward_fn_key`, `uid` and `reward_model`. Rows of conversations get `turns`: of each who said it, the text,
            its number of tokens, and what it earned.
        scores: (batch, response), summed over the response; None takes the batch's `token_level_scores`.
        info: further columns (batch,), such as the reward function's. NaN is "has none", and becomes None.
    """
    assert batch.batch is not None
    columns = batch.non_tensor_batch
    scores = batch.batch["token_level_scores"] if scores is None else scores
    empty = [None] * len(batch)
    texts = _texts(batch, tokenizer)
    rewards = columns.get("reward_model", empty)
    rows = []
    for row in range(len(batch)):
        reward = rewards[row]
        known = {
            "step": step,
            "data_source": columns.get(reward_fn_key, empty)[row],
            "uid": columns.get("uid", empty)[row],
            "prompt": texts["prompts"][row],
            "response": texts["responses"][row],
            "ground_truth": reward.get("ground_truth") if isinstance(reward, Mapping) else None,
            "score": float(scores[row].sum()),
        }
        if "conversation" in batch.batch:
            known["turns"] = _turns(batch, row, tokenizer)
        further = {name: _or_none(plain(column[row])) for name, column in (info or {}).items() if name not in known}
        rows.append(known | further)
    return rows


def token_rows(batch: DataProto, tokenizer: PreTrainedTokenizerBase, most: int = 400) -> list[list[list[object]]]:
    """Of each response its first tokens: text, log-prob, advantage, and whether the policy wrote it (1).

    Log-probs are those of the update, or the rollout's where it has none.
    """
    columns = batch.batch
    log_probs = columns.get("old_log_probs", columns.get("rollout_log_probs", None))
    advantages = columns.get("advantages", None)
    width = columns["prompts"].shape[-1]
    rows: list[list[list[object]]] = []
    for row in range(len(batch)):
        valid = columns["attention_mask"][row, width:].bool().nonzero().flatten()[:most].tolist()
        rows.append(
            [
                [
                    tokenizer.decode([int(columns["responses"][row, place])]),
                    None if log_probs is None else float(f"{float(log_probs[row, place]):.4g}"),
                    None if advantages is None else float(f"{float(advantages[row, place]):.4g}"),
                    int(columns["response_mask"][row, place]),
                ]
                for place in valid
            ]
        )
    return rows


def dump_generations(folder: str | os.PathLike[str], step: int, rows: Sequence[Mapping[str, object]]) -> Path:
    """Write `<folder>/<step>.jsonl`, whole or not at all; a step that comes again after a resume replaces its file."""
    path = Path(folder).expanduser() / f"{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, b"".join(map(json_line, rows)))
    return path


def _texts(batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[str]]:
    assert batch.batch is not None
    width = batch.batch["prompts"].shape[-1]
    mask = batch.batch["attention_mask"].bool()
    masks = {"prompts": mask[:, :width], "responses": mask[:, width:]}
    return {
        name: tokenizer.batch_decode(
            [ids[valid].tolist() for ids, valid in zip(batch.batch[name], masks[name], strict=True)],
            skip_special_tokens=True,
        )
        for name in masks
    }


def _turns(batch: DataProto, row: int, tokenizer: PreTrainedTokenizerBase) -> list[Row]:
    """What the model said in a row of a conversation and what it read between, in order, with all special tokens."""
    assert batch.batch is not None
    columns = {name: batch.batch[name][row].tolist() for name in ("responses", "response_mask", "turn_scores")}
    length = int(batch.batch["attention_mask"][row, batch.batch["prompts"].shape[-1] :].sum())
    tokens = list(zip(*columns.values(), strict=True))[:length]
    turns = []
    for is_own, part in itertools.groupby(tokens, key=lambda token: bool(token[1])):
        ids, _, rewards = zip(*part, strict=True)
        text = tokenizer.decode(list(ids), skip_special_tokens=False)
        turn = {"by": "model" if is_own else "read", "text": text, "tokens": len(ids)}
        turns.append(turn | ({"reward": sum(rewards)} if is_own else {}))
    return turns


def _or_none(value: object) -> object:
    return None if isinstance(value, float) and math.isnan(value) else value
