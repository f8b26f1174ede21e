from __future__ import annotations

import math

import pytest

from paceline.errors import ConfigError, DataError, NonFiniteError, PacelineError
from paceline.rollout.sampling_requests import Completion, Request, SamplingParams, check_finite, check_requests


def test_all_that_is_wrong_with_the_sampling_is_said_together() -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(max_tokens=0, temperature=0.0, top_p=0.0, top_k=0)
    assert [problem.split()[0] for problem in caught.value.problems] == ["max_tokens", "temperature", "top_p", "top_k"]


def test_a_request_that_was_aborted_goes_on_behind_what_was_sampled() -> None:
    fresh = Request("1", [5, 6], SamplingParams(max_tokens=4), seed=1)
    again = Request("1", [5, 6], SamplingParams(max_tokens=4), seed=1, sampled=Completion([7], [-0.5], False, [3]))
    assert (fresh.context, fresh.num_sampled) == ([5, 6], 0)
    assert (again.context, again.num_sampled) == ([5, 6, 7], 1)
    assert again.prompt_ids == [5, 6]


def test_prompts_without_tokens_and_without_seeds_are_refused() -> None:
    check_requests([[1], [2, 3]], [0, 1])
    with pytest.raises(DataError, match=r"prompts \[1\] have no tokens"):
        check_requests([[1], []], [0, 1])
    with pytest.raises(PacelineError, match="one seed per prompt"):
        check_requests([[1]], [0, 1])


@pytest.mark.parametrize("log_prob", [math.nan, -math.inf])
def test_log_probs_that_are_not_finite_end_the_run(log_prob: float) -> None:
    check_finite([Completion([1], [-0.5], True)])
    with pytest.raises(NonFiniteError, match="logits that are not finite"):
        check_finite([Completion([1], [-0.5], True), Completion([1, 2], [-0.5, log_prob], True)])
