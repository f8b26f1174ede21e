"""Streaming as decisions alone, in 10,000 runs with random durations, drops, restarts and deaths."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from paceline.errors import ScheduleError
from paceline.report.ledger import Account, DataPosition, ranges
from paceline.trainer.ppo.stream import GroupKey, Stream

RUNS = 10_000


def admitted(max_staleness: int = 1, size: int = 2, *, in_order: bool = False) -> Stream:
    stream = Stream(max_staleness, last_step=9, in_order=in_order)
    for draw in stream.due():
        stream.admit(draw, size)
    return stream


def test_at_most_so_many_batches_are_under_way() -> None:
    stream = admitted(max_staleness=2)
    assert len(stream.groups) == 6
    assert stream.due() == []
    for place in (0, 1):
        stream.finish((3, place), started=0)
    assert stream.take() == [(3, 0), (3, 1)]
    assert stream.due() == [4]


def test_a_step_takes_the_oldest_that_have_ended_or_waits_for_its_own() -> None:
    for in_order, ready in ((False, [(1, 1), (2, 0)]), (True, [])):
        stream = admitted(in_order=in_order)
        for key in ((2, 1), (2, 0), (1, 1)):
            stream.finish(key, started=0)
        assert stream.ready() == ready
        assert stream.lacking() == ([(1, 0)] if in_order else [])
        stream.finish((1, 0), started=0)
        assert stream.take() == [(1, 0), (1, 1)]


def test_a_group_that_an_update_makes_too_old_is_named_and_sampled_anew() -> None:
    stream = admitted(max_staleness=1)
    for key in ((2, 0), (2, 1)):
        stream.finish(key, started=0)
    stream.take()
    assert stream.updated() == []
    assert stream.updated() == [(1, 0), (1, 1)]
    stream.renew([(1, 0), (1, 1)])
    assert stream.updated() == []


def test_the_bound_is_an_error_when_it_is_broken() -> None:
    stream = admitted(max_staleness=1)
    for place in (0, 1):
        stream.finish((1, place), started=0)
    stream.updated()
    stream.updated()
    with pytest.raises(ScheduleError, match=r"version 2 on group \(1, 0\), which began with version 0"):
        stream.take()


@pytest.mark.parametrize("started", [-1, 1])
def test_a_version_that_a_group_can_not_have_is_an_error(started: int) -> None:
    with pytest.raises(ScheduleError, match=f"tokens of version {started}"):
        admitted().finish((1, 0), started)


def test_what_could_be_too_old_after_a_resume_is_sampled_anew() -> None:
    stream = Stream(max_staleness=1, last_step=9, in_order=True)
    stream.resume(4, 4, {5: 1, 6: 1}, {(5, 0): 3, (6, 0): 3})
    assert stream.unfinished == [(6, 0)]
    assert stream.due() == []


# --------------------------------------------------------------------------------------------------- simulated runs


class DeathError(Exception):
    pass


class SimulatedStream:
    """The driver and its workers in simulated time: each response takes as long as chance says."""

    def __init__(self, seed: int) -> None:
        dice = self.dice = random.Random(seed)
        self.k, self.last_step = dice.randint(0, 3), dice.randint(1, 7)
        self.batch = dice.randint(1, 3)
        self.prompts = dice.randint(self.batch, 9)
        self.in_order = dice.random() < 0.5
        self.on_update = dice.choice(["continue", "restart", "finish"])
        self.deaths = dice.choice([0, 1, 2])
        self.skips = dice.choice([0.0, 0.3])
        self.saved: dict[str, Any] | None = None
        self.lines: list[dict[str, Any]] = []
        self.renewed = self.died = 0

    def train(self) -> None:
        while True:
            self.dies_at = self.dice.randint(1, 12) if self.deaths else 10**9
            try:
                return self.session()
            except DeathError:
                self.deaths -= 1
                self.died += 1
                self.k = self.dice.choice([self.k, self.dice.randint(0, 3)])

    def session(self) -> None:
        self.now, self.epoch, self.place = 0.0, 0, 0
        self.stream = Stream(self.k, self.last_step, in_order=self.in_order)
        self.places: dict[GroupKey, tuple[int, int]] = {}
        done = 0
        if self.saved is not None:
            done, self.epoch, self.place = self.saved["step"], self.saved["epoch"], self.saved["place"]
            self.places = dict(self.saved["places"])
            self.stream.resume(done, self.saved["version"], self.saved["sizes"], self.saved["groups"])
        self.lines[:] = [line for line in self.lines if line["step"] <= done] or [
            {"step": 0, "starts": [0, 0], "prompts": self.prompts, "waiting": 0}
        ]
        self.running: dict[GroupKey, tuple[float, int]] = {}
        self.begin(self.stream.unfinished)
        for step in range(done + 1, self.last_step + 1):
            for draw in self.stream.due():
                self.admit(draw)
            while not self.stream.ready():
                self.wait()
            version = self.stream.version
            oldest = {key: group.oldest for key, group in self.stream.groups.items()}
            taken = self.stream.take()
            assert all(version - oldest[key] <= self.k for key in taken)
            self.now += self.dice.random()  # it trains, and the workers go on
            self.update()
            self.lines.append(
                {"step": step, "trained": [list(each) for each in ranges(self.places.pop(key) for key in taken)]}
            )
            self.balance()
            if self.dice.random() < 0.5:
                self.save(step)

    def admit(self, draw: int) -> None:
        if self.place == self.prompts:
            self.epoch, self.place = self.epoch + 1, 0
        drawn = [(self.epoch, place) for place in range(self.place, min(self.place + self.batch, self.prompts))]
        self.place += len(drawn)
        self.stream.admit(draw, len(drawn))
        self.places |= {(draw, index): place for index, place in enumerate(drawn)}
        self.begin([(draw, index) for index in range(len(drawn))])

    def begin(self, keys: list[GroupKey]) -> None:
        for key in keys:
            self.running[key] = (self.now + self.dice.expovariate(1.0), self.stream.version)

    def wait(self) -> None:
        """The next event; without one the run would wait for ever."""
        self.dies_at -= 1
        if self.dies_at == 0:
            raise DeathError
        assert self.running, "deadlock"
        key = min(self.running, key=lambda name: self.running[name])
        end, version = self.running.pop(key)
        self.now = max(self.now, end)
        self.stream.finish(key, version)

    def update(self) -> None:
        while self.on_update == "finish" and self.stream.unfinished:
            self.wait()
        if self.dice.random() < self.skips:
            return
        too_old = self.stream.updated()
        # But after a resume with a smaller bound, which had more admitted than it may.
        assert not (self.in_order and too_old) or self.died, "in order nothing is dropped"
        again = sorted({*too_old, *(self.stream.unfinished if self.on_update == "restart" else ())})
        self.renewed += len(too_old)
        for key in again:
            self.running.pop(key, None)
        self.stream.renew(again)
        self.begin(again)

    def save(self, step: int) -> None:
        groups = {key: group.oldest if group.is_finished else None for key, group in self.stream.groups.items()}
        sizes = dict(self.stream._sizes)
        state = {"step": step, "epoch": self.epoch, "place": self.place, "version": self.stream.version}
        self.saved = {**state, "places": dict(self.places), "groups": groups, "sizes": sizes}

    def balance(self) -> None:
        missing = Account(self.lines).missing(DataPosition(self.epoch, self.place), len(self.stream.groups))
        assert missing == 0


def test_ten_thousand_runs_keep_the_bound_balance_and_end() -> None:
    dropped = died = 0
    for seed in range(RUNS):
        run = SimulatedStream(seed)
        run.train()
        assert [line["step"] for line in run.lines] == list(range(run.last_step + 1)), seed
        run.balance()
        found = Counter(
            (epoch, place)
            for line in run.lines
            for epoch, first, stop in line.get("trained", ())
            for place in range(first, stop)
        )
        assert set(found.values()) == {1}, seed
        assert len(found) == run.epoch * run.prompts + run.place - len(run.stream.groups)
        dropped += run.renewed > 0
        died += run.died > 0
    assert dropped > RUNS / 50
    assert died > RUNS / 4
