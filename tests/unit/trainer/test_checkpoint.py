"""Checkpoints are complete or absent."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline import files
from paceline.errors import CheckpointError
from paceline.trainer.ppo import checkpoint
from paceline.trainer.ppo.checkpoint import (
    begin_checkpoint,
    complete_checkpoint,
    latest_checkpoint,
    prune_checkpoints,
    read_state,
    require_intact,
    rewind,
    verify_checkpoint,
)


def save(checkpoints: Path, step: int, content: str = "weights", parts: tuple[str, ...] = ("actor", "critic")) -> None:
    folder = begin_checkpoint(checkpoints, step)
    for part in parts:
        (folder / part).mkdir()
        (folder / part / "model").write_text(content)
        (folder / part / "rng").write_text("state")
    complete_checkpoint(folder, {"global_step": step})


def step_folder(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"global_step_{step}"


def names(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir() if path.is_dir())


def parts_of(checkpoints: Path) -> dict[int, str]:
    """Step to the first letters of the parts that its checkpoint has, and * if it can be resumed from."""
    return {
        int(folder.name.removeprefix("global_step_")): "".join(
            letter
            for letter, entry in (("a", "actor"), ("c", "critic"), ("*", "trainer.json"))
            if (folder / entry).exists()
        )
        for folder in checkpoints.glob("global_step_*")
    }


# ------------------------------------------------------------------------------------------------------- saving


def test_the_latest_complete_checkpoint_is_found_with_its_state(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "never_made") is None
    save(tmp_path, 2)
    save(tmp_path, 10)
    assert latest_checkpoint(tmp_path) == step_folder(tmp_path, 10)
    assert read_state(step_folder(tmp_path, 10)) == {"global_step": 10}
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10\n"


def test_a_checkpoint_that_is_written_behind_the_next_step_counts_when_it_is_complete(tmp_path: Path) -> None:
    save(tmp_path, 2)
    temporary = begin_checkpoint(tmp_path, 3)
    (temporary / "actor").mkdir()
    assert latest_checkpoint(tmp_path) == step_folder(tmp_path, 2)
    assert complete_checkpoint(temporary, {"global_step": 3}) == step_folder(tmp_path, 3)
    assert latest_checkpoint(tmp_path) == step_folder(tmp_path, 3)


def test_a_save_that_is_given_up_leaves_the_checkpoint_before_it_in_force(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (begin_checkpoint(tmp_path, 3) / "half").write_text("x")
    assert latest_checkpoint(tmp_path) == step_folder(tmp_path, 2)
    assert not step_folder(tmp_path, 3).exists()
    save(tmp_path, 3)
    assert not (step_folder(tmp_path, 3) / "half").exists()


def test_saving_a_step_again_replaces_it_whole(tmp_path: Path) -> None:
    save(tmp_path, 2, "old")
    save(tmp_path, 2, "new")
    assert (step_folder(tmp_path, 2) / "actor" / "model").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_2", "latest_checkpointed_iteration.txt"]


def test_what_an_interrupted_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".global_step_1.tmp" / "actor").mkdir(parents=True)
    save(tmp_path, 2)
    assert not (tmp_path / ".global_step_1.tmp").exists()


def test_a_kill_between_the_renames_of_a_step_saved_again_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, 2, "old")
    step_folder(tmp_path, 2).rename(tmp_path / ".global_step_2.old")
    assert latest_checkpoint(tmp_path) == step_folder(tmp_path, 2)
    assert (step_folder(tmp_path, 2) / "actor" / "model").read_text() == "old"


# ------------------------------------------------------------------------------------------------- verification


def test_the_manifest_has_size_and_hash_of_every_file(tmp_path: Path) -> None:
    save(tmp_path, 2)
    manifest = json.loads((step_folder(tmp_path, 2) / "manifest.json").read_text())["files"]
    assert sorted(manifest) == ["actor/model", "actor/rng", "critic/model", "critic/rng", "trainer.json"]
    assert manifest["actor/model"] == {"size": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}
    assert verify_checkpoint(step_folder(tmp_path, 2)) == []


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: list[tuple[Callable[[Path], None], str, str]] = [
    (Path.unlink, "actor/model", "global_step_3/actor/model is missing"),
    (truncate, "critic/model", "global_step_3/critic/model has 6 bytes instead of 7"),
    (
        flip_a_byte,
        "actor/model",
        "global_step_3/actor/model was changed: its sha256 is not the one it was written with",
    ),
    (flip_a_byte, "trainer.json", "global_step_3/trainer.json was changed"),
    (Path.unlink, "trainer.json", "global_step_3/trainer.json is missing"),
    (truncate, "manifest.json", "global_step_3/manifest.json can't be read"),
    (lambda path: path.write_text("[]"), "manifest.json", "global_step_3/manifest.json can't be read"),
    (lambda path: shutil.rmtree(path.parent), "actor/model", "global_step_3/actor/model is missing"),
]


@pytest.mark.parametrize(("harm", "file", "problem"), DAMAGE, ids=[problem for _, _, problem in DAMAGE])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], None], file: str, problem: str
) -> None:
    save(tmp_path, 2)
    save(tmp_path, 3)
    damaged = step_folder(tmp_path, 3)
    harm(damaged / file)
    assert verify_checkpoint(damaged)[0].startswith(problem)
    with pytest.raises(CheckpointError, match=r"global_step_3 can't be resumed from.*trainer\.resume_mode=disable"):
        require_intact(damaged)
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(tmp_path) == step_folder(tmp_path, 2)
    assert problem in caplog.text
    # The resumed run sets the damaged one aside, whatever is wrong with it, and saves its step again.
    rewind(tmp_path, step_folder(tmp_path, 2))
    assert names(tmp_path) == ["global_step_2", "global_step_3.1"]
    save(tmp_path, 3)
    assert latest_checkpoint(tmp_path) == damaged


def test_a_checkpoint_cut_at_any_byte_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 2)
    save(tmp_path, 3, "weights of another length")
    newest = step_folder(tmp_path, 3)
    for path in sorted(path for path in newest.rglob("*") if path.is_file()):
        content = path.read_bytes()
        for length in range(0, len(content), 1 + len(content) // 60):
            path.write_bytes(content[:length])
            caplog.clear()
            assert latest_checkpoint(tmp_path) == step_folder(tmp_path, 2), f"{path} cut at {length}"
            assert f"global_step_3/{path.relative_to(newest)}" in caplog.text
        path.write_bytes(content)
        assert latest_checkpoint(tmp_path) == newest


def test_without_hashes_only_sizes_are_looked_at(tmp_path: Path) -> None:
    save(tmp_path, 2)
    flip_a_byte(step_folder(tmp_path, 2) / "actor" / "model")
    assert verify_checkpoint(step_folder(tmp_path, 2), hashes=False) == []
    truncate(step_folder(tmp_path, 2) / "actor" / "model")
    assert len(verify_checkpoint(step_folder(tmp_path, 2), hashes=False)) == 1


def test_files_that_users_add_do_no_harm(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (step_folder(tmp_path, 2) / "actor" / "README.md").write_text("mine")
    assert verify_checkpoint(step_folder(tmp_path, 2)) == []


def test_if_all_are_damaged_that_is_an_error_that_says_what_to_set(tmp_path: Path) -> None:
    for step in (2, 3):
        save(tmp_path, step)
        truncate(step_folder(tmp_path, step) / "actor" / "model")
    with pytest.raises(
        CheckpointError,
        match=r"global_step_3/actor/model has.*global_step_2/actor/model has.*trainer\.resume_mode=disable",
    ):
        latest_checkpoint(tmp_path)


def test_checkpoints_that_are_gone_are_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    save(tmp_path, 2)
    shutil.rmtree(step_folder(tmp_path, 2))
    with pytest.raises(CheckpointError, match=r"names step 2.*trainer\.resume_mode=disable"):
        latest_checkpoint(tmp_path)


def test_an_older_checkpoint_without_a_manifest_counts_if_it_has_its_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 2)
    older = step_folder(tmp_path, 2)
    (older / "manifest.json").unlink()
    assert verify_checkpoint(older) == ["global_step_2 has no manifest.json"]
    require_intact(older)
    with caplog.at_level(logging.WARNING):
        assert latest_checkpoint(tmp_path) == older
    assert "has no manifest.json, so its files can't be verified" in caplog.text
    (older / "trainer.json").unlink()
    with pytest.raises(CheckpointError, match="global_step_2"):
        latest_checkpoint(tmp_path)


@pytest.mark.parametrize("state", ["{}", "[]", "1", '{"global_step": "3"}', "\xff", "{"])
def test_a_state_that_says_no_step_is_damage_also_without_a_manifest(tmp_path: Path, state: str) -> None:
    save(tmp_path, 2)
    save(tmp_path, 3)
    broken = step_folder(tmp_path, 3)
    (broken / "manifest.json").unlink()
    (broken / "trainer.json").write_bytes(state.encode("latin-1"))
    assert latest_checkpoint(tmp_path) == step_folder(tmp_path, 2)
    with pytest.raises(CheckpointError, match="global_step_3 can't be resumed from"):
        require_intact(broken)
    with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
        read_state(broken)


def test_links_that_lead_in_a_circle_are_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 2)
    step_folder(tmp_path, 3).symlink_to(step_folder(tmp_path, 3))
    step_folder(tmp_path, 4).symlink_to(step_folder(tmp_path, 5))
    step_folder(tmp_path, 5).symlink_to(step_folder(tmp_path, 4))
    assert latest_checkpoint(tmp_path) == step_folder(tmp_path, 2)
    rewind(tmp_path, step_folder(tmp_path, 2))
    save(tmp_path, 6)
    prune_checkpoints(tmp_path, 1, 1)
    assert latest_checkpoint(tmp_path) == step_folder(tmp_path, 6)
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    with pytest.raises((CheckpointError, OSError)):
        begin_checkpoint(circle, 1)
    assert latest_checkpoint(circle) is None


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        read_state(tmp_path)


# -------------------------------------------------------------------------------------------------------- rewind


def test_rewinding_makes_an_older_checkpoint_the_latest_and_keeps_the_others(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        save(tmp_path, step)
    rewind(tmp_path, step_folder(tmp_path, 2))
    assert latest_checkpoint(tmp_path) == step_folder(tmp_path, 2)
    assert names(tmp_path) == ["global_step_1", "global_step_10.1", "global_step_2"]


def test_rewinding_to_a_branch_that_was_left_sets_the_other_branch_aside(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2, "first")
    rewind(tmp_path, step_folder(tmp_path, 1))
    save(tmp_path, 2, "second")
    rewind(tmp_path, tmp_path / "global_step_2.1")
    assert names(tmp_path) == ["global_step_1", "global_step_2.1", "global_step_2.2"]
    assert (tmp_path / "global_step_2.2" / "actor" / "model").read_text() == "second"


# ------------------------------------------------------------------------------------------------------- pruning


@pytest.mark.parametrize(
    ("keep_actor", "keep_critic", "left"),
    [
        (None, None, {1: "ac*", 2: "ac*", 3: "ac*", 4: "ac*"}),
        (2, 2, {3: "ac*", 4: "ac*"}),
        (1, 1, {4: "ac*"}),
        (3, 1, {2: "a", 3: "a", 4: "ac*"}),
        (1, 3, {2: "c", 3: "c", 4: "ac*"}),
        (None, 2, {1: "a", 2: "a", 3: "ac*", 4: "ac*"}),
        (9, 9, {1: "ac*", 2: "ac*", 3: "ac*", 4: "ac*"}),
    ],
)
def test_older_checkpoints_lose_what_is_not_to_be_kept(
    tmp_path: Path, keep_actor: int | None, keep_critic: int | None, left: dict[int, str]
) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    for _ in range(2):  # pruning again changes nothing
        prune_checkpoints(tmp_path, keep_actor, keep_critic)
        assert parts_of(tmp_path) == left
        assert latest_checkpoint(tmp_path) == step_folder(tmp_path, 4)
    assert not list(tmp_path.rglob(".*"))


def test_pruning_after_every_save_keeps_as_many_as_asked(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(tmp_path, step)
        prune_checkpoints(tmp_path, 3, 1)
    assert parts_of(tmp_path) == {5: "a", 6: "a", 7: "ac*"}


def test_a_run_without_critic_is_pruned_by_its_actors(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, parts=("actor",))
    prune_checkpoints(tmp_path, 2, 1)
    assert parts_of(tmp_path) == {2: "a*", 3: "a*"}


def test_a_pruned_checkpoint_is_not_resumed_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    prune_checkpoints(tmp_path, None, 1)
    assert parts_of(tmp_path) == {1: "a", 2: "a", 3: "ac*"}
    assert verify_checkpoint(step_folder(tmp_path, 2)) == [
        "global_step_2 was pruned and can't be resumed from: actor or critic are gone"
    ]
    with pytest.raises(CheckpointError, match="was pruned"):
        require_intact(step_folder(tmp_path, 2))
    truncate(step_folder(tmp_path, 3) / "critic" / "model")
    with caplog.at_level(logging.WARNING), pytest.raises(CheckpointError, match="global_step_3/critic/model"):
        latest_checkpoint(tmp_path)
    assert "global_step_2" not in caplog.text


def test_damaged_checkpoints_count_for_nothing_and_are_left_to_be_looked_at(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    for step in (3, 5):
        truncate(step_folder(tmp_path, step) / "actor" / "model")
    prune_checkpoints(tmp_path, 2, 2)
    assert parts_of(tmp_path) == {2: "ac*", 3: "ac*", 4: "ac*", 5: "ac*"}
    assert latest_checkpoint(tmp_path) == step_folder(tmp_path, 4)


def test_if_none_is_complete_nothing_is_deleted(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
        truncate(step_folder(tmp_path, step) / "actor" / "model")
    prune_checkpoints(tmp_path, 1, 1)
    assert parts_of(tmp_path) == {1: "ac*", 2: "ac*"}


# ---------------------------------------------------------------------------------------------------------- kills


class Killed(BaseException):
    """Stands for a signal: nothing catches it."""


@contextmanager
def killed_at(moment: int) -> Iterator[None]:
    """End the block instead of its operation number `moment` on the file system, or in the middle if it deletes."""
    counter = itertools.count()
    real_rmtree = shutil.rmtree

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(counter) == moment:
                raise Killed
            return real(*args, **kwargs)

        return call

    def rmtree(folder: Path, **kwargs: Any) -> None:
        if next(counter) == moment:
            for file in sorted(path for path in Path(folder).rglob("*") if path.is_file())[::2]:
                file.unlink()
            raise Killed
        real_rmtree(folder, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for operation in ("rename", "replace", "write_text", "write_bytes", "mkdir"):
            patch.setattr(Path, operation, dying(getattr(Path, operation)))
        for module in (files, checkpoint):
            patch.setattr(module, "sync", dying(files.sync))
        patch.setattr(shutil, "rmtree", rmtree)
        yield


@pytest.mark.parametrize(
    ("keep_actor", "keep_critic", "again"), [(1, 1, False), (2, 1, False), (1, 2, True), (None, None, True)]
)
def test_a_kill_at_any_moment_of_saving_and_pruning_leaves_only_whole_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_actor: int | None, keep_critic: int | None, again: bool
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the files are read by the same system: it only costs
    for step in (1, 2, 3):
        save(tmp_path / "before", step, f"weights of {step}")
    moments = 0
    for moment in itertools.count():
        run = tmp_path / str(moment)
        shutil.copytree(tmp_path / "before", run)
        next_step = 3 if again else 4
        try:
            with killed_at(moment):
                save(run, next_step, f"weights of {next_step}")
                prune_checkpoints(run, keep_actor, keep_critic)
        except Killed:
            moments += 1
        else:
            break
        found = latest_checkpoint(run)
        assert found in {step_folder(run, 3), step_folder(run, next_step)}
        resumable = [folder for folder in run.glob("global_step_*") if (folder / "trainer.json").exists()]
        assert found in resumable
        for folder in resumable:
            assert verify_checkpoint(folder) == [], f"killed at {moment}"
            step = folder.name.removeprefix("global_step_")
            assert (folder / "actor" / "model").read_text() == f"weights of {step}"
        # A resumed run goes on, and what the kill left is cleared away.
        rewind(run, found)
        save(run, 5, "weights of 5")
        prune_checkpoints(run, 1, 1)
        assert names(run) == ["global_step_5"], f"killed at {moment}"
    assert moments > 15
