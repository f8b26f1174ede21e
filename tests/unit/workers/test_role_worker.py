"""A role's random state."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.workers.role_worker import RoleRng
from tests.device import DEVICE, ON_CPU

pytestmark = pytest.mark.device


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_roles_and_ranks_draw_differently_and_one_seed_draws_the_same() -> None:
    def first(seed: int, role: str, rank: int) -> tuple[float, float, float]:
        with RoleRng(seed, role, rank).swapped_in():
            return draw()

    assert first(1, "actor", 0) == first(1, "actor", 0)
    draws = {first(1, "actor", 0), first(1, "critic", 0), first(1, "actor", 1), first(2, "actor", 0)}
    assert len(draws) == 4


def test_calls_of_other_roles_do_not_disturb_a_roles_draws() -> None:
    alone = RoleRng(1, "actor", 0)
    with alone.swapped_in():
        expected = [draw(), draw()]
    actor, critic = RoleRng(1, "actor", 0), RoleRng(1, "critic", 0)
    with actor.swapped_in():
        found = [draw()]
    with critic.swapped_in():
        draw()
    draw()
    with actor.swapped_in():
        found.append(draw())
    assert found == expected


def test_the_state_outside_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    expected = torch.rand(())
    torch.manual_seed(0)
    with RoleRng(1, "actor", 0).swapped_in():
        draw()
    assert torch.rand(()) == expected


def test_a_saved_state_goes_on_where_it_stopped(tmp_path: Path) -> None:
    rng = RoleRng(1, "actor", 0)
    with rng.swapped_in():
        draw()
    rng.save(tmp_path / "rng.pt")
    with rng.swapped_in():
        expected = draw()
    restored = RoleRng(9, "actor", 0)
    restored.load(tmp_path / "rng.pt")
    with restored.swapped_in():
        assert draw() == expected


@pytest.mark.skipif(ON_CPU, reason="there is an accelerator with --device only")
def test_an_accelerators_random_state_is_each_roles_own(tmp_path: Path) -> None:
    def draw_there() -> float:
        return torch.rand((), device=DEVICE).item()

    actor, critic, alone = RoleRng(1, "actor", 0), RoleRng(1, "critic", 0), RoleRng(1, "actor", 0)
    with alone.swapped_in():
        expected = [draw_there() for _ in range(3)]
    torch.manual_seed(1)
    outside = draw_there()
    torch.manual_seed(1)
    with actor.swapped_in():
        found = [draw_there()]
    with critic.swapped_in():
        assert draw_there() != expected[0]
    assert draw_there() == outside  # outside, nothing was drawn
    with actor.swapped_in():
        found.append(draw_there())
    actor.save(tmp_path / "rng.pt")
    restored = RoleRng(2, "actor", 0)
    restored.load(tmp_path / "rng.pt")
    with restored.swapped_in():
        found.append(draw_there())
    assert found == expected
