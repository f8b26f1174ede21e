"""The four forms of a reward function: for one response or a batch, plain or async."""

from __future__ import annotations

import asyncio
import functools
import inspect
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.rewards import RewardManager
from paceline.rewards.scorer import RewardFunction, Row
from tests.unit.rewards.reward_batches import TOKENIZER, make_batch


def item(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(solution_str == ground_truth), "seen": f"{data_source} {extra_info}"}


def batch(data_sources, solution_strs, ground_truths, extra_infos):
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return [item(*row) for row in rows]


async def async_item(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    return item(data_source, solution_str, ground_truth, extra_info)


async def async_batch(data_sources, solution_strs, ground_truths, extra_infos):
    await asyncio.sleep(0)
    return batch(data_sources, solution_strs, ground_truths, extra_infos)


class CallableObject:
    async def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return await async_item(data_source, solution_str, ground_truth, extra_info)


@functools.wraps(async_item)
def wrapped(*args, **kwargs):
    return async_item(*args, **kwargs)


@pytest.mark.parametrize(
    "fn", [item, batch, async_item, async_batch, CallableObject(), functools.partial(async_item), wrapped]
)
def test_every_form_gives_the_same_scores(fn):
    data = make_batch(["a", "b", "", "c"], ["a", "x", "", "c"], ["s", "t", "s", "s"], extra_info=[1, 2, 3, 4])
    result = RewardManager(TOKENIZER, 0, compute_score=fn)(data, return_dict=True)
    assert result["reward_tensor"].sum(-1).tolist() == [1.0, 0.0, 0.0, 1.0]
    assert result["reward_extra_info"]["seen"].tolist() == [
        "s 1",
        "t 2",
        None,
        "s 4",
    ]  # an empty response is not graded


@pytest.mark.parametrize("fn", [item, batch, async_item, async_batch])
def test_a_batch_of_empty_responses_calls_no_function(fn):
    assert RewardManager(TOKENIZER, 0, compute_score=fn)(make_batch(["", ""], ["", ""])).sum() == 0


def test_async_calls_of_a_batch_run_at_the_same_time():
    running = 0
    most = 0

    async def slow(data_source, solution_str, ground_truth, extra_info):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return 1.0

    RewardManager(TOKENIZER, 0, compute_score=slow)(make_batch(["a"] * 8, [""] * 8))
    assert most == 8


def test_what_belongs_to_an_event_loop_lives_from_batch_to_batch():
    loops = []

    async def spy(data_source, solution_str, ground_truth, extra_info):
        loops.append(asyncio.get_running_loop())
        return 1.0

    manager = RewardManager(TOKENIZER, 0, compute_score=spy)
    manager(make_batch(["a"], [""]))
    manager(make_batch(["a"], [""]))
    assert loops[0] is loops[1]
    assert not loops[0].is_closed()


def test_it_works_inside_a_running_event_loop():
    async def caller():
        return RewardManager(TOKENIZER, 0, compute_score=async_item)(make_batch(["a"], ["a"]))

    assert asyncio.run(caller()).sum() == 1


def test_one_failed_async_call_does_not_touch_the_others():
    async def picky(data_source, solution_str, ground_truth, extra_info):
        if solution_str == "bad":
            raise ConnectionError("service is down")
        if solution_str == "gone":
            raise asyncio.CancelledError
        return 1.0

    data = make_batch(["ok", "bad", "gone"], [""] * 3)
    info = RewardManager(TOKENIZER, 0, compute_score=picky)(data, return_dict=True)["reward_extra_info"]
    assert info["score"].tolist() == [1.0, 0.0, 0.0]
    assert info["grader_error"].tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ([1.0], "gave 1 results for 2 responses"),
        ([1.0, 2.0, 3.0], "gave 3 results for 2 responses"),
        (0.5, "returned float, not a list of 2 results"),
        ({"score": 1.0, "acc": 1.0}, "returned dict, not a list"),
        ("ab", "returned str, not a list"),
        (None, "returned NoneType, not a list"),
    ],
)
def test_a_batch_function_has_to_give_one_result_per_response(result, problem):
    def wrong(data_sources, solution_strs, ground_truths, extra_infos):
        return result

    results = RewardFunction(wrong).grade([Row("s", "a", "", None), Row("s", "b", "", None)])
    assert all(isinstance(item, Exception) and problem in str(item) for item in results)


def test_arrays_are_lists_of_results():
    import numpy as np

    def as_array(data_sources, solution_strs, ground_truths, extra_infos):
        return np.array([0.25, 0.5])

    assert RewardManager(TOKENIZER, 0, compute_score=as_array)(make_batch(["a", "b"], ["", ""])).sum() == 0.75


def test_further_arguments_are_given_to_every_call():
    def scaled(data_source, solution_str, ground_truth, extra_info, scale, bonus=0.0):
        return scale + bonus

    def scaled_batch(data_sources, solution_strs, ground_truths, extra_infos, scale):
        return [scale] * len(solution_strs)

    rows = [Row("s", "a", "", None)] * 2
    assert RewardFunction(scaled, {"scale": 2.0, "bonus": 1.0}).grade(rows) == [3.0, 3.0]
    assert RewardFunction(scaled_batch, {"scale": 2.0}).grade(rows) == [2.0, 2.0]


def one(data_source, solution_str, ground_truth, extra_info): ...
def many(data_sources, solution_strs, ground_truths, extra_infos): ...
def anything(**kwargs): ...
def some(solution_str, **kwargs): ...
def some_of_many(solution_strs, **kwargs): ...


@pytest.mark.parametrize(
    ("fn", "is_batch"), [(one, False), (many, True), (anything, False), (some, False), (some_of_many, True)]
)
def test_the_signature_says_which_form_it_is(fn, is_batch):
    assert RewardFunction(fn).is_batch is is_batch


@pytest.mark.parametrize(
    ("fn", "kwargs", "problem"),
    [
        (lambda solution_str, ground_truth: 1.0, {}, "unexpected keyword argument 'data_source'"),
        (
            lambda data_source, solution_str, ground_truth, extra_info, bonus: 1.0,
            {},
            "missing a required argument: 'bonus'",
        ),
        (one, {"bonus": 1}, "unexpected keyword argument 'bonus'"),
        (many, {"bonus": 1}, "unexpected keyword argument 'bonus'"),
    ],
)
def test_a_function_of_no_form_is_refused_with_both_shown(fn, kwargs: dict[str, Any], problem: str):
    with pytest.raises(ConfigError, match=problem) as error:
        RewardFunction(fn, kwargs)
    names = "".join(f", {name}" for name in kwargs)
    assert f"(data_source, solution_str, ground_truth, extra_info{names}) for one response" in str(error.value)
    assert f"(data_sources, solution_strs, ground_truths, extra_infos{names}) for a batch" in str(error.value)
    assert str(inspect.signature(fn)) in str(error.value)


def test_what_has_no_signature_or_is_no_function_is_refused():
    with pytest.raises(ConfigError, match="Wrap it in a function"):
        RewardFunction(max)
    with pytest.raises(ConfigError, match="must be a function, not int"):
        RewardManager(TOKENIZER, 0, compute_score=3)


def test_further_arguments_may_not_hide_the_data():
    with pytest.raises(ConfigError, match=r"reward_kwargs has ground_truth, which the data gives"):
        RewardFunction(anything, {"ground_truth": "1"})
