"""Which rollout is issued when, and which weights sample it: decisions alone, with no Ray and no clock in them.

The policy's version is the number of steps whose actor update its weights contain. With `max_staleness` k, the rollout
of step t is issued when step t-k begins: after the update of step t-1-k was issued, and before that of step t-k. Calls
on one pool run in their order, so the weights that sample follow from the order of calls and from nothing else.

    max_staleness=1
    step       1            2          3          4
    issued     1 2          3          4          5
    sampled by 0 0          1          2          3
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.errors import ScheduleError


class Schedule:
    """The rollouts of a run. Events come as calls (`issued`, `updated`, `resume`), decisions go out (`due`, `take`).

    >>> schedule = Schedule(max_staleness=1, last_step=4)
    >>> schedule.due()
    [1, 2]
    >>> [schedule.issued(step) for step in schedule.due()], schedule.take()
    ([0, 0], 0)
    >>> schedule.updated()
    >>> schedule.due()
    [3]
    """

    def __init__(self, max_staleness: int, last_step: int) -> None:
        self.max_staleness = max_staleness
        self.last_step = last_step
        self.step = 0
        """The step that was taken last."""
        self.version = 0
        """Of the weights that all updates issued so far give."""
        self._sampled_by: dict[int, int] = {}

    def due(self) -> list[int]:
        """Steps whose rollouts are to be issued now, in this order, before the next step is taken."""
        furthest = min(self.step + 1 + self.max_staleness, self.last_step)
        return [step for step in range(self.step + 1, furthest + 1) if step not in self._sampled_by]

    def issued(self, step: int) -> int:
        """The rollout of a step is issued now; gives the version of the weights that sample it."""
        if step in self._sampled_by or step <= self.step:
            raise ScheduleError(f"the rollout of step {step} is issued a second time.")
        self._sampled_by[step] = self.version
        return self.version

    def take(self) -> int:
        """The next step trains now; gives the version that sampled its responses, which is never too old."""
        self.step += 1
        if self.step not in self._sampled_by:
            raise ScheduleError(f"step {self.step} is to train, but its rollout was never issued.")
        sampled_by = self._sampled_by.pop(self.step)
        self.require_fresh(sampled_by)
        return sampled_by

    def require_fresh(self, sampled_by: int) -> None:
        """The bound: an error if these weights are too old for what trains now."""
        staleness = self.version - sampled_by
        if not 0 <= staleness <= self.max_staleness:
            raise ScheduleError(
                f"step {self.step} trains weights of version {self.version} on responses of version {sampled_by}; "
                f"trainer.schedule.max_staleness={self.max_staleness}."
            )

    def updated(self) -> None:
        """An actor update was issued: what is issued from now on sees its weights."""
        self.version += 1

    def resume(self, step: int, version: int, sampled_by: Mapping[int, int]) -> list[int]:
        """Go on after `step`. `sampled_by` says of later steps which version sampled the responses that are there.

        Gives those of them that may train; the others might be too old by their turn, as max_staleness may be smaller
        than before, and are sampled again.
        """
        self.step, self.version = step, version
        newest = {later: version + later - step - 1 for later in sampled_by}
        self._sampled_by = {
            later: sampled
            for later, sampled in sampled_by.items()
            if step < later <= self.last_step and newest[later] - sampled <= self.max_staleness
        }
        return sorted(self._sampled_by)
