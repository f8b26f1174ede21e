"""The GSM8K scorer: which spellings of an answer count."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest

from paceline.rewards.score import gsm8k

STRICT = [
    "6 * 7 = 42\n#### 42",
    "#### 42" + " and this is why:" * 20,
    "#### 42" + "\n" + "x" * 300,
    "#### $42",
    r"#### \$42",
    "#### 42.0",
    "#### 42.",
    "####42",
    "####  42\n",
    "#### **42**",
    "#### 42 dollars",
    "#### 42%",
    "#### €42",
    "first #### 41, no: #### 42",
    "#### 84/2",
]
ONLY_FLEXIBLE = [
    r"we get \boxed{42}",
    r"\boxed{42 \text{ apples}}.",
    r"\boxed{40} is wrong, \boxed{\$42.00} is right",
    "A: 42",
    "Q: how many?\nA: $42.",
    "Answer: 42",
    "**Answer:** 42 apples",
    "The answer is 42.",
    "the answer is: **42**",
    "So the final answer is $42, not 41.",
    "6 * 7 = 42",
    "He has 42 apples in all.",
    "#### see above: 42",
]
WRONG = ["#### 43", "#### -42", "#### 420", "#### 4.2", "#### 42.5", "#### 42/5", "#### 42 #### 43", "A: 43", "43"]
NOTHING = ["", "no number at all", "####", "#### forty-two", "####\n\n"]


@pytest.mark.parametrize("response", STRICT)
@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_a_number_after_the_mark_counts_in_both_modes(response, method):
    assert gsm8k.compute_score(response, "42", method) == 1.0


@pytest.mark.parametrize("response", ONLY_FLEXIBLE)
def test_other_forms_count_in_flexible_mode_only(response):
    assert gsm8k.compute_score(response, "42", "strict") == 0.0
    assert gsm8k.compute_score(response, "42", "flexible") == 1.0


@pytest.mark.parametrize("response", WRONG)
@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_wrong_numbers_score_nothing(response, method):
    assert gsm8k.compute_score(response, "42", method) == 0.0


@pytest.mark.parametrize("response", NOTHING)
@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_no_number_is_found_where_there_is_none(response, method):
    assert gsm8k.extract_number(response, method) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("#### 1,234,567", 1234567),
        ("#### 1{,}234", 1234),
        ("#### -5", -5),
        ("#### −5", -5),
        ("#### -$5", -5),
        ("#### $-5", -5),
        ("#### .5", Fraction(1, 2)),
        ("#### 0.25", Fraction(1, 4)),
        ("#### 3, 4 and 5", 3),
        ("#### 1,23", 1),
        ("#### 7/2", Fraction(7, 2)),
        (r"#### \(12\)", 12),
    ],
)
def test_numbers_are_read_as_people_write_them(text, value):
    assert gsm8k.extract_number(text) == value


def test_a_minus_that_is_a_difference_is_no_sign():
    assert gsm8k.extract_number("10-3", "flexible") == 3
    assert gsm8k.extract_number("x=-3", "flexible") == -3


@pytest.mark.parametrize("truth", ["1000", "1,000", "1000.0", "$1,000", "all steps\n#### 1,000", 1000])
def test_the_ground_truth_may_be_spelt_like_an_answer(truth):
    assert gsm8k.compute_score("#### 1000", truth) == 1.0


def test_a_ground_truth_that_is_no_number_is_an_error_not_a_zero():
    with pytest.raises(ValueError, match="'apples'"):
        gsm8k.compute_score("#### 1", "apples")
    [result] = gsm8k.compute_scores(["#### 1"], ["apples"], [None])
    assert isinstance(result, ValueError)


def test_format_score_is_for_a_wrong_number_and_not_for_none():
    assert gsm8k.compute_score("#### 1", "2", format_score=0.1) == 0.1
    assert gsm8k.compute_score("one", "2", format_score=0.1) == 0.0
    assert gsm8k.compute_score("#### 2", "2", score=5.0) == 5.0


def test_unknown_method_is_refused():
    with pytest.raises(ValueError, match="strict or flexible"):
        gsm8k.compute_score("#### 1", "1", method="loose")


def test_an_endless_number_and_a_division_by_zero_are_no_answers():
    assert gsm8k.extract_number("#### " + "9" * 10_000) is None
    assert gsm8k.extract_number("#### 1/0") is None


def test_batch_tells_failed_extraction_from_a_wrong_answer():
    results = gsm8k.compute_scores(["#### 1", "#### 2", "one"], ["1", "1", "1"], [None] * 3)
    assert [(result["score"], result["acc"], result["extracted"]) for result in results] == [
        (1.0, 1.0, True),
        (0.0, 0.0, True),
        (0.0, 0.0, False),
    ]


def test_a_batch_may_be_read_flexibly():
    [result] = gsm8k.compute_scores(["It is 1."], ["1"], [None], method="flexible")
    assert (result["acc"], result["extracted"], result["pred"]) == (1.0, True, "1")


def test_one_number_in_several_spellings_is_one_extracted_answer():
    responses = ["#### 1,000", "#### $1000.0", "#### 7/2", "#### 3.5", "one"]
    results = gsm8k.compute_scores(responses, ["1"] * 5, [None] * 5)
    assert [result["pred"] for result in results] == ["1000", "1000", "7/2", "7/2", ""]


@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_a_thousand_responses_take_well_under_a_second(method):
    responses = ["We add 12 and 30, so 12 + 30 = 42 and then 1,000 more. " * 20] * 500
    responses += ["We add 12 and 30. " * 50 + "#### 42"] * 500
    start = time.process_time()
    for response in responses:
        gsm8k.compute_score(response, "42", method)
    assert time.process_time() - start < 1.0
