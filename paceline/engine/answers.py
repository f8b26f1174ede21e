"""A Hugging Face model as the engines call it: log-probs, values or scores, computed only where they are asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from paceline.engine.hf_models import ModelKind
from paceline.engine.logprobs import TOKEN_STATISTICS, hidden_log_probs_and_entropy, token_log_probs_and_entropy
from paceline.engine.model_calls import ModelCall
from paceline.engine.top_tokens import likeliest_tokens
from paceline.speedups import WantedTokens, faster_linear, find_last_mlp

logger = logging.getLogger(__name__)

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""How far log-probs that should be equal may differ, as a share of the largest, by what the model computes in."""


class AnswerModel(nn.Module):
    """A model that returns the engine's columns.

    A module, so that a backend that shards it gathers the head's parameters during the call.
    """

    def __init__(self, model: PreTrainedModel, kind: ModelKind) -> None:
        super().__init__()
        self.model = model
        self.kind = kind
        self.head_apart = kind == "causal_lm" and _has_plain_head(model)
        """Whether log-probs are computed from hidden states, in chunks, and not from the model's own logits."""
        last_mlp = find_last_mlp(model)
        self.mlp_apart = last_mlp is not None
        """Whether the last layer's MLP computes only the tokens that are asked for."""
        self._in_last_mlp = None if last_mlp is None else WantedTokens(last_mlp)
        self.by_onednn = True
        """Whether linear layers may go to oneDNN; compiled ones are not to be looked into."""

    def forward(self, call: ModelCall, temperature: float) -> dict[str, Tensor]:
        """(asked,) float32 each: `TOKEN_STATISTICS` of the next tokens; `values`; or `scores`.

        And `top_log_probs` (asked, k) of a call's candidates; or, with `top_tokens`, of the likeliest tokens alone.

        Called, and gradients taken, within `calls`.
        """
        if self._in_last_mlp is not None:
            self._in_last_mlp.places = call.places if self.mlp_apart else None
        with faster_linear(call.places.device.type) if self.by_onednn else nullcontext():
            if self.kind == "causal_lm":
                statistics = self._from_hidden_states if self.head_apart else self._from_logits
                return _by_name(call, statistics(call, temperature))
            outputs = self.model(**call.inputs).logits.flatten(0, 1)[call.places, 0].float()
            return {"values" if self.kind == "value" else "scores": outputs}

    @contextmanager
    def calls(self) -> Iterator[None]:
        """After this context the model computes all tokens again, as a rollout needs it."""
        try:
            yield
        finally:
            if self._in_last_mlp is not None:
                self._in_last_mlp.places = None

    def _from_hidden_states(self, call: ModelCall, temperature: float) -> tuple[Tensor, ...]:
        hidden = self.model.base_model(**call.inputs).last_hidden_state.flatten(0, 1)[call.places]
        head: Any = self.model.get_output_embeddings()
        if call.likeliest is not None:
            logits_of = lambda part: linear(hidden[part], head.weight, head.bias)  # noqa: E731
            return likeliest_tokens(logits_of, len(hidden), temperature, call.likeliest)
        return hidden_log_probs_and_entropy(
            hidden, head.weight, head.bias, _wanted_tokens(call), temperature, sum_pi_squared=call.sum_pi_squared
        )

    def _from_logits(self, call: ModelCall, temperature: float) -> tuple[Tensor, ...]:
        columns, place = (call.places % call.inputs["input_ids"].shape[-1]).unique(return_inverse=True)
        rows = call.places // call.inputs["input_ids"].shape[-1]
        logits = self.model(**call.inputs, logits_to_keep=columns).logits[rows, place]
        if call.likeliest is not None:
            return likeliest_tokens(lambda part: logits[part], len(logits), temperature, call.likeliest)
        return token_log_probs_and_entropy(
            logits, _wanted_tokens(call), temperature, sum_pi_squared=call.sum_pi_squared
        )


def _wanted_tokens(call: ModelCall) -> Tensor:
    """(asked,) the next tokens; or (asked, 1 + k), candidates behind them."""
    if call.candidates is None:
        return call.tokens
    return torch.cat([call.tokens.unsqueeze(-1), call.candidates], dim=-1)


def _by_name(call: ModelCall, columns: tuple[Tensor, ...]) -> dict[str, Tensor]:
    if call.likeliest is not None:
        return dict(zip(("top_log_probs", "top_tokens"), columns, strict=True))
    named = dict(zip(TOKEN_STATISTICS, columns, strict=False))
    if call.candidates is None:
        return named
    return {**named, "log_probs": columns[0][:, 0], "top_log_probs": columns[0][:, 1:]}


def _has_plain_head(model: PreTrainedModel) -> bool:
    """Whether its logits seem to be those of a linear layer on the last hidden states. `check_shortcuts` makes sure."""
    return (
        type(model.get_output_embeddings()) is nn.Linear and model.base_model is not model and not _scales_logits(model)
    )


def _scales_logits(model: PreTrainedModel) -> bool:
    """Whether its configuration has final_logit_softcapping, logits_scaling, lm_head_multiplier or the like."""
    settings = model.config.get_text_config().to_dict()
    return any(
        ("logit" in name or "lm_head" in name) and isinstance(value, int | float) and value not in (0, 1)
        for name, value in settings.items()
    )


@torch.no_grad()
def check_shortcuts(answers: AnswerModel, root: nn.Module, call: ModelCall, rounding: float) -> None:
    """Compare each shortcut with the model's own forward pass on `call`; switch off those that differ. Collective.

    `root` is what is called: `answers`, or what a backend wrapped around it. `rounding` is one of ROUNDING.
    """
    shortcuts = {
        "head_apart": "the logits of %s are not its head's output: they are made for a whole micro-batch at a time.",
        "mlp_apart": "the last MLP of %s is not all that follows its last attention: it computes every token.",
    }
    wanted = [name for name in shortcuts if getattr(answers, name)]
    for name in wanted:
        setattr(answers, name, False)
    own = first_column(root(call, 1.0))
    allowed = 0.001 * (own.max() - own.min()) + rounding * own.abs().max()
    for name in wanted:
        setattr(answers, name, True)
        if not bool((first_column(root(call, 1.0)) - own).abs().max() <= allowed):  # so NaN is not allowed, either
            setattr(answers, name, False)
            logger.warning(shortcuts[name], type(answers.model).__name__)


def first_column(columns: dict[str, Tensor]) -> Tensor:
    """The first column of an AnswerModel's output: all columns are computed from the same logits."""
    return next(iter(columns.values()))
