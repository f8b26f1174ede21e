from __future__ import annotations

import dataclasses

import pytest

from paceline.catalog import BACKENDS, BackendEntry
from paceline.config import backend_limits
from paceline.config.backend_limits import LORA, OFFLOAD, Ability, refusals

ABILITIES = [value for value in vars(backend_limits).values() if isinstance(value, Ability)]


@pytest.mark.parametrize("ability", ABILITIES, ids=lambda ability: ability.field)
def test_what_can_be_refused_is_in_the_catalogue_and_a_built_in_backend_can_do_it(ability: Ability) -> None:
    assert ability.field in {field.name for field in dataclasses.fields(BackendEntry)}
    assert any(getattr(entry, ability.field) for entry in BACKENDS.built_in.values() if entry.package is None)


def test_a_key_that_asks_for_nothing_is_not_refused() -> None:
    nothing = BackendEntry(lora=False, offload=False)
    assert list(refusals(nothing, "strategy=mine", [(LORA, "rank", 0), (OFFLOAD, "offload", None)])) == []


def test_what_can_be_done_is_not_refused() -> None:
    assert list(refusals(BackendEntry(lora=True), "strategy=mine", [(LORA, "rank", 8)])) == []
