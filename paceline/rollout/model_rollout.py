"""The base of rollout engines that sample from a Hugging Face module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Self

import torch
from transformers import PreTrainedModel

from paceline.rollout.held_weights import Held, held_as_they_are
from paceline.rollout.rollout_interface import (
    RolloutEngine,
    RolloutSpec,
    token_ids,
    whole_state,
)


class ModelRollout(RolloutEngine):
    """Samples from a module in this process: the actor's own, or a copy that `update_weights` fills.

    The module is left as it was found, between any two steps.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Set[int],
        pad_token_id: int,
        max_num_seqs: int = 256,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.model = model
        self.eos_token_ids = sorted(eos_token_ids)
        self.pad_token_id = pad_token_id
        self.max_num_seqs = max_num_seqs
        self.dtype = dtype

    @classmethod
    def from_spec(cls, spec: RolloutSpec) -> Self:
        """The engine of a worker, on the worker's module."""
        model = spec.module()
        configured = model.generation_config.eos_token_id if model.generation_config is not None else None
        return cls(
            model,
            eos_token_ids=spec.eos_token_ids | token_ids(configured),
            pad_token_id=spec.pad_token_id,
            max_num_seqs=spec.config.max_num_seqs,
            dtype=spec.dtype,
        )

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """No gradients, evaluation mode, the engine's numbers."""
        with torch.no_grad(), self._computing_in_dtype(), self._evaluating():
            yield

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """In training mode dropout would be on, and gradient checkpointing would switch the cache off."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True

    @contextmanager
    def _computing_in_dtype(self) -> Iterator[None]:
        """One autocast around all passes: it keeps the cast weights until its end, but only of weights that train."""
        if self.dtype == torch.float32:
            yield
            return
        frozen = [parameter for parameter in self.model.parameters() if not parameter.requires_grad]
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            with torch.autocast(self.model.device.type, self.dtype):
                yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the weights into the model in place. Not to be called when the model is the actor's own module.

        After an error the model holds a mix of old and new weights.
        """
        assert not self._is_decoding, "autocast would go on with the weights that it has cast"
        state = self.model.state_dict()
        for name, tensor in whole_state(self.model, named_tensors):
            state[name].copy_(tensor)

    @property
    def weights_dtype(self) -> torch.dtype:
        return self.model.dtype

    def held_weights(self) -> Mapping[str, Held]:
        return held_as_they_are(self.model.state_dict())

    def sleep(self) -> None:
        """Free what the device's allocator holds back. Caches are there while requests are under way, and stay."""
        if self.model.device.type != "cpu":
            torch.accelerator.empty_cache()

    def wake(self) -> None:
        """Always awake."""
