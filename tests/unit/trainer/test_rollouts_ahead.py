"""Steps ahead of their turn: in which order they are drawn and issued, and their way through a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from paceline.data.loader import PromptLoader, make_dataloader
from paceline.errors import CheckpointError, StorageError
from paceline.protocol import DataProto, DataProtoFuture
from paceline.trainer.ppo.rollouts_ahead import RolloutsAhead
from paceline.trainer.ppo.schedule import Schedule
from paceline.trainer.ppo.step import Step, draw_prompts, make_requests
from tests.unit.trainer.test_step import Rows


class Run:
    """Rollouts that answer at once, each prompt with the version that was asked."""

    def __init__(self, max_staleness: int, steps: int = 9, prompts: int = 7) -> None:
        self.loader: PromptLoader = make_dataloader(Numbered(prompts), batch_size=2, shuffle=True, seed=1)  # type: ignore[arg-type]
        self.schedule = Schedule(max_staleness, steps)
        self.calls: list[str] = []
        self.ahead = RolloutsAhead(self.schedule, self.loader, self.draw, self.issue)

    def draw(self, number: int) -> Step:
        self.calls.append(f"draw {number}")
        rows, draw = draw_prompts(self.loader, "training")
        requests, labels = make_requests(rows, n=2, seed=1, purpose="training", step=number)
        step = Step(number, requests, labels, before=draw.before)
        step.add(draw)
        return step

    def issue(self, step: Step) -> None:
        self.calls.append(f"issue {step.number}")
        prompts = step.requests.batch["input_ids"]
        answers = DataProto.from_dict(
            tensors={"prompts": prompts, "responses": torch.full((len(prompts), 1), step.version)}
        )
        step.responses, step.greedy = DataProtoFuture.of(answers), DataProtoFuture.of(answers[::2])

    def next(self) -> Step:
        step = self.ahead.next_step()
        self.ahead.new_weights()
        self.ahead.closed(step)
        return step

    def save(self, folder: Path) -> dict:
        snapshot = self.ahead.snapshot()
        snapshot.write(folder)
        return {"rollouts": snapshot.state, "loader": self.loader.state_dict()}


class Numbered(Rows):
    def __getitem__(self, row: int) -> dict:
        return super().__getitem__(row) | {"input_ids": torch.full((3,), row)}


def resumed(state: dict, folder: Path, step: int, max_staleness: int) -> Run:
    run = Run(max_staleness)
    run.ahead.load(state["rollouts"], folder, step=step, version=step)
    run.loader.load_state_dict(state["loader"])
    return run


def trained(run: Run, steps: int) -> list[tuple[list[int], list[int], list[int]]]:
    """Prompts, and the versions in the responses and greedy responses, of the next steps."""
    found = []
    for _ in range(steps):
        step = run.next()
        answers, greedy = step.responses.get(), step.greedy.get()  # type: ignore[union-attr]
        prompts = answers.batch["prompts"][:, 0].tolist()
        assert greedy.batch["prompts"][:, 0].tolist() == prompts[::2]
        found.append((prompts, answers.batch["responses"][:, 0].tolist(), greedy.batch["responses"][:, 0].tolist()))
    return found


def test_rollouts_are_drawn_and_issued_ahead_in_order() -> None:
    run = Run(max_staleness=1)
    run.next()
    assert run.calls == ["draw 1", "issue 1", "draw 2", "issue 2"]
    run.next()
    assert run.calls[4:] == ["draw 3", "issue 3"]
    assert run.ahead.num_prompts == 2


def test_a_resumed_run_goes_on_with_the_same_prompts_and_responses(tmp_path: Path) -> None:
    whole = trained(Run(max_staleness=2), 9)
    run = Run(max_staleness=2)
    before = trained(run, 4)
    again = resumed(run.save(tmp_path), tmp_path, 4, max_staleness=2)
    assert [*before, *trained(again, 5)] == whole
    assert [call for call in again.calls if call.startswith("issue")] == ["issue 7", "issue 8", "issue 9"]
    assert again.ahead.num_prompts == 0


def test_a_smaller_bound_samples_the_same_prompts_anew(tmp_path: Path) -> None:
    run = Run(max_staleness=3)
    trained(run, 4)
    state = run.save(tmp_path)
    expected = [prompts for prompts, *_ in trained(run, 5)]
    again = resumed(state, tmp_path, 4, max_staleness=1)
    assert again.ahead.num_prompts == 6
    first = trained(again, 1)
    # Of steps 6 and 7, the one is issued again and the other waits for its turn: both survive another checkpoint.
    twice = resumed(again.save(tmp_path / "later"), tmp_path / "later", 5, max_staleness=1)
    rest = trained(twice, 4)
    assert [prompts for prompts, *_ in [*first, *rest]] == expected
    assert [versions[0] for _, versions, _ in [*first, *rest]] == [4, 4, 5, 6, 7]


def test_a_disk_that_refuses_responses_is_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: No space left on device (os error 28)")

    run = Run(max_staleness=1)
    run.next()
    monkeypatch.setattr("paceline.protocol.disk.save_file", refuse)
    with pytest.raises(StorageError, match="can't be written: Error while serializing"):
        run.save(tmp_path)


def test_responses_to_other_prompts_and_lost_ones_are_refused(tmp_path: Path) -> None:
    run = Run(max_staleness=1)
    run.next()
    state = run.save(tmp_path)
    state["rollouts"][0]["position"] = 0
    with pytest.raises(CheckpointError, match="other prompts"):
        resumed(state, tmp_path, 1, max_staleness=1)
    (tmp_path / "step_2.responses.safetensors").unlink()
    with pytest.raises(CheckpointError, match="can't be read"):
        resumed(state, tmp_path, 1, max_staleness=1)


def test_a_batch_that_streaming_has_begun_goes_on_in_streaming(tmp_path: Path) -> None:
    part = {"step": 2, "version": None, "epoch": 0, "position": 2, "size": 2, "left": [1]}
    with pytest.raises(CheckpointError, match=r"batch 2 some have trained.*name=streaming"):
        resumed({"rollouts": [part], "loader": {}}, tmp_path, 1, max_staleness=0)
