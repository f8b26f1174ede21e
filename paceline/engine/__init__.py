"""Training backends behind one interface: a Hugging Face model, an optimizer, mini-batches in, full weights out."""

from __future__ import annotations

from paceline.engine.hf_engine import Engine, EngineSpec
from paceline.engine.engine_registry import get_engine, register_engine

__all__ = ["Engine", "EngineSpec", "get_engine", "register_engine"]
