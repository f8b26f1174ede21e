from __future__ import annotations

from paceline.single_controller.base import CallRecord
from paceline.trainer.ppo.sampling_records import with_sampling
from paceline.workers.request_calls import SAMPLED


def record(method: str, rank: int = 0, **tag: object) -> CallRecord:
    return CallRecord("rollout_pool", "rollout", "rollout", rank, 1, "localhost", method, 9.0, 9.1, {"step": 3, **tag})


def test_times_of_sampling_stand_for_the_calls_that_collected() -> None:
    calls = [
        record("submit_requests"),
        record("collect_finished", **{SAMPLED: [(1.0, 1.5, 0)]}),
        record("collect_finished", rank=1, **{SAMPLED: [(1.0, 2.0, 0)]}),
        record("collect_finished", **{SAMPLED: [(1.51, 1.9, 0), (1.92, 2.5, 1)]}),
        record("collect_finished", **{SAMPLED: []}),
        record("collect_finished", **{SAMPLED: [(4.0, 5.0, 1)]}),
    ]
    found = [(each.method, each.rank, each.start, each.end, each.tag) for each in with_sampling(calls)]
    old, new = {"step": 3, "version": 0}, {"step": 3, "version": 1}
    assert found == [
        ("submit_requests", 0, 9.0, 9.1, {"step": 3}),
        ("sample", 0, 1.0, 1.9, old),
        ("sample", 1, 1.0, 2.0, old),
        ("sample", 0, 1.92, 2.5, new),
        ("sample", 0, 4.0, 5.0, new),  # it had nothing to do in between
    ]
