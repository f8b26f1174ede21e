"""Checks of the weights that an engine gets: names and shapes of the Hugging Face model's state dict, none missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from paceline.errors import PacelineError


def whole_state(
    model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as they come, and at the end those that are missing because they are tied to one that came.

    `model` says which names, shapes and ties there are; it may be on the meta device. Unknown names, other shapes and
    weights that did not come raise a PacelineError in the middle of the iteration.
    """
    state = model.state_dict(keep_vars=True)
    came: dict[int, torch.Tensor] = {}
    missing = set(state)
    for name, tensor in named_tensors:
        if name not in state:
            raise PacelineError(f"update_weights got {name!r}, which the rollout's model does not have.")
        if state[name].shape != tensor.shape:
            raise PacelineError(
                f"update_weights got {name!r} of shape {tuple(tensor.shape)}; "
                f"the rollout's model has {tuple(state[name].shape)}."
            )
        came[id(state[name])] = tensor
        missing.discard(name)
        yield name, tensor
    lost = [name for name in state if name in missing and id(state[name]) not in came]
    if lost:
        raise PacelineError(
            f"update_weights got no value for {len(lost)} of {len(state)} weights: {', '.join(lost[:5])}"
            f"{', ...' if len(lost) > 5 else ''}. Send the whole state dict of the actor."
        )
    for name in missing:
        yield name, came[id(state[name])]
