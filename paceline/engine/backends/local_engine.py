"""One process, no collectives: the reference for the other backends, and the fastest on a single device."""

from __future__ import annotations

import os

from transformers import PreTrainedModel

from paceline.engine.answers import AnswerModel
from paceline.engine.engine_interface import register_engine
from paceline.engine.hf_engine import HfEngine
from paceline.errors import ConfigError


@register_engine("local")
class LocalEngine(HfEngine):
    """The plain model. Several ranks may each hold one to infer with; training would let their weights drift apart."""

    def _distribute(self, answers: AnswerModel) -> AnswerModel:
        return answers.to(self.device)

    def _build_model(self) -> PreTrainedModel:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if self.spec.trains and world_size > 1:
            raise ConfigError(
                f"strategy=local trains in one process, but this role has {world_size}; "
                "set strategy=fsdp2 or give the role one device."
            )
        return super()._build_model()

    @property
    def module(self) -> PreTrainedModel:
        return self.model
