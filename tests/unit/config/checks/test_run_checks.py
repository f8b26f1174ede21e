"""What a run reads and writes, together: files that fit the keys, and folders that do not get in each other's way."""

from __future__ import annotations

from pathlib import Path

from paceline.config.checks.run_checks import check_columns, check_rewards, check_run
from tests.stand_ins import config_with, write_parquet


def test_rows_and_columns_are_those_of_all_files_together(tmp_path: Path):
    files = [write_parquet(tmp_path / f"{name}.parquet", 3) for name in "ab"]
    both = f"data.train_files=[{files[0]},{files[1]}]"
    assert list(check_columns(config_with(both, "data.drop_last=true", "data.train_batch_size=6"))) == []
    [problem] = check_columns(config_with(both, "data.drop_last=true", "data.train_batch_size=7"))
    assert "data.train_files has 6 rows, less than one batch of data.train_batch_size=7" in problem


def test_a_column_to_keep_is_not_missed_while_a_file_can_not_be_read(tmp_path: Path):
    good = write_parquet(tmp_path / "a.parquet")
    keep = "data.keep_columns=[level]"
    assert len(list(check_columns(config_with(f"data.train_files={good}", keep)))) == 1
    assert list(check_columns(config_with(f"data.train_files=[{good},{tmp_path}/none.parquet]", keep))) == []


def test_a_service_must_wait_as_long_as_a_program_may_run():
    sandbox = "reward_model.sandbox"
    here = [f"{sandbox}.timeout_seconds=1", f"{sandbox}.wall_seconds=2"]
    assert list(check_rewards(config_with(*here))) == []
    [problem] = check_rewards(config_with(*here, f"{sandbox}.url=http://sandbox:8080"))
    assert f"{sandbox}.timeout_seconds=1 is shorter than a program may run ({sandbox}.wall_seconds=2)" in problem


def test_two_kinds_of_generations_are_not_written_to_one_folder(tmp_path: Path):
    folders = [f"trainer.rollout_data_dir={tmp_path}/a", f"trainer.validation_data_dir={tmp_path}/a"]
    [problem] = check_run(config_with("data.val_files=x.parquet", *folders))
    assert "both write <step>.jsonl there" in problem
    folders[1] = f"trainer.validation_data_dir={tmp_path}/b"
    assert list(check_run(config_with("data.val_files=x.parquet", *folders))) == []


def test_a_run_without_validation_data_is_asked_for_no_validation():
    asked = ["trainer.test_freq=2", "trainer.log_val_generations=3", "trainer.validation_data_dir=x"]
    assert len(list(check_run(config_with(*asked)))) == 3
    assert list(check_run(config_with("trainer.test_freq=-1"))) == []
