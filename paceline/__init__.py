"""RL post-training of language models where placement is one line of configuration.

Importing this package imports neither Ray nor torch nor transformers; `paceline.DataProto` loads on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.protocol import DataProto, DataProtoFuture

__version__ = "0.1.0"
__all__ = ["DataProto", "DataProtoFuture", "__version__"]


def __getattr__(name: str) -> object:
    if name in ("DataProto", "DataProtoFuture"):
        from paceline import protocol

        return getattr(protocol, name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
