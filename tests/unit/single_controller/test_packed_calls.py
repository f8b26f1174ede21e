"""Ranks that get the same arguments get one pickle; whose arguments only compare equal do not."""

from __future__ import annotations

import pytest

from paceline.single_controller.base.dispatch import TakeShard, concat_rows
from paceline.single_controller.ray.group import _alike
from paceline.single_controller.ray.shell import FromValues


def shard(index: int) -> FromValues:
    return FromValues(0, 2, TakeShard(concat_rows, index, 2))


@pytest.mark.parametrize(
    ("one", "other", "is_alike"),
    [
        (((FromValues(0, 1), 3), {"by": None}, True), ((FromValues(0, 1), 3), {"by": None}, True), True),
        (((FromValues(0, 1),), {}, True), ((FromValues(1, 2),), {}, True), False),
        (((shard(0),), {}, True), ((shard(0),), {}, True), True),
        (((shard(0),), {}, True), ((shard(1),), {}, True), False),
        (((), {"by": 1}, True), ((), {"by": True}, True), False),
        (((), {"by": 1.0}, True), ((), {"by": 1}, True), False),
        (((), {"by": 0.0}, True), ((), {"by": -0.0}, True), False),
        (((), {}, True), ((), {}, False), False),
        (((), {}, True), object(), False),
    ],
)
def test_only_the_same_arguments_are_alike(one: object, other: object, is_alike: bool) -> None:
    assert _alike(one, other) is is_alike
