"""The first value in which two records of a step differ, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

RTOL, ATOL = 1e-4, 1e-6
"""Of numbers that other devices made: the sums of several ranks are added in another order."""
GRADIENT_METRICS = ("grad_norm", "lr")
Words = tuple[str, str]
REPLAYED: Words = ("recorded", "replayed")


def tensor_difference(
    name: str,
    now: torch.Tensor | None,
    recorded: torch.Tensor,
    *,
    exact: bool = True,
    first_row: int = 0,
    words: Words = REPLAYED,
) -> str | None:
    """The first place in which two columns differ, in words."""
    if now is None or now.shape != recorded.shape:
        return f"{name}: {words[0]} {tuple(recorded.shape)}, {words[1]} {None if now is None else tuple(now.shape)}"
    if exact:
        same = (now == recorded) | (now.isnan() & recorded.isnan() if now.is_floating_point() else now == recorded)
    else:
        same = torch.isclose(now.double(), recorded.double(), rtol=RTOL, atol=ATOL, equal_nan=True)
    if same.all():
        return None
    place = [int(index) for index in (~same).nonzero()[0]]
    shown = [place[0] + first_row, *place[1:]]
    where = ", ".join(f"{part} {index}" for part, index in zip(("row", "token"), shown, strict=False))
    first, second = recorded[tuple(place)].item(), now[tuple(place)].item()
    return (
        f"{name}, {where}: {words[0]} {first!r}, {words[1]} {second!r} ({int((~same).sum())} of {same.numel()} differ)"
    )


def update_differences(
    role: str,
    now: Mapping[str, Any],
    recorded: Mapping[str, Any],
    equal: Callable[[object, object], bool],
    with_losses: bool = True,
    words: Words = REPLAYED,
) -> Iterator[str]:
    """How an update differs from the recorded one: in its optimizer steps, then in the weights after it."""
    if len(now["steps"]) != len(recorded["steps"]):
        yield f"{role}: {words[0]} {len(recorded['steps'])} optimizer steps, {words[1]} {len(now['steps'])}"
    for number, (new, old) in enumerate(zip(now["steps"], recorded["steps"], strict=False)):
        names = [name for name in old if with_losses or name in GRADIENT_METRICS]
        for name in sorted(names, key=lambda name: (name in GRADIENT_METRICS, name)):
            if not equal(new.get(name), old[name]):
                yield f"{role}, optimizer step {number}, {name}: {words[0]} {old[name]!r}, {words[1]} {new.get(name)!r}"
    if recorded["ranks"] == 1 and now["weights"] != recorded["weights"]:
        yield f"{role}: the weights after the update differ"


def same_value(now: object, recorded: object, *, exact: bool = True) -> bool:
    """Of numbers; NaN is itself."""
    if isinstance(now, float) and isinstance(recorded, float) and not exact:
        return abs(now - recorded) <= ATOL + RTOL * abs(recorded) or now == recorded
    return now == recorded or (now != now and recorded != recorded)
