"""The HellaSwag scorer: which choice a response makes, if any."""

from __future__ import annotations

import time

import pytest

from paceline.errors import UnknownDataSourceError
from paceline.rewards.by_source import _select_rm_score_fn, get_scorer
from paceline.rewards.score.hellaswag import compute_score, compute_scores, extract_letter

ENDINGS = [
    "A man wraps a pair of skis.",
    "is ripping level tiles off.",
    "is ripping level tiles off. He stops.",
    "starts pulling up roofing, on a roof!",
]
EXTRA = {"split": "validation", "index": 0, "endings": ENDINGS}


@pytest.mark.parametrize(
    "response",
    [
        "B",
        " b\n",
        "(B)",
        "[B].",
        "B.",
        "**B**",
        "B) is ripping level tiles off.",
        "B. is ripping level tiles off.",
        "Answer: B",
        "answer: b.",
        "**Answer:** B",
        "**Answer: B**",
        "Answer: (B) because he is on a roof",
        "Answer: B is ripping level tiles off",
        "Answer: option B",
        "Answer = B",
        "Answer:\nB",
        "The answer is B, since he works there.",
        "The correct answer would be “B”.",
        "A man is on a roof. C and D are odd.\nAnswer: B",
        "Answer: A. No, wait.\nAnswer: B",
        "Answer: B\nThat is all. A roof is flat.",
        r"So \boxed{B}.",
        r"So \boxed{\text{(B)}}.",
        r"\boxed{A}, no: \boxed{\mathrm{B}}",
        "He works on the roof.\n\nB",
        "He works on the roof.\n\n(b)",
        "Of these, (A) is odd and (B) fits best here",
        "I would go with option B here",
        "is ripping level tiles off.",
        "Is ripping  level tiles off",
        "Answer: is ripping level tiles off.",
        r"\boxed{is ripping level tiles off}",
        "I think that he is ripping level tiles off, as one does.",
    ],
)
def test_the_choice_is_found(response):
    assert extract_letter(response, ENDINGS) == "B"
    assert compute_score(response, "B", EXTRA) == 1.0
    assert compute_score(response, "A", EXTRA) == 0.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "   \n ",
        "A man is on a roof.",
        "E",
        "Answer:",
        "The answer is unclear.",
        "Bananas",
        "A man wraps a pair of skis, or he starts pulling up roofing, on a roof!",
        "I can't say: B2B, C-3, D'oh",
    ],
)
def test_what_is_no_choice_is_not_read_as_one(response):
    assert extract_letter(response, ENDINGS) is None


def test_an_ending_that_starts_with_a_is_read_as_text_and_not_as_the_letter():
    swapped = [ENDINGS[1], ENDINGS[0], *ENDINGS[2:]]
    assert extract_letter("Answer: A man wraps a pair of skis.", swapped) == "B"
    assert extract_letter("A man wraps a pair of skis.", swapped) == "B"


def test_an_ending_that_contains_another_is_the_one_that_is_meant():
    assert extract_letter("So he is ripping level tiles off. He stops. Then he goes home.", ENDINGS) == "C"


def test_letters_are_read_without_the_endings_and_texts_are_not():
    assert compute_score("Answer: B", "B") == 1.0
    assert compute_score(ENDINGS[1], "B") == 0.0


@pytest.mark.parametrize("ground_truth", ["D", "d", 3, "3", ENDINGS[3], "starts pulling up roofing, on a roof"])
def test_the_ground_truth_may_be_letter_number_or_text(ground_truth):
    assert compute_score("Answer: D", ground_truth, EXTRA) == 1.0
    assert compute_score("Answer: A", ground_truth, EXTRA) == 0.0


@pytest.mark.parametrize(
    ("ground_truth", "extra_info"), [("E", EXTRA), ("", EXTRA), ("ABCD", None), ("7", None), ("A", {"endings": ["x"]})]
)
def test_a_ground_truth_that_is_none_is_an_error_and_no_score(ground_truth, extra_info):
    with pytest.raises(ValueError, match="HellaSwag"):
        compute_score("Answer: A", ground_truth, extra_info)
    [first, second] = compute_scores(["Answer: A", "Answer: A"], [ground_truth, "A"], [extra_info, EXTRA])
    assert isinstance(first, ValueError)
    assert second == {"score": 1.0, "acc": 1.0, "extracted": True, "pred": "A"}


def test_many_responses_tell_wrong_from_not_found():
    results = compute_scores(["Answer: B", "Answer: C", "Hm."], ["B", "B", "B"], [EXTRA, None, EXTRA])
    assert results == [
        {"score": 1.0, "acc": 1.0, "extracted": True, "pred": "B"},
        {"score": 0.0, "acc": 0.0, "extracted": True, "pred": "C"},
        {"score": 0.0, "acc": 0.0, "extracted": False, "pred": ""},
    ]


@pytest.mark.parametrize("piece", ["answer ", "answer: is ", "!", " ", "\n", "(", "*", "(A) is ripping ", "\\boxed{"])
def test_long_nonsense_is_read_in_no_time(piece):
    start = time.process_time()
    compute_score(piece * 20_000 + "x", "B", EXTRA)
    assert time.process_time() - start < 1.0


def test_the_source_is_known_under_its_name():
    assert _select_rm_score_fn("Rowan/hellaswag") is compute_score
    assert get_scorer("Rowan/hellaswag").many is compute_scores


def test_a_source_for_a_reward_model_says_so():
    with pytest.raises(UnknownDataSourceError, match=r"a reward model scores it\. Set reward_model\.enable=True"):
        get_scorer("Dahoas/full-hh-rlhf")
