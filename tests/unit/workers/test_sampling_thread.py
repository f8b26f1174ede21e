"""A thread that decodes beside calls: they take turns, errors arrive, nothing of the process changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from paceline.rollout import Completion, Request, SamplingParams
from paceline.rollout.native import NativeRollout
from paceline.rollout.rollout_interface import RequestId
from paceline.workers.sampling_thread import SamplingThread, Turns
from tests.tiny import build_tiny_model

SAMPLING = SamplingParams(24, ignore_eos=True)
REQUESTS = [Request(number, [5 + number, 6, 7], SAMPLING, seed=number) for number in range(6)]


class NotedRollout(NativeRollout):
    """Takes note of its steps, and of what a step must never see."""

    def __init__(self) -> None:
        super().__init__(build_tiny_model(initializer_range=0.2), {1}, 0, max_num_seqs=4)
        self.steps: list[tuple[int, int]] = []
        """Thread, and torch's threads there."""
        self.is_call_running = False
        self.fails_after: int | None = None

    def step(self) -> None:
        assert not self.is_call_running
        if len(self.steps) == self.fails_after:
            raise ValueError("no more")
        self.steps.append((threading.get_ident(), torch.get_num_threads()))
        super().step()
        assert not self.is_call_running


@pytest.fixture
def engine() -> NotedRollout:
    return NotedRollout()


@pytest.fixture
def turns() -> Turns:
    return Turns()


@pytest.fixture
def thread(engine: NotedRollout, turns: Turns) -> Iterator[SamplingThread]:
    thread = SamplingThread(engine, turns)
    yield thread
    with turns.call():
        thread.stop()
    thread.join()


@contextmanager
def call(engine: NotedRollout, turns: Turns) -> Iterator[None]:
    """What a worker has around each call."""
    with turns.call():
        engine.is_call_running = True
        yield
        engine.is_call_running = False


def wait_for(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def collect_all(thread: SamplingThread, turns: Turns, count: int) -> dict[RequestId, Completion]:
    collected: dict[RequestId, Completion] = {}

    def collect() -> bool:
        with call(thread.engine, turns):
            thread.check()
            collected.update(thread.engine.collect())
        return len(collected) == count

    wait_for(collect)
    return collected


def test_calls_and_steps_take_turns_and_the_responses_are_those_of_generate(engine, turns, thread) -> None:
    wanted = NotedRollout().generate([request.prompt_ids for request in REQUESTS], SAMPLING, list(range(6)))
    for request in REQUESTS:
        with call(engine, turns):
            engine.submit([request])
    collected = collect_all(thread, turns, 6)
    assert [collected[number].token_ids for number in range(6)] == [completion.token_ids for completion in wanted]
    assert {ident for ident, _ in engine.steps} == {thread._thread.ident} != {threading.get_ident()}
    assert {count for _, count in engine.steps} == {torch.get_num_threads()}


def test_a_call_waits_for_the_step_under_way_and_no_longer(engine, turns, thread) -> None:
    with call(engine, turns):
        engine.submit([Request("long", [5], SamplingParams(400, ignore_eos=True), seed=0)])
    for _ in range(20):
        seen = len(engine.steps)
        wait_for(lambda seen=seen: len(engine.steps) > seen)
        with call(engine, turns):
            before = len(engine.steps)
            time.sleep(0.005)
            assert len(engine.steps) == before
    assert len(engine.steps) < 400


def test_nothing_is_decoded_while_it_is_paused(engine, turns, thread) -> None:
    with call(engine, turns):
        thread.is_paused = True
        engine.submit(REQUESTS)
    time.sleep(0.02)
    assert engine.steps == []
    with call(engine, turns):
        thread.is_paused = False
    assert collect_all(thread, turns, 6).keys() == set(range(6))


def test_weights_that_come_in_a_call_are_those_of_all_further_tokens(engine, turns, thread) -> None:
    with call(engine, turns):
        engine.submit(REQUESTS[:4])
    wait_for(lambda: len(engine.steps) > 3)
    with call(engine, turns):
        engine.update_weights(build_tiny_model(initializer_range=0.2, seed=1).state_dict().items(), version=7)
    for completion in collect_all(thread, turns, 4).values():
        at = completion.versions.index(7) if 7 in completion.versions else 24
        assert completion.versions == [0] * at + [7] * (24 - at)


def test_it_says_when_it_sampled_and_with_weights_of_which_version(engine, turns, thread) -> None:
    began = time.time()
    with call(engine, turns):
        engine.submit(REQUESTS[:4])
    wait_for(lambda: len(engine.steps) > 3)
    with call(engine, turns):
        engine.update_weights(build_tiny_model(initializer_range=0.2, seed=1).state_dict().items(), version=7)
    collect_all(thread, turns, 4)
    with call(engine, turns):
        spans = thread.sampled()
        assert thread.sampled() == []
    assert [version for _, _, version in spans] == sorted(version for _, _, version in spans)
    assert {version for _, _, version in spans} == {0, 7}
    ends = [began, *(end for _, end, _ in spans), time.time()]
    assert ends == sorted(ends)
    assert all(before <= start <= end for before, (start, end, _) in zip(ends, spans, strict=False))


def test_an_error_of_the_thread_is_raised_by_the_next_call(engine, turns) -> None:
    engine.fails_after = 3
    thread = SamplingThread(engine, turns)
    with call(engine, turns):
        engine.submit(REQUESTS)
    thread.join()
    assert len(engine.steps) == 3
    with call(engine, turns), pytest.raises(ValueError, match="no more"):
        thread.check()


def test_calls_without_a_pause_do_not_keep_it_from_decoding(engine, turns, thread) -> None:
    with call(engine, turns):
        engine.submit([Request("long", [5], SamplingParams(60, ignore_eos=True), seed=0)])
    num_calls = 0
    while engine.has_work:
        with call(engine, turns):
            thread.check()
            num_calls += 1
    assert len(engine.steps) == 59
    assert num_calls < 50 * 59  # how many depends on which thread the machine runs; without turns it is thousands


def test_an_inner_call_does_not_end_the_turn_of_the_outer(engine, turns, thread) -> None:
    with call(engine, turns):
        engine.submit(REQUESTS)
        with turns.call():
            pass
        time.sleep(0.02)
        assert engine.steps == []
    assert collect_all(thread, turns, 6).keys() == set(range(6))
