"""From the columns of a micro-batch to a call of the model: its input tokens, and where its output is asked for.

Padded: one row per sequence, without the columns that no row uses. Packed: all sequences in one row, without padding;
see `packed_attention` for how they are kept apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from paceline.engine.hf_models import ModelKind
from paceline.engine.top_tokens import Likeliest

TOP_TOKENS = "top_tokens"
"""A column of tokens (batch, response, k) whose log-probs a loss wants beside those of the sampled ones."""


@dataclass(frozen=True)
class ModelCall:
    """The input of one forward pass, and which outputs are asked for."""

    inputs: dict[str, Any]
    """Keyword arguments of the Hugging Face model."""
    places: Tensor
    """(asked,) where its output is asked for, in the flattened tokens."""
    tokens: Tensor
    """(asked,) the tokens that follow there."""
    sum_pi_squared: bool = False
    """Whether the squared probabilities of all tokens are asked for, summed, beside log-probs and entropy."""
    candidates: Tensor | None = None
    """(asked, k) further tokens whose log-probs are asked for there."""
    likeliest: Likeliest | None = None
    """The likeliest tokens are asked for, in place of all others."""


def padded_call(micro_batch: TensorDict, kind: ModelKind, device: torch.device) -> ModelCall:
    """One row per sequence."""
    rows, columns = _asked(micro_batch, kind)
    input_ids, used = micro_batch["input_ids"], micro_batch["attention_mask"].any(dim=0)
    used[columns] = True
    used_columns = used.nonzero().flatten().tolist() or [0]
    # Tokens after the last one that is asked for change nothing.
    end = int(columns.max()) if len(columns) else used_columns[-1]
    window = slice(used_columns[0], end + 1)
    names = ("input_ids", "attention_mask", "position_ids")
    inputs: dict[str, Any] = {name: micro_batch[name][:, window].to(device) for name in names}
    width = inputs["input_ids"].shape[-1]
    return ModelCall(
        inputs={**inputs, "use_cache": False},
        places=(rows * width + columns - window.start).to(device),
        tokens=_next_tokens(input_ids, rows, columns).to(device),
    )


def packed_call(micro_batch: TensorDict, kind: ModelKind, device: torch.device) -> ModelCall:
    """All sequences in one row."""
    rows, columns = _asked(micro_batch, kind)
    input_ids = micro_batch["input_ids"]
    kept, position_ids = _needed(micro_batch, rows, columns)
    places = (kept.flatten().cumsum(dim=0) - 1).view_as(kept)
    return ModelCall(
        inputs={
            "input_ids": input_ids[kept][None].to(device),
            "position_ids": position_ids[kept][None].to(device),
            "packed_lengths": tuple(kept.sum(dim=-1).tolist()),
            "use_cache": False,
        },
        places=places[rows, columns].to(device),
        tokens=_next_tokens(input_ids, rows, columns).to(device),
    )


def aligned_call(micro_batch: TensorDict, kind: ModelKind, device: torch.device) -> ModelCall:
    """One row per sequence that begins with its first token: for models that take no padding mask.

    Padding after a sequence changes nothing in it, since no token attends to later ones.
    """
    rows, columns = _asked(micro_batch, kind)
    kept, position_ids = _needed(micro_batch, rows, columns)
    width = int(kept.sum(dim=-1).max())
    order = (~kept).long().argsort(dim=-1, stable=True)[:, :width]
    return ModelCall(
        inputs={"input_ids": micro_batch["input_ids"].gather(-1, order).to(device)},
        places=(rows * width + position_ids[rows, columns]).to(device),
        tokens=_next_tokens(micro_batch["input_ids"], rows, columns).to(device),
    )


def candidates_of(micro_batch: TensorDict, device: torch.device) -> Tensor | None:
    """The tokens of `top_tokens` at the places that are asked for, in the order of the calls above; None without it."""
    top_tokens = micro_batch.get(TOP_TOKENS, None)
    return None if top_tokens is None else top_tokens[micro_batch["response_mask"].bool()].long().to(device)


def _needed(micro_batch: TensorDict, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens that the asked outputs depend on, at least one of each row; and the position of every token."""
    attended = micro_batch["attention_mask"].bool()
    # Tokens after the last one that is asked for change nothing.
    last = torch.full((len(attended),), -1).scatter_reduce(0, rows, columns, "amax")
    kept = attended & (torch.arange(attended.shape[-1]) <= last[:, None])
    kept[:, 0] |= ~kept.any(dim=-1)  # There are no empty sequences.
    if not kept[rows, columns].all():
        raise ValueError("a response begins without a token before it, from which it could be predicted.")
    position_ids = (attended.cumsum(dim=-1) - 1).clamp(min=0)
    if not torch.equal(position_ids[attended], micro_batch["position_ids"][attended]):
        raise ValueError(
            "position_ids don't count the tokens of each row from 0, so its padding can't be taken out; set "
            "model.use_remove_padding=False and strategy=fsdp2."
        )
    return kept, position_ids


def two_sequences() -> TensorDict:
    """A small micro-batch to try a model with. What is asked for depends on the first tokens by attention alone."""
    attention_mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
    columns = {
        "input_ids": torch.arange(1, 11).view(2, 5) * attention_mask,
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
        "response_mask": torch.tensor([[0, 1, 1], [0, 1, 1]]),
    }
    return TensorDict(columns, batch_size=[2])


def _asked(micro_batch: TensorDict, kind: ModelKind) -> tuple[Tensor, Tensor]:
    """Rows and columns of the tokens whose output is asked for, row by row."""
    attention_mask = micro_batch["attention_mask"]
    if kind == "sequence_classification":
        columns = torch.arange(1, attention_mask.shape[-1] + 1, device=attention_mask.device)
        return torch.arange(len(attention_mask)), (attention_mask * columns).argmax(dim=-1)
    response_mask = micro_batch["response_mask"]
    rows, responses = response_mask.nonzero(as_tuple=True)
    # Each response token is predicted by the token before it.
    return rows, responses + attention_mask.shape[-1] - response_mask.shape[-1] - 1


def _next_tokens(input_ids: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The tokens that follow; at the last column, where none follows and none is asked for, that column's own."""
    return input_ids[rows, (columns + 1).clamp(max=input_ids.shape[-1] - 1)]
