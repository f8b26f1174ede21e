"""Whether a rollout engine holds the weights that it was given, whatever its own layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.protocol.digest import tensor_digest

PROJECTION_ROWS = 2


@dataclass(frozen=True)
class Held:
    """What an engine holds of one weight of the actor's."""

    part: Callable[[Tensor], Tensor]
    """From the whole weight: what should be there, such as the rows of this rank."""
    there: Callable[[], Tensor]
    """What is there: the same numbers in the engine's dtype or, of a layer whose packed weights have no bytes to read,
    its answer to `fixed_input`."""
    by_output: bool = False

    def expected(self, whole: Tensor) -> str | Tensor:
        """What to compare with, from the weight as the actor gives it. It is small, and outlasts the weight."""
        part = self.part(whole)
        if not self.by_output:
            return tensor_digest(part)
        return fixed_input(part.shape[1], part.dtype, part.device) @ part.t()

    def is_as_expected(self, expected: str | Tensor) -> bool:
        there = self.there()
        if isinstance(expected, str):
            return tensor_digest(there) == expected
        difference, size = (there - expected).float().norm(), expected.float().norm()
        return bool(difference <= TOLERANCES.get(there.dtype, 0.02) * size)  # False for NaN


TOLERANCES = {torch.float32: 4e-6, torch.bfloat16: 0.02}
"""Of the norm of a layer's answer: other kernels change the last bits."""


def fixed_input(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same random rows every time."""
    generator = torch.Generator().manual_seed(width)
    return torch.randn(PROJECTION_ROWS, width, generator=generator).to(device, dtype)


class WeightProof:
    """Compares what an engine holds after `noted` went through it with what `noted` saw.

    The comparison is by bytes, or by a layer's answer where `Held.by_output` says so.
    """

    def __init__(self, held: Mapping[str, Held]) -> None:
        self._held = held
        self._expected: dict[str, str | Tensor] = {}
        self.unproven: list[str] = []
        """Weights of which the engine can't say where they are."""

    @torch.no_grad()
    def noted(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The weights on their way from the actor to the engine."""
        for name, tensor in named_tensors:
            if name in self._held:
                self._expected[name] = self._held[name].expected(tensor)
            else:
                self.unproven.append(name)
            yield name, tensor

    @torch.no_grad()
    def differing(self) -> list[str]:
        """The weights that the engine does not hold as they came, those that did not come included."""
        return [
            name
            for name, held in self._held.items()
            if name not in self._expected or not held.is_as_expected(self._expected[name])
        ]

    @property
    def num_by_output(self) -> int:
        return sum(held.by_output for held in self._held.values())


def held_as_they_are(state: Mapping[str, Tensor]) -> dict[str, Held]:
    """Of an engine whose tensors have Hugging Face's names and shapes."""
    return {name: _whole(tensor) for name, tensor in state.items()}


def _whole(tensor: Tensor) -> Held:
    return Held(part=lambda whole: whole.to(tensor.dtype), there=lambda: tensor)
