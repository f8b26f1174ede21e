"""What keys ask of a training backend that it can't do: one sentence each, for the checks and for the engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from paceline.catalog import BACKENDS, BackendEntry


@dataclass(frozen=True)
class Ability:
    """Something that not every backend can do."""

    field: str
    """Of `BackendEntry`: whether a backend can."""
    lacking: str
    """What is said of one that can't."""
    off: object
    """The value of a key that does not ask for it; nor does null."""


LORA = Ability("lora", "has no LoRA", 0)
BFLOAT16 = Ability("bfloat16", "computes in float32", "float32")
OFFLOAD = Ability("offload", "does not offload", False)
ULYSSES = Ability("ulysses", "keeps a sequence on one device", 1)
COMPILES = Ability("compiles", "does not compile layers", False)
PACKING = Ability("packing", "does not pack sequences", False)

Asked = tuple[Ability, str, object]
"""What is asked for, the key that does, and its value."""


def refusals(can: BackendEntry, strategy: str, asked: Iterable[Asked]) -> Iterator[str]:
    """A sentence for each key that asks for more; `strategy` is the backend's key with its name.

    >>> list(refusals(BACKENDS.built_in["fsdp"], "strategy=fsdp", [(LORA, "model.lora_rank", 8)]))
    ['model.lora_rank=8: strategy=fsdp has no LoRA; set model.lora_rank=0, or strategy=local or fsdp2.']
    """
    for ability, key, value in asked:
        if value and value != ability.off and not getattr(can, ability.field):
            able = [name for name, entry in BACKENDS.built_in.items() if getattr(entry, ability.field)]
            others = [name for name in able if BACKENDS.built_in[name].package is None]
            yield (
                f"{key}={value}: {strategy} {ability.lacking}; set {key}={ability.off}, or "
                f"{strategy.partition('=')[0]}={' or '.join(others)}."
            )
