"""Attention within each of the sequences that are packed into one row, and the check that a model supports it.

The lengths travel as `packed_lengths` through the model's keyword arguments to each attention layer. Each sequence has
its own call of SDPA, so the work grows with the sum of the squared lengths, and no mask of the whole row exists.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from paceline.engine.answers import first_column
from paceline.engine.model_calls import two_sequences
from paceline.private_apis.transformers_private import attention_replaced

PACKED_SDPA = "paceline_packed_sdpa"
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def packed_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_lengths: tuple[int, ...],
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of a row (1, heads, tokens, head_dim) of sequences; gives (1, tokens, heads, head_dim)."""
    outputs = []
    parts = zip(*(states.split(packed_lengths, dim=2) for states in (query, key, value)), strict=True)
    for length, (part_query, part_key, part_value) in zip(packed_lengths, parts, strict=True):
        mask = None
        if sliding_window is not None and length > sliding_window:
            mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
            mask = mask.triu(1 - sliding_window)[None, None]
        outputs.append(sdpa_attention_forward(module, part_query, part_key, part_value, mask, **kwargs)[0])
    return torch.cat(outputs, dim=1), None


# transformers builds no mask for an attention that has none registered.
AttentionInterface.register(PACKED_SDPA, packed_sdpa)


def packed_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Packed calls are made, and their gradients taken, within this context; padded ones are not."""
    return attention_replaced(model, PACKED_SDPA)


def packing_problem(model: PreTrainedModel, answer: Callable[..., dict[str, Tensor]], rounding: float) -> str:
    """Why two sequences in one row do not give what each gives alone; empty if they do.

    `answer(micro_batch, packed=...)` returns columns (asked,); it is collective where the model is. The differences are
    measured against how much the first token of a sequence changes the output for its later ones: a sequence that
    attended to the other one would change about as much. `rounding` is the relative error of an output.
    """
    problem = unknown_layers(model) or _mixing(model, answer, rounding)
    return f"{type(model).__name__} can't keep packed sequences apart: {problem}" if problem else ""


def unknown_layers(model: PreTrainedModel) -> str:
    """Which of its layers this attention can't take the place of; empty if it can for all."""
    layers = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _KNOWN_LAYERS
    return f"it has layers that are neither full nor sliding attention: {', '.join(sorted(layers))}" if layers else ""


def _mixing(model: PreTrainedModel, answer: Callable[..., dict[str, Tensor]], rounding: float) -> str:
    batch = two_sequences()
    changed = batch.clone()
    changed["input_ids"][0, 0] = 0
    try:
        with packed_attention(model):
            before, after = (first_column(answer(columns, packed=True)) for columns in (batch, changed))
    except Exception as error:
        return f"its attention can't be given their lengths ({error})"
    # As many answers are asked of one sequence as of the other.
    seen, crossed = (after - before).abs().view(2, -1).amax(dim=1).tolist()
    difference = float((before - first_column(answer(batch, packed=False))).abs().max())
    if crossed <= 0.01 * seen and difference <= 0.01 * seen + rounding * float(before.abs().max()):
        return ""
    return f"a change of one changes what it says of the other by {crossed:.1g}, and packing by {difference:.1g}"
