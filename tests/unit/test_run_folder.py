"""What a run's folder says of its checkpoints."""

from __future__ import annotations

import ast
from pathlib import Path

import paceline
from paceline import run_folder
from paceline.run_folder import (
    METRICS_FILE,
    VALIDATION_FOLDER,
    can_be_resumed,
    checkpoint_name,
    default_run_dir,
    is_pruned,
    latest_step,
    list_checkpoints,
    records_folder,
)


def test_checkpoints_are_listed_oldest_first_without_those_set_aside_or_unfinished(tmp_path: Path) -> None:
    for name in ("global_step_10", "global_step_9", "global_step_9.1", ".global_step_11.tmp", "global_step_", "other"):
        (tmp_path / name).mkdir()
    assert list_checkpoints(tmp_path) == {9: tmp_path / "global_step_9", 10: tmp_path / checkpoint_name(10)}


def test_a_folder_that_is_not_there_has_no_checkpoints(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "checkpoints") == {}
    assert latest_step(tmp_path / "checkpoints") is None


def test_a_checkpoint_can_be_resumed_until_it_is_pruned(tmp_path: Path) -> None:
    assert (can_be_resumed(tmp_path), is_pruned(tmp_path)) == (False, False)
    state = tmp_path / "trainer.json"
    state.touch()
    assert (can_be_resumed(tmp_path), is_pruned(tmp_path)) == (True, False)
    state.rename(tmp_path / "trainer.pruned.json")
    assert (can_be_resumed(tmp_path), is_pruned(tmp_path)) == (False, True)


def test_the_pointer_names_a_step_or_nothing(tmp_path: Path) -> None:
    pointer = tmp_path / "latest_checkpointed_iteration.txt"
    pointer.write_text("20\n")
    assert latest_step(tmp_path) == 20
    pointer.write_text("")
    assert latest_step(tmp_path) is None


def test_a_run_without_a_folder_of_its_own_is_kept_by_project_and_experiment() -> None:
    assert default_run_dir("paceline", "ppo") == Path("runs/paceline/ppo")


def test_names_of_files_are_written_in_one_module() -> None:
    """Messages may mention a file; a string that is its name stands in `run_folder` alone."""
    names = {
        str(value) for value in vars(run_folder).values() if str(value).endswith((".json", ".jsonl", ".yaml", ".txt"))
    }
    package = Path(paceline.__file__).parent
    found = [
        f"{path.relative_to(package)}:{node.lineno}: {node.value}"
        for path in sorted(package.rglob("*.py"))
        if path.name != "run_folder.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value in names or node.value.lstrip(".").startswith(run_folder.CHECKPOINT_PREFIX)
    ]
    assert len(names) > 8
    assert found == []


def test_who_only_looks_at_a_run_that_has_records_leaves_them(tmp_path: Path) -> None:
    assert records_folder(tmp_path, only_looks=True) == tmp_path
    (tmp_path / METRICS_FILE).touch()
    assert records_folder(tmp_path, only_looks=False) == tmp_path
    assert records_folder(tmp_path, only_looks=True) == tmp_path / VALIDATION_FOLDER
