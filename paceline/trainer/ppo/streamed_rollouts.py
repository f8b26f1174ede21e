"""Steps of a streaming schedule: prompts are admitted one batch after another, and a step takes groups that have ended.

`Stream` decides; this draws prompts, submits requests, collects responses and has them graded as they come, and brings
all through a checkpoint. A checkpoint holds the groups that have ended and wait. Those under way are sampled again
after a resume.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from paceline.data.loader import PromptLoader
from paceline.protocol import DataProto, DataProtoFuture
from paceline.trainer.ppo.agent_pool import AgentPool
from paceline.trainer.ppo.conversations import numbered, rows_of_response
from paceline.trainer.ppo.request_pool import RequestPool, named_requests
from paceline.trainer.ppo.rollouts_ahead import (
    SavedRollout,
    draw_again,
    load_responses,
    responses_path,
    save_responses,
)
from paceline.trainer.ppo.run_log import WAITING
from paceline.trainer.ppo.step import Step, group_name
from paceline.trainer.ppo.stream import GroupKey, Stream

Pool = RequestPool | AgentPool
"""Who has single responses, or conversations, sampled."""
NOT_IN_BATCH = {"is_finished", "seeds"}


class StreamedRollouts:
    """Draws that have groups under way. `draw` gives the prompts of one; `on_update` is that of the configuration.

    `grade` begins to grade responses, None leaves that to the step. `phase` is around what the driver does here, for
    the timeline.
    """

    def __init__(
        self,
        stream: Stream,
        loader: PromptLoader,
        draw: Callable[[int], Step],
        pool: Callable[[], Pool],
        *,
        n: int,
        on_update: str,
        sampling: Callable[[DataProto], None],
        grade: Callable[[DataProto], DataProtoFuture] | None,
        phase: Callable[..., AbstractContextManager[None]],
    ) -> None:
        self.schedule = stream
        self._loader = loader
        self._draw = draw
        self._make_pool = pool
        self._n = n
        self._on_update = on_update
        self._set_sampling = sampling
        self._grade = grade
        self._phase = phase
        self._draws: dict[int, Step] = {}
        self._rows: dict[GroupKey, dict[int, DataProto]] = defaultdict(dict)
        """Responses that have ended, by the number of the sample."""
        self._complete: list[GroupKey] = []
        """Groups of which all responses are there, and that the schedule does not know to have ended."""
        self._grades: dict[GroupKey, DataProtoFuture] = {}
        self._attempts: Counter[GroupKey] = Counter()
        self._keys: dict[str, tuple[GroupKey, int]] = {}
        """Of the requests under way: group and number of the sample."""
        self._to_submit: list[GroupKey] = []
        self._skipped: set[int] = set()
        self._taken: dict[int, Step] = {}
        self._num_renewed = 0
        self._is_collecting = False
        """A look after the requests would then take what is waited for."""
        self._pool: Pool | None = None

    @property
    def pool(self) -> Pool:
        self._pool = self._pool or self._make_pool()
        return self._pool

    # ------------------------------------------------------------------------------------------------- the loop

    def next_step(self) -> Step:
        """The next step, when its groups have ended; before it, all prompts that may be admitted are submitted."""
        for number in self.schedule.due():
            self._draws[number] = self._draw(number)
            self.schedule.admit(number, self._size(number))
            self._to_submit += [key for key in self.schedule.unfinished if key[0] == number]
        self._submit()
        self._finish_complete()
        with self._phase(WAITING):
            while not self.schedule.ready():
                self._collect()
        step = self._step(self.schedule.take())
        self._taken[step.number] = step
        return step

    def closed(self, step: Step) -> None:
        """The step has trained, and the ledger says so."""
        del self._taken[step.number]

    def before_new_weights(self) -> None:
        """With on_update=finish, no response goes on with other weights than those that it began with."""
        if self._on_update == "finish" and self.schedule.unfinished:
            with self._phase(WAITING):
                while self.schedule.unfinished:
                    self._collect()

    def new_weights(self) -> None:
        """They were issued: groups that are too old, or that restart, are sampled anew by them."""
        self._finish_complete()
        too_old = self.schedule.updated()
        self._finish_complete()
        self._num_renewed += len(too_old)
        restarting = self.schedule.unfinished if self._on_update == "restart" else []
        renewed = sorted({*too_old, *restarting})
        under_way = [name for name, (key, _) in self._keys.items() if key in renewed]
        if under_way:
            self.pool.abort(under_way)
        for name in under_way:
            del self._keys[name]
        for key in renewed:
            self._rows.pop(key, None)
            self._grades.pop(key, None)
            self._attempts[key] += 1
        self.schedule.renew(renewed)
        self._to_submit += [key for key in renewed if key not in self._to_submit]
        self._submit()

    # ------------------------------------------------------------------------------------------------ requests

    def _submit(self) -> None:
        keys, self._to_submit = self._to_submit, []
        groups = []
        for key in keys:
            requests = self._of_group(self._draws[key[0]].requests, key)
            if self.pool.reads_labels:
                requests = requests.select()
                requests.non_tensor_batch |= self._of_group(self._draws[key[0]].labels, key).non_tensor_batch
            names = [f"{key[0]}-{key[1]}-{sample}-{self._attempts[key]}" for sample in range(self._n)]
            self._keys |= {name: (key, sample) for sample, name in enumerate(names)}
            groups.append(named_requests(requests, names))
            self._set_sampling(groups[-1])
        if groups:
            with self._phase("admit", prompts=len(groups), version=self.schedule.version):
                self.pool.submit(groups)

    def _collect(self) -> None:
        """Wait for responses; groups that are complete then have ended."""
        wanted = self._n * len(self.schedule.unfinished) if self._on_update == "finish" else self._num_wanted()
        self._take_in(lambda: self.pool.collect(wanted))

    def look_after(self) -> None:
        """While the driver waits for something else: have graded what has ended, and no worker idle while others have
        requests that wait."""
        if self._keys and self.pool.is_beside and not self._is_collecting:
            self._take_in(lambda: self.pool.poll(0))

    def _take_in(self, ask: Callable[[], Sequence[DataProto]]) -> None:
        self._is_collecting = True
        try:
            rows = ask()
        finally:
            self._is_collecting = False
        complete = []
        for row in rows:
            key, sample = self._keys.pop(row.non_tensor_batch.pop("request_id")[0])
            columns = set(row.batch.keys()) - NOT_IN_BATCH
            self._rows[key][sample] = row.select(batch_keys=sorted(columns), meta_info_keys=[])
            if len(self._rows[key]) == self._n:
                complete.append(key)
        self._complete += complete
        self._begin_grading(complete)
        self._finish_complete()

    def _finish_complete(self) -> None:
        """Those whose weights the schedule knows of; an update may have been issued that it is about to hear of."""
        waiting, self._complete = self._complete, []
        for key in waiting:
            oldest = min(_oldest(part, self.schedule.version) for part in self._rows[key].values())
            if oldest <= self.schedule.version:
                self.schedule.finish(key, oldest)
            else:
                self._complete.append(key)

    def _begin_grading(self, keys: Sequence[GroupKey]) -> None:
        """In one call, whose answer is shared out among the groups."""
        if self._grade is None or not keys:
            return
        answer = self._grade(self._labels(keys).union(self._responses(keys)))
        graded = answer.then(lambda result: result)  # fetched once, however many groups ask for it
        for number, key in enumerate(keys):
            self._grades[key] = graded.then(partial(_rows_of_group, number=number, n=self._n))

    def _num_wanted(self) -> int:
        """Responses that the next step lacks."""
        return sum(self._n - len(self._rows.get(key, ())) for key in self.schedule.lacking()) or self._n

    # --------------------------------------------------------------------------------------------------- steps

    def _size(self, number: int) -> int:
        return len(self._draws[number].requests) // self._n

    def _labels(self, keys: Sequence[GroupKey]) -> DataProto:
        return DataProto.concat([self._of_group(self._draws[key[0]].labels, key) for key in keys])

    def _responses(self, keys: Sequence[GroupKey]) -> DataProto:
        return numbered([self._rows[key][sample] for key in keys for sample in range(self._n)])

    def _of_group(self, data: DataProto, key: GroupKey) -> DataProto:
        return data[key[1] * self._n : (key[1] + 1) * self._n]

    def _step(self, keys: Sequence[GroupKey]) -> Step:
        """The groups as a step, in the order in which they were drawn."""
        labels, responses = self._labels(keys), self._responses(keys)
        self._begin_grading([key for key in keys if key not in self._grades])  # a checkpoint holds no grades
        names = {key: group_name("training", *key) for key in keys}
        places = {names[key]: self._draws[key[0]].places[names[key]] for key in keys}
        skipped = []
        for draw in dict.fromkeys(draw for draw, _ in keys):
            if draw not in self._skipped:
                self._skipped.add(draw)
                skipped += self._draws[draw].skipped
        grades = [self._grades.pop(key) for key in keys if key in self._grades]
        for key in keys:
            del self._rows[key], self._attempts[key]
        number = self.schedule.step
        self._forget_draws()
        step = Step(number, DataProto(), labels, places=places, skipped=skipped)
        step.responses = DataProtoFuture.of(responses)
        step.graded = DataProtoFuture.concat(grades) if grades else None
        step.metrics["training/too_old_groups"], self._num_renewed = float(self._num_renewed), 0
        return step

    def _forget_draws(self) -> None:
        """Those of which no group is left."""
        left = {draw for draw, _ in self.schedule.groups}
        for draw in [draw for draw in self._draws if draw not in left]:
            del self._draws[draw]
            self._skipped.discard(draw)

    @property
    def num_prompts(self) -> int:
        """Drawn and not yet in the ledger, with those that the loader passed over before them."""
        taken = sum(step.num_prompts for step in self._taken.values())
        skipped = sum(
            part.size for draw, step in self._draws.items() if draw not in self._skipped for part in step.skipped
        )
        return taken + skipped + len(self.schedule.groups)

    def queue(self) -> dict[str, int]:
        """How many prompts are being sampled, and how many have ended and wait to train. Another thread may ask."""
        ended = [group.is_finished for group in list(self.schedule.groups.values())]
        return {"sampling": len(ended) - sum(ended), "ended": sum(ended)}

    # --------------------------------------------------------------------------------------------- checkpoints

    def snapshot(self) -> StreamSnapshot:
        """What a checkpoint of this moment holds."""
        self._finish_complete()
        groups = self.schedule.groups
        draws: list[SavedRollout] = []
        finished: dict[int, DataProto] = {}
        for number, drawn in sorted(self._draws.items()):
            left = [place for draw, place in sorted(groups) if draw == number]
            done = [place for place in left if groups[number, place].is_finished]
            draws.append(
                {
                    "step": number,
                    "version": None,
                    "epoch": drawn.before.epoch,
                    "position": drawn.before.place,
                    "size": self._size(number),
                    "left": left,
                    "started": {str(place): groups[number, place].oldest for place in done},
                }
            )
            rows = [self._rows[number, place][sample] for place in done for sample in range(self._n)]
            if rows:
                finished[number] = numbered(rows)
        return StreamSnapshot(draws, finished)

    def load(self, saved: Sequence[SavedRollout], folder: Path, *, step: int, version: int) -> None:
        """Go on after `step`, with the groups that a checkpoint has. One of another schedule has none that can be used
        here: its prompts are sampled anew."""
        groups: dict[GroupKey, int | None] = {}
        for item in saved:
            number = item["step"]
            self._draws[number] = draw_again(item, self._loader, self._draw)
            left = item.get("left", list(range(self._size(number))))
            started = item.get("started", {})
            groups |= {(number, place): started.get(str(place)) for place in left}
            if len(left) < self._size(number):
                self._skipped.add(number)
            if started:
                self._load_rows(number, sorted(map(int, started)), folder)
        self.schedule.resume(
            step, version, {number: self._size(number) for number in self._draws if number > step}, groups
        )
        self._to_submit = self.schedule.unfinished
        for key in self._to_submit:
            self._rows.pop(key, None)

    def _load_rows(self, number: int, places: Sequence[int], folder: Path) -> None:
        """The responses of groups that have ended."""
        requests = DataProto.concat([self._of_group(self._draws[number].requests, (number, place)) for place in places])
        responses = load_responses(responses_path(folder, number), requests)
        for index, place in enumerate(places):
            first = index * self._n
            self._rows[number, place] = {
                sample: rows_of_response(responses, first + sample) for sample in range(self._n)
            }


class StreamSnapshot:
    """The groups under way as a checkpoint holds them: `state` beside its other numbers, and the files of `write`."""

    def __init__(self, state: list[SavedRollout], finished: dict[int, DataProto]) -> None:
        self.state = state
        self._finished = finished

    def write(self, folder: Path) -> None:
        for number, responses in self._finished.items():
            save_responses(responses, responses_path(folder, number))


def _rows_of_group(graded: DataProto, *, number: int, n: int) -> DataProto:
    return graded[number * n : (number + 1) * n]


def _oldest(response: DataProto, newest: int) -> int:
    """The version of the oldest token of a response; of a conversation that broke, and has none, the newest one."""
    versions = response.batch["policy_versions"][response.batch["response_mask"].bool()]
    return int(versions.min()) if len(versions) else newest
