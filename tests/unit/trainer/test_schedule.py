"""The schedule as decisions alone, in 10,000 runs with random durations, deaths, drops and changes of the bound."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from paceline.errors import ScheduleError
from paceline.report.ledger import Account, DataPosition, ranges
from paceline.trainer.ppo.schedule import Schedule

RUNS = 10_000


def versions(max_staleness: int, steps: int, updates: set[int] | None = None) -> list[int]:
    """By which version each step is sampled, if the steps in `updates` (all) change the weights."""
    schedule = Schedule(max_staleness, steps)
    sampled = []
    for step in range(1, steps + 1):
        for due in schedule.due():
            schedule.issued(due)
        sampled.append(schedule.take())
        if updates is None or step in updates:
            schedule.updated()
    return sampled


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 5])
def test_step_t_is_sampled_by_the_weights_after_step_t_minus_1_minus_k(max_staleness: int) -> None:
    assert versions(max_staleness, 8) == [max(0, step - 1 - max_staleness) for step in range(1, 9)]


def test_steps_that_update_no_actor_make_no_version() -> None:
    """A critic that warms up for two steps, and a step that was left out."""
    assert versions(1, 6, updates={3, 4, 6}) == [0, 0, 0, 0, 1, 2]


def test_nothing_is_issued_beyond_the_last_step() -> None:
    schedule = Schedule(max_staleness=3, last_step=2)
    assert schedule.due() == [1, 2]


def test_after_a_resume_no_rollout_is_issued_again() -> None:
    schedule = Schedule(max_staleness=2, last_step=10)
    assert schedule.resume(4, 4, {5: 2, 6: 3}) == [5, 6]
    assert schedule.due() == [7]
    with pytest.raises(ScheduleError, match="a second time"):
        schedule.issued(5)


def test_after_a_resume_with_a_smaller_bound_what_would_be_too_old_is_sampled_anew() -> None:
    schedule = Schedule(max_staleness=1, last_step=10)
    assert schedule.resume(4, 4, {5: 2, 6: 4}) == [6]
    assert schedule.due() == [5]
    schedule.issued(5)
    assert schedule.take() == 4


def test_the_bound_is_an_error_when_it_is_broken() -> None:
    schedule = Schedule(max_staleness=1, last_step=10)
    for step in schedule.due():
        schedule.issued(step)
    schedule.updated()
    schedule.updated()
    with pytest.raises(ScheduleError, match=r"step 1 trains weights of version 2 on responses of version 0.*=1"):
        schedule.take()


def test_a_step_without_a_rollout_is_an_error() -> None:
    with pytest.raises(ScheduleError, match="never issued"):
        Schedule(max_staleness=0, last_step=1).take()


# --------------------------------------------------------------------------------------------------- simulated runs


class DeathError(Exception):
    pass


@dataclass
class Pool:
    """Calls in the order in which they were issued, each when what it needs is there; time is simulated."""

    free: float = 0.0
    version: int = 0

    def run(self, seconds: float, *needs: float) -> float:
        self.free = max(self.free, *needs, 0.0) + seconds
        return self.free


@dataclass
class Ahead:
    """Prompts that were drawn for a step; `end` is when its responses are there, `seen` which weights sampled them."""

    places: list[tuple[int, int]]
    end: float = 0.0
    version: int | None = None
    seen: int | None = None


@dataclass
class Saved:
    step: int
    version: int
    position: tuple[int, int]
    ahead: dict[int, Ahead]
    complete_from: float


@dataclass
class SimulatedRun:
    """What the trainer does in the order in which it does it, with a machine that may die before any of its calls."""

    dice: random.Random
    lines: list[dict[str, Any]] = field(default_factory=list)
    saved: Saved | None = None

    def __post_init__(self) -> None:
        dice = self.dice
        self.last_step = dice.randint(1, 8)
        self.batch = dice.randint(1, 3)
        self.prompts = dice.randint(self.batch, 9)
        self.save_freq = dice.randint(1, 3)
        self.is_apart = dice.random() < 0.5
        self.deaths = dice.choice([0, 0, 1, 2, 3])
        self.share_of_drops = dice.choice([0.0, 0.0, 0.4])
        self.warmup = dice.choice([0, 0, 2])
        self.calls = self.resumes = 0

    def train(self) -> None:
        while True:
            self.calls, self.dies_at = 0, self.dice.randint(1, 25) if self.deaths else 10_000
            self.k = self.dice.randint(0, 3)
            try:
                return self.session()
            except DeathError:
                self.deaths -= 1

    def call(self) -> None:
        self.calls += 1
        if self.calls == self.dies_at:
            raise DeathError

    def begin(self) -> None:
        """Start over, or go on from the checkpoint: its lines, its place in the data, what was ahead."""
        self.schedule = Schedule(self.k, self.last_step)
        self.epoch, self.place, self.ahead, done = 0, 0, {}, 0
        if self.saved is not None:
            self.resumes += 1
            done, (self.epoch, self.place) = self.saved.step, self.saved.position
            self.ahead = {step: Ahead(list(item.places)) for step, item in self.saved.ahead.items()}
            known = {step: item.version for step, item in self.saved.ahead.items() if item.version is not None}
            for step in self.schedule.resume(done, self.saved.version, known):
                self.ahead[step].version = self.ahead[step].seen = known[step]
        self.lines[:] = [line for line in self.lines if line["step"] <= done] or [
            {"step": 0, "starts": [0, 0], "prompts": self.prompts, "waiting": 0}
        ]
        self.trainer = Pool(version=self.schedule.version)
        self.rollout = Pool(version=self.schedule.version) if self.is_apart else self.trainer
        self.balance()

    def session(self) -> None:
        self.begin()
        unfinished: Saved | None = None
        previous: tuple[int, list[tuple[int, int]], bool] | None = None
        for step in range(self.schedule.step + 1, self.last_step + 1):
            for due in self.schedule.due():
                self.issue(due)
            if previous is not None:
                self.close(*previous)
            version = self.schedule.take()
            item = self.ahead.pop(step)
            assert item.version == version == item.seen, "sampled by other weights than the schedule says"
            assert 0 <= self.schedule.version - version <= self.k, "too stale"
            for _ in range(2):  # dynamic sampling draws more, and the newest weights answer
                if self.dice.random() < self.share_of_drops:
                    item.places += self.draw()
                    self.sample()
                    assert self.rollout.version == self.schedule.version
            unfinished = self.finish(unfinished, item.end)
            self.update(step, item)
            previous = (step, item.places, self.left_out)
            if step % self.save_freq == 0:
                unfinished = self.save(step)
            if step == self.last_step:
                self.close(*previous)
                self.finish(unfinished, 0.0)

    def issue(self, step: int) -> None:
        self.call()
        if step not in self.ahead:
            self.ahead[step] = Ahead(self.draw())
        item = self.ahead[step]
        item.version = self.schedule.issued(step)
        item.end, item.seen = self.sample()

    def sample(self) -> tuple[float, int]:
        return self.rollout.run(self.dice.random()), self.rollout.version

    def update(self, step: int, item: Ahead) -> None:
        self.call()
        end = self.trainer.run(self.dice.random(), item.end)
        self.left_out = self.dice.random() < self.share_of_drops / 2
        if step >= self.warmup and not self.left_out:
            self.trainer.version += 1
            self.schedule.updated()
            if self.is_apart:  # a call on the rollout's pool, which waits for the weights
                self.rollout.run(0.01, end)
                self.rollout.version = self.trainer.version

    def draw(self) -> list[tuple[int, int]]:
        if self.place == self.prompts:
            self.epoch, self.place = self.epoch + 1, 0
        drawn = [(self.epoch, place) for place in range(self.place, min(self.place + self.batch, self.prompts))]
        self.place += len(drawn)
        return drawn

    def save(self, step: int) -> Saved:
        self.call()
        ahead = {number: Ahead(list(item.places), item.end, item.version) for number, item in self.ahead.items()}
        ready = max([self.trainer.free, *(item.end for item in ahead.values())])
        return Saved(step, self.schedule.version, (self.epoch, self.place), ahead, ready)

    def finish(self, unfinished: Saved | None, now: float) -> None:
        """A checkpoint is there when its files are, those of the rollouts ahead included."""
        self.call()
        if unfinished is not None:
            assert unfinished.complete_from <= max(now, self.rollout.free, self.trainer.free)
            self.saved = unfinished

    def close(self, step: int, places: list[tuple[int, int]], left_out: bool) -> None:
        self.call()
        kept = [] if left_out else [place for place in places if self.dice.random() >= self.share_of_drops / 2]
        dropped = [place for place in places if place not in kept]
        self.lines.append({"step": step, "trained": spans(kept), "dropped": {"why": spans(dropped)}})
        self.balance()

    def balance(self) -> None:
        under_way = sum(len(item.places) for item in self.ahead.values())
        assert Account(self.lines).missing(DataPosition(self.epoch, self.place), under_way) == 0

    def places(self) -> Counter[tuple[int, int]]:
        """How often each prompt of each epoch is in the ledger."""
        found: Counter[tuple[int, int]] = Counter()
        for line in self.lines:
            for epoch, first, stop in [*line.get("trained", []), *line.get("dropped", {}).get("why", [])]:
                found.update((epoch, place) for place in range(first, stop))
        return found


def spans(places: list[tuple[int, int]]) -> list[list[int]]:
    return [list(each) for each in ranges(places)]


def test_ten_thousand_runs_keep_the_bound_balance_and_end() -> None:
    """Whatever the durations, deaths and drops: each prompt once, no rollout too stale, no rollout by other weights."""
    died = resumed = 0
    for seed in range(RUNS):
        run = SimulatedRun(random.Random(seed))
        had_deaths = run.deaths
        run.train()
        assert [line["step"] for line in run.lines] == list(range(run.last_step + 1)), seed
        run.balance()
        drawn = [(epoch, place) for epoch in range(run.epoch) for place in range(run.prompts)]
        drawn += [(run.epoch, place) for place in range(run.place)]
        assert run.places() == Counter(drawn), seed
        died += had_deaths > run.deaths
        resumed += run.resumes > 0
    assert died > RUNS / 4
    assert resumed > RUNS / 10
