"""Sums, tests and cut values are those of a shell, and what is none of them is refused."""

from __future__ import annotations

import pytest

from paceline.cli.shell_values import any_of, computed, cut


@pytest.mark.parametrize(("source", "value"), [("1 + 2 * 3", 7), (" (1+2) * -3 ", -9), ("-7 / 2", -3), ("-7 % 2", -1)])
def test_sums_are_those_of_a_shell(source: str, value: int) -> None:
    assert computed(source) == value


@pytest.mark.parametrize("source", ["", "1 +", "a", "1 / 0", "2 ** 8", "1.5", "True", "len([1])", "9" * 20, "(" * 500])
def test_what_is_not_a_sum_of_whole_numbers_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"no sum|too large"):
        computed(source)


@pytest.mark.parametrize(
    ("change", "cut_value"),
    [("%.sh", "a/b/c"), ("%/*", "a/b"), ("%%/*", "a"), ("#*/", "b/c.sh"), ("##*/", "c.sh"), ("/b/x", "a/x/c.sh"),
     ("^^", "A/B/C.SH"), ("%no", "a/b/c.sh")],
)  # fmt: skip
def test_a_value_is_cut_at_the_shorter_or_the_longer_match(change: str, cut_value: str) -> None:
    assert cut("a/b/c.sh", change) == cut_value


@pytest.mark.parametrize(
    ("words", "answer"),
    [(["a", "==", "[ab]"], True), (["a", "!=", "a"], False), (["-z", ""], True), (["-n", ""], False), (["x"], True),
     (["3", "-gt", "10"], False), (["!", "3", "-gt", "10"], True), (["-f", "file"], None), (["a", "-gt", "1"], None),
     (["-z", "x", "||", "-n", "x"], True), (["-n", "x", "&&", "-z", "x"], False), (["-n", "x", "&&", "-f", "x"], None)],
)  # fmt: skip
def test_tests_of_texts_and_numbers_are_answered_and_others_left_open(words: list[str], answer: bool | None) -> None:
    assert any_of(words) is answer
