"""RL post-training of language models where placement is one line of configuration.

Importing this package imports neither Ray nor torch nor transformers; its names load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.front import DPO, GRPO, PPO, SFT, Distill, FinishedRun, RewardModel
    from paceline.protocol import DataProto, DataProtoFuture

__version__ = "0.1.0"
__all__ = [
    "DPO",
    "GRPO",
    "PPO",
    "SFT",
    "DataProto",
    "DataProtoFuture",
    "Distill",
    "FinishedRun",
    "RewardModel",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    home = "paceline.protocol" if name.startswith("DataProto") else "paceline.front"
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
