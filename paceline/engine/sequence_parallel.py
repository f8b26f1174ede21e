"""Ulysses: each rank of a group has a part of every sequence, and in the attention a part of the heads.

Outside the attention a rank computes its share of the tokens. Before the attention an all-to-all gives it all tokens of
its share of the heads, and after it another gives the tokens back. What was asked of the model is gathered at the end,
so that all ranks of the group have the same answers, and a loss on them has the gradient of one model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from paceline.engine.model_calls import ModelCall
from paceline.engine.packed_attention import packed_sdpa
from paceline.private_apis.transformers_private import attention_replaced

ULYSSES_SDPA = "paceline_ulysses_sdpa"


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share each sequence. Rank r has the r-th part of its tokens."""

    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def answer(self, root: Callable[[ModelCall, float], dict[str, Tensor]], call: ModelCall, temperature: float) -> Any:
        """What `root` answers to the whole call, each rank computing its part. Within `ulysses_attention`."""
        part, asked_of = self._part_of(call)
        answers = root(part, temperature)
        return {name: cast(Tensor, _Gathered.apply(values, asked_of, self)) for name, values in answers.items()}

    def _part_of(self, call: ModelCall) -> tuple[ModelCall, list[Tensor]]:
        """This rank's part of a call, and which of the asked outputs each rank computes.

        A rank without any is asked for its first token's: it has to take part all the same.
        """
        inputs = dict(call.inputs)
        length = inputs["input_ids"].shape[-1]
        width = math.ceil(length / self.size)
        added = width * self.size - length
        own = slice(self.rank * width, (self.rank + 1) * width)
        for name in ("input_ids", "position_ids"):
            inputs[name] = F.pad(inputs[name], (0, added))[:, own]
        if (lengths := inputs.pop("packed_lengths", None)) is not None:
            inputs["whole_lengths"] = (*lengths, added) if added else lengths
        else:
            inputs["whole_mask"] = _visible(F.pad(inputs.pop("attention_mask"), (0, added)))
        row, column = call.places // length, call.places % length
        owner = column // width
        asked_of = [(owner == rank).nonzero().flatten() for rank in range(self.size)]
        mine = asked_of[self.rank]
        places = (row * width + column % width)[mine]
        part = replace(
            call,
            inputs={**inputs, "sequence_group": self},
            places=places if len(mine) else call.places.new_zeros(1),
            tokens=call.tokens[mine] if len(mine) else call.tokens.new_zeros(1),
        )
        return part, asked_of

    def to_heads(self, states: Tensor) -> Tensor:
        """From (batch, heads, own tokens, size) to (batch, own heads, tokens, size)."""
        return cast(Tensor, _Exchanged.apply(states, self, 1, 2))

    def to_tokens(self, states: Tensor) -> Tensor:
        """From (batch, tokens, own heads, size) to (batch, own tokens, heads, size)."""
        return cast(Tensor, _Exchanged.apply(states, self, 1, 2))


def _visible(attention_mask: Tensor) -> Tensor:
    """(batch, 1, tokens, tokens): earlier tokens of the row, without padding; and each itself, or padding would see
    nothing, of which the mean is not a number."""
    length = attention_mask.shape[-1]
    causal = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device).tril()
    itself = torch.eye(length, dtype=torch.bool, device=attention_mask.device)
    return (attention_mask.bool()[:, None, None, :] & causal) | itself


def ulysses_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence_group: SequenceGroup,
    whole_mask: Tensor | None = None,
    whole_lengths: tuple[int, ...] | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention of (batch, heads, own tokens, head_dim); gives (batch, own tokens, heads, head_dim)."""
    # Fewer key-value heads than ranks, or heads that do not divide: as many copies of each as make them divide.
    if copies := sequence_group.size // math.gcd(sequence_group.size, key.shape[1]) - 1:
        key, value = (states.repeat_interleave(copies + 1, dim=1) for states in (key, value))
    query, key, value = (sequence_group.to_heads(states) for states in (query, key, value))
    layer: Any = SimpleNamespace(
        num_key_value_groups=query.shape[1] // key.shape[1],
        is_causal=getattr(module, "is_causal", True),
        training=module.training,
    )
    if whole_lengths is not None:
        output, _ = packed_sdpa(
            layer, query, key, value, None, packed_lengths=whole_lengths, sliding_window=sliding_window, **kwargs
        )
    else:
        assert whole_mask is not None
        if sliding_window is not None:
            whole_mask = whole_mask & torch.ones_like(whole_mask[0, 0]).triu(1 - sliding_window)
        output, _ = sdpa_attention_forward(layer, query, key, value, whole_mask, **kwargs)
    return sequence_group.to_tokens(output), None


# transformers builds no mask for an attention that has none registered.
AttentionInterface.register(ULYSSES_SDPA, ulysses_sdpa)


def ulysses_attention(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Calls of `SequenceGroup.answer` are made, and their gradients taken, within this context."""
    return attention_replaced(model, ULYSSES_SDPA)


def heads_problem(config: PretrainedConfig, size: int) -> str:
    """Why so many ranks can't share a model's attention; empty if they can."""
    heads = config.get_text_config().num_attention_heads
    if heads % size == 0:
        return ""
    divisors = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
    return f"{size} does not divide its {heads} attention heads; {divisors} do"


class _Exchanged(Function):
    """All-to-all: rank r gives the r-th part along one dimension to rank r, and joins what it gets along another."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: SequenceGroup, split: int, join: int) -> Tensor:
        ctx.group, ctx.split, ctx.join = group, split, join
        return _exchange(states, group, split, join)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradient, ctx.group, ctx.join, ctx.split), None, None, None


def _exchange(states: Tensor, group: SequenceGroup, split: int, join: int) -> Tensor:
    sent = torch.stack(states.chunk(group.size, dim=split))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group.group)
    return torch.cat(received.unbind(0), dim=join)


class _Gathered(Function):
    """The answers of all ranks in the order in which they were asked for. A gradient goes to whose answer it is of:
    all ranks of the group compute the same loss, which counts once."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, asked_of: list[Tensor], group: SequenceGroup) -> Tensor:
        ctx.mine = asked_of[group.rank]
        most = max(map(len, asked_of))
        own = F.pad(values[: len(ctx.mine)], (0, most - len(ctx.mine)))
        parts = [torch.empty_like(own) for _ in asked_of]
        dist.all_gather(parts, own, group=group.group)
        whole = values.new_empty(sum(map(len, asked_of)))
        for places, part in zip(asked_of, parts, strict=True):
            whole[places] = part[: len(places)]
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        own = gradient[ctx.mine]
        return own if len(own) else gradient.new_zeros(1), None, None
