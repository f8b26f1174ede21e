"""Engines on a Hugging Face model: how it is built, called, adapted, saved and loaded.

A backend says in `_distribute` how the model is spread over the devices.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.engine.answers import ROUNDING, AnswerModel, check_shortcuts
from paceline.engine.compiled_layers import CompiledLayers, compile_errors
from paceline.engine.hf_models import build_model
from paceline.engine.lora import add_adapter
from paceline.engine.micro_batch_engine import MicroBatchEngine
from paceline.engine.model_calls import ModelCall, candidates_of, packed_call, padded_call, two_sequences
from paceline.engine.packed_attention import packed_attention, packing_problem
from paceline.engine.top_tokens import Likeliest
from paceline.engine.training_state import (
    Snapshot,
    load_training_state,
    named_adapter_tensors,
    named_full_tensors,
    shape_alone,
    take_snapshot,
)
from paceline.errors import ConfigError
from paceline.private_apis.peft_private import adapters_disabled

logger = logging.getLogger(__name__)


class HfEngine(MicroBatchEngine):
    """A Hugging Face model. Without more than `_distribute`, this rank holds all of it."""

    takes_several_tokens = True
    model: PreTrainedModel
    root: nn.Module
    """What is called: an AnswerModel around `model`, or what the backend wraps around that."""
    _compiled: CompiledLayers | None = None
    """Its layers, if they are compiled."""

    # What a backend defines.

    @abstractmethod
    def _distribute(self, answers: AnswerModel) -> nn.Module:
        """The model on this rank's device, to be called as `answers` is, with its parameters whole during the call.

        Backward passes must leave the *sum* of all ranks' gradients.
        """

    def _build_model(self) -> PreTrainedModel:
        """The model in main memory, with its weights or, if `_distribute` brings them, without."""
        return build_model(self.spec.model, self.spec.kind, train=self.spec.trains)

    def _precision(self) -> AbstractContextManager[None]:
        """Forward passes are made in this context, which has them compute in `compute_dtype`."""
        dtype = self.compute_dtype
        return torch.autocast(self.device.type, dtype) if dtype != torch.float32 else nullcontext()

    # What follows.

    def named_full_weights(self) -> Iterator[tuple[str, Tensor]]:
        with self.on_device():
            yield from named_full_tensors(self._training_state(self.model))

    def named_adapter(self) -> Iterator[tuple[str, Tensor]]:
        with self.on_device():
            yield from named_adapter_tensors(self._training_state(self.model))

    def weight_shapes(self, *, adapter: bool = False) -> Iterator[tuple[str, Tensor]]:
        named = named_adapter_tensors if adapter else named_full_tensors
        with self.on_device():
            yield from named(self._training_state(self.model), shape_alone)

    def snapshot(self) -> Snapshot:
        with self.on_device(optimizer=True):
            return take_snapshot(self._training_state(self.model))

    def load(self, folder: str | Path) -> None:
        with self.on_device(optimizer=True):
            self.num_steps = load_training_state(Path(folder), self._training_state(self.model))

    def without_adapter(self) -> AbstractContextManager[None]:
        return adapters_disabled(self.model) if self.spec.lora is not None else nullcontext()

    @property
    def compute_dtype(self) -> torch.dtype:
        """Numbers of forward and backward passes. The model's output is float32."""
        dtype: torch.dtype = getattr(torch, self.spec.model.compute_dtype)
        return dtype

    def _set_up_model(self) -> None:
        self.model = self._build_model()
        if self.spec.lora is not None:
            add_adapter(self.model, self.spec.lora, self.spec.model.path)
        self._answers = AnswerModel(self.model, self.spec.kind)
        self.root = self._distribute(self._answers)
        if self.spec.model.use_torch_compile:
            self._compiled = CompiledLayers(self.model)
            self._answers.by_onednn = False
        self._check_model()

    @torch.no_grad()
    def _check_model(self) -> None:
        """Check what can only be known by calling the model."""
        rounding = ROUNDING[self.compute_dtype]
        checked = nullcontext() if self._compiled is None else compile_errors(self.spec.model.path)
        with checked, self._calls():
            call = padded_call(two_sequences(), self.spec.kind, self.device)
            with self._precision():
                check_shortcuts(self._answers, self.root, call, rounding)
            packs = self._can_pack(rounding)
        self._packs = packs
        self._after_inference()

    def _can_pack(self, rounding: float) -> bool:
        """Whether sequences are packed: as asked, else where the model keeps them apart."""
        asked = self.spec.model.use_remove_padding
        if asked is False:
            return False
        problem = packing_problem(self.model, self._call_model, rounding)
        if problem and asked:
            raise ConfigError(f"model.use_remove_padding=True: {problem}. Set model.use_remove_padding=False.")
        if problem:
            logger.info("sequences are not packed: %s", problem)
        return not problem

    @contextmanager
    def _calls(self) -> Iterator[None]:
        compiled = nullcontext() if self._compiled is None else self._compiled.calls()
        with self._answers.calls(), compiled, packed_attention(self.model) if self._packs else nullcontext():
            yield

    def _answer(
        self,
        micro_batch: TensorDict,
        temperature: float,
        *,
        sum_pi_squared: bool = False,
        likeliest: Likeliest | None = None,
    ) -> dict[str, Tensor]:
        asked: dict[str, Any] = {"sum_pi_squared": sum_pi_squared, "likeliest": likeliest}
        asked["candidates"] = candidates_of(micro_batch, self.device)
        return self._call_model(micro_batch, packed=self._packs, temperature=temperature, **asked)

    def _call_model(
        self, micro_batch: TensorDict, *, packed: bool, temperature: float = 1.0, **asked: Any
    ) -> dict[str, Tensor]:
        """`asked` are fields of the ModelCall."""
        make_call = packed_call if packed else padded_call
        call = replace(make_call(micro_batch, self.spec.kind, self.device), **asked)
        with self._precision():
            return self._answer_call(call, temperature)

    def _answer_call(self, call: ModelCall, temperature: float) -> dict[str, Tensor]:
        answers: dict[str, Tensor] = self.root(call, temperature)
        return answers
