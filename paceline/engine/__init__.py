"""Training backends behind one interface: a Hugging Face model, an optimizer, mini-batches in, full weights out."""

from __future__ import annotations

from paceline.engine.engine_interface import Engine, EngineSpec, LossFn, MicroBatchSize, get_engine, register_engine
from paceline.engine.hf_engine import HfEngine

__all__ = ["Engine", "EngineSpec", "HfEngine", "LossFn", "MicroBatchSize", "get_engine", "register_engine"]
