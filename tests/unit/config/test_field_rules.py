"""Rules on fields: a number has bounds, and its docstring says them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.config.describe import docstring
from paceline.config.field_rules import Range
from paceline.config.keys import known_keys

RANGES = {name: key.range for name, key in known_keys().items() if key.range is not None}


def test_every_checked_range_is_documented_under_its_field():
    # "-1" has a meaning of its own, which the docstring tells after it.
    undocumented = [key for key, allowed in RANGES.items() if repr(allowed) not in docstring(known_keys()[key])]
    as_written = {"trainer.test_freq", "trainer.save_freq"}  # ">= 1, and at the end; or -1"
    assert set(undocumented) == as_written
    assert all(">= 1" in docstring(known_keys()[key]) and "or -1" in docstring(known_keys()[key]) for key in as_written)


def test_every_number_has_a_range():
    numbers = {key.name for key in known_keys().values() if key.hint in (int, float, int | None, float | None)}
    assert numbers == set(RANGES)


@given(
    st.integers(-5, 5), st.integers(-5, 5), st.booleans(), st.booleans(), st.integers(-9, 9).map(lambda half: half / 2)
)
def test_a_range_holds_what_its_text_says(low: int, high: int, open_low: bool, open_high: bool, value: float):
    allowed = Range(low, high, open_low, open_high)
    left, right = repr(allowed).removeprefix("in ").split(", ")
    above = value > low if left[0] == "(" else value >= low
    below = value < high if right[-1] == ")" else value <= high
    assert (value in allowed) == (above and below)
    assert (float(left[1:]), float(right[:-1])) == (low, high)


def test_a_value_with_a_meaning_of_its_own_is_allowed_beside_the_range():
    allowed = Range(1, also=-1)
    assert [number for number in range(-3, 4) if number in allowed] == [-1, 1, 2, 3]
    assert repr(allowed) == ">= 1, or -1"
