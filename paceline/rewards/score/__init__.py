"""The graders that come with paceline, a file or folder each. `rewards/by_source.py` says which source each grades.

A grader has `compute_score(solution_str, ground_truth, extra_info)` for one response and `compute_scores(solutions,
ground_truths, extra_infos)` for many; an exception in the results of many is a failure of the grader at that response.
"""

from __future__ import annotations

from typing import NotRequired, TypedDict

__all__ = ["Graded"]


class Graded(TypedDict):
    """What a grader says of a response; all of it becomes columns of `reward_extra_info`."""

    score: float
    acc: float
    """1 if the answer is right, else 0."""
    extracted: bool
    """An answer was found."""
    timeout: NotRequired[bool]
    pred: NotRequired[str]
    """The answer in its normal form, or nothing."""
    tests_passed: NotRequired[float]
