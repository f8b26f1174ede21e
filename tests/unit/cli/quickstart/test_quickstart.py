from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from paceline import cli
from paceline.cli import quickstart
from paceline.cli.quickstart.task import (
    Sum,
    split_sums,
    write_parquet,
)
from paceline.errors import ConfigError, WorkerError
from paceline.trainer import main_ppo

ACCURACY = "val-core/paceline/sums/acc/mean@1"


def write_metrics(run_dir: Path, lines: list[dict[str, Any]]) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


# ------------------------------------------------------------------------------------------------------- the task


# ------------------------------------------------------------------------------------------------------ the model


# ------------------------------------------------------------------------------------------------- the configuration


@pytest.mark.parametrize("placement", ["colocated", "split"])
def test_preset_runs_ppo_with_critic_and_reference_and_samples_in_validation(placement: str) -> None:
    config = quickstart.compose_config(placement, [])
    assert config.trainer.placement.name == placement
    assert config.algorithm.adv_estimator == "gae"
    assert config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward
    assert config.actor_rollout_ref.rollout.val_kwargs.do_sample
    assert config.actor_rollout_ref.rollout.val_kwargs.temperature == 1.0


def test_preset_saves_the_last_step_and_none_before() -> None:
    trainer = quickstart.compose_config("colocated", []).trainer
    assert trainer.save_freq is None  # that is, at the end, however many steps are asked for


def test_placements_differ_in_nothing_but_the_devices() -> None:
    colocated, split = (OmegaConf.to_container(quickstart.compose_config(name, [])) for name in ("colocated", "split"))
    for config in (colocated, split):
        for key in ("placement", "n_gpus_per_node", "experiment_name"):
            del config["trainer"][key]
    assert colocated == split


def test_overrides_win_over_the_preset() -> None:
    config = quickstart.compose_config(
        "split", ["trainer.total_training_steps=4", "trainer.seed=11", "actor_rollout_ref.actor.optim.lr=0"]
    )
    assert config.trainer.total_training_steps == 4
    assert config.trainer.seed == 11
    assert config.actor_rollout_ref.actor.optim.lr == 0


def test_run_folder_is_named_by_placement_unless_the_user_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = quickstart.run_folder(quickstart.compose_config("split", []))
    assert folder.parent == tmp_path / "runs" / "quickstart-split"
    config = quickstart.compose_config("split", ["trainer.default_local_dir=here"])
    assert quickstart.run_folder(config) == tmp_path / "here"


# ----------------------------------------------------------------------------------------------------------- the run


class Recorder:
    """Stands for run_ppo and for the pre-training, which take minutes; the rest of the command is real."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lines: list[dict[str, Any]]) -> None:
        self.lines = lines
        self.configs: list[Any] = []
        self.trained: list[int] = []
        monkeypatch.setattr("paceline.cli.quickstart.model.pretrain", lambda *_, seed: self.trained.append(seed))
        monkeypatch.setattr(main_ppo, "run_ppo", self.run_ppo)

    def run_ppo(self, config: Any) -> None:
        cfg = main_ppo.complete_config(config)
        self.configs.append(cfg)
        write_metrics(Path(cfg.trainer.default_local_dir), self.lines)


def test_command_prepares_everything_trains_and_prints_the_measured_accuracies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(monkeypatch, [{"step": 0, ACCURACY: 0.478}, {"step": 1}, {"step": 2, ACCURACY: 0.969}])
    arguments = ["trainer.seed=11", "--placement", "split", f"trainer.default_local_dir={tmp_path}/run"]
    assert cli.main(["quickstart", *arguments]) == 0
    assert capsys.readouterr().out == f"quickstart: accuracy 0.48 -> 0.97 in 2 steps ({tmp_path}/run)\n"
    (cfg,) = recorder.configs
    assert recorder.trained == [11]
    assert Path(cfg.actor_rollout_ref.model.path, "config.json").is_file()
    questions = [row["prompt"][0]["content"] for row in pq.read_table(cfg.data.val_files).to_pylist()]
    assert questions == [item.question for item in split_sums(seed=11)[1]]


def test_bad_configuration_is_found_before_the_model_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder(monkeypatch, [])
    for override, message in (
        ("trainer.sead=1", "did you mean trainer.seed?"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=100", "does not divide data.train_batch_size"),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(["quickstart", override, f"trainer.default_local_dir={tmp_path}/run"])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    assert recorder.trained == []
    assert recorder.configs == []


def test_failed_run_ends_with_exit_code_1_and_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Recorder(monkeypatch, [])

    def fail(config: Any) -> None:
        raise WorkerError("critic", 0, "update_critic", "out of memory")

    monkeypatch.setattr(main_ppo, "run_ppo", fail)
    with pytest.raises(SystemExit) as stop:
        cli.main(["quickstart", f"trainer.default_local_dir={tmp_path}/run"])
    captured = capsys.readouterr()
    assert stop.value.code == 1
    assert "critic rank 0 failed in update_critic: out of memory" in captured.err
    assert "quickstart:" not in captured.out


def test_a_model_and_data_of_the_users_own_are_taken_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch, [])
    folder = quickstart.prepare_model(tmp_path / "model", seed=1)
    write_parquet([Sum(10, 1)], "train", tmp_path / "own.parquet")
    recorder.trained.clear()
    quickstart.run(
        "colocated",
        [
            f"trainer.default_local_dir={tmp_path}/run",
            f"actor_rollout_ref.model.path={folder}",
            f"data.train_files={tmp_path}/own.parquet",
        ],
    )
    (cfg,) = recorder.configs
    assert recorder.trained == []
    assert cfg.actor_rollout_ref.model.path == str(folder)
    assert cfg.data.train_files == f"{tmp_path}/own.parquet"
    assert not (tmp_path / "run" / "material-seed1" / "train.parquet").exists()


def test_dry_run_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.cli.quickstart.model.pretrain", lambda *_, **__: pytest.fail("trained"))
    assert cli.main(["quickstart", "trainer.dry_run=true", f"trainer.default_local_dir={tmp_path}/run"]) == 0
    text = capsys.readouterr().out
    assert "Placement: colocated" in text
    assert "accuracy" not in text


def test_placement_as_a_key_means_the_same_as_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["trainer.dry_run=true", f"trainer.default_local_dir={tmp_path}/run"]
    assert cli.main(["quickstart", "trainer.placement.name=split", *keys]) == 0
    as_key = capsys.readouterr().out
    assert cli.main(["quickstart", "--placement", "split", *keys]) == 0
    assert as_key == capsys.readouterr().out
    assert "critic_pool" in as_key


def test_last_line_says_when_accuracy_was_not_measured(tmp_path: Path) -> None:
    write_metrics(tmp_path, [{"step": 0, ACCURACY: 0.5}, {"step": 4}])
    assert quickstart.last_line(tmp_path) == (
        f"quickstart: accuracy 0.50 at step 0, not measured again in 4 steps ({tmp_path})"
    )
    write_metrics(tmp_path, [{"step": 4, "actor/pg_loss": 0.1}])
    assert quickstart.last_line(tmp_path) == f"quickstart: accuracy not measured in 4 steps ({tmp_path})"


def test_what_is_no_override_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="is not an override"):
        quickstart.compose_config("split", ["trainer.seed 11"])
