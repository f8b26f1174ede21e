"""Which prompts are admitted, which groups train next, and which are too old: decisions alone, no Ray and no clock.

A group is the responses to one prompt, named by its draw (a batch of prompts) and its place in that. When step t
begins, the draws up to t + max_staleness are admitted, so that at most max_staleness + 1 batches are under way. Step t
takes as many groups as draw t has. In order, it takes those of draw t, and waits for the last of them. Otherwise it
takes the oldest that have ended; a group that an update makes too old is sampled again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import ScheduleError

GroupKey = tuple[int, int]
"""Draw, and place in it."""


@dataclass
class Group:
    """Responses to one prompt. No token of them is of older weights than `oldest`."""

    oldest: int
    is_finished: bool = False


class Stream:
    """The groups under way. Events come as calls, decisions go out: `due` (admit), `ready` (take or wait), `updated`
    (abort and sample again).

    >>> stream = Stream(max_staleness=1, last_step=9, in_order=False)
    >>> for draw in stream.due():
    ...     stream.admit(draw, size=1)
    >>> stream.ready()
    []
    >>> stream.finish((2, 0), started=0)
    >>> stream.take()
    [(2, 0)]
    >>> stream.updated(), stream.updated()
    ([], [(1, 0)])
    """

    def __init__(self, max_staleness: int, last_step: int, *, in_order: bool) -> None:
        self.max_staleness = max_staleness
        self.last_step = last_step
        self.in_order = in_order
        self.step = 0
        """The step that was taken last."""
        self.version = 0
        """Of the weights that all updates issued so far give."""
        self.groups: dict[GroupKey, Group] = {}
        self._sizes: dict[int, int] = {}

    def due(self) -> list[int]:
        """Draws to admit now, in this order, before the next step is taken."""
        furthest = min(self.step + 1 + self.max_staleness, self.last_step)
        return [draw for draw in range(self.step + 1, furthest + 1) if draw not in self._sizes]

    def admit(self, draw: int, size: int) -> None:
        """Prompts are submitted now, and sampled by the newest weights or later ones."""
        if draw in self._sizes or draw <= self.step:
            raise ScheduleError(f"draw {draw} is admitted a second time.")
        self._sizes[draw] = size
        self.groups |= {(draw, place): Group(self.version) for place in range(size)}

    def finish(self, key: GroupKey, started: int) -> None:
        """All responses of a group have ended; `started` is the version of the oldest token."""
        group = self.groups[key]
        if group.is_finished or not group.oldest <= started <= self.version:
            raise ScheduleError(
                f"group {key} has ended with tokens of version {started}; it was admitted at version {group.oldest}, "
                f"and the newest is {self.version}."
            )
        group.oldest, group.is_finished = started, True

    def ready(self) -> list[GroupKey]:
        """The groups that the next step takes; none if it has to wait."""
        wanted = self._sizes[self.step + 1]
        candidates = sorted(self.groups)[:wanted] if self.in_order else sorted(self.groups)
        finished = [key for key in candidates if self.groups[key].is_finished]
        return finished[:wanted] if len(finished) >= wanted else []

    def lacking(self) -> list[GroupKey]:
        """Groups under way with which the next step would be complete."""
        wanted = self._sizes[self.step + 1]
        candidates = sorted(self.groups)[:wanted] if self.in_order else sorted(self.groups)
        finished = [key for key in candidates if self.groups[key].is_finished]
        unfinished = [key for key in candidates if not self.groups[key].is_finished]
        return unfinished[: max(0, wanted - len(finished))]

    def take(self) -> list[GroupKey]:
        """The next step trains on what is ready."""
        taken = self.ready()
        if not taken:
            raise ScheduleError(f"step {self.step + 1} is to train, but its groups have not ended.")
        self.step += 1
        del self._sizes[self.step]
        for key in taken:
            self._require_fresh(key, self.groups.pop(key))
        return taken

    def _require_fresh(self, key: GroupKey, group: Group) -> None:
        """The bound: an error if a group has tokens of weights that are too old for what trains now."""
        if not 0 <= self.version - group.oldest <= self.max_staleness:
            raise ScheduleError(
                f"step {self.step} trains weights of version {self.version} on group {key}, which began with version "
                f"{group.oldest}; trainer.schedule.max_staleness={self.max_staleness}."
            )

    def updated(self) -> list[GroupKey]:
        """An actor update was issued. Gives the groups that are too old now."""
        self.version += 1
        too_old = self.version - self.max_staleness
        return [key for key, group in sorted(self.groups.items()) if group.oldest < too_old]

    def renew(self, keys: Sequence[GroupKey]) -> None:
        """These groups are sampled again from now on."""
        self.groups |= {key: Group(self.version) for key in keys}

    @property
    def unfinished(self) -> list[GroupKey]:
        return [key for key, group in sorted(self.groups.items()) if not group.is_finished]

    def resume(self, step: int, version: int, sizes: Mapping[int, int], groups: Mapping[GroupKey, int | None]) -> None:
        """Go on after `step`. `sizes` are those of the draws ahead; of each group that is left, `groups` says with
        which version it began, or None if it is to be sampled again, as is one that could be too old by its turn."""
        self.step, self.version, self._sizes = step, version, dict(sizes)
        self.groups = {key: Group(version) for key in groups}
        for key, started in groups.items():
            if started is not None and version + max(key[0] - step - 1, 0) - started <= self.max_staleness:
                self.groups[key] = Group(started, is_finished=True)
