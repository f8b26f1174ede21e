"""A launch script becomes our command, with a list of what became of its keys."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from paceline import cli
from paceline.cli.shell_script import read_script

SCRIPT = """\
#!/usr/bin/env bash
set -xeuo pipefail
export VLLM_USE_V1=1
export WANDB_API_KEY=abcdef0123456789

N_GPUS=${N_GPUS:-8}
max_prompt_length=$((1024 * 2))
TRAIN="['$HOME/data/a/train.parquet', '$HOME/data/b/train.parquet']"

DATA=(
    data.train_files="$TRAIN"
    data.max_prompt_length=${max_prompt_length}
    data.train_batch_size=64   # prompts
)
ACTOR=(
    actor_rollout_ref.actor.ppo_mini_batch_size=32
    actor_rollout_ref.actor.use_torch_compile=False
)

ray job submit --runtime-env env.yaml -- python3 -m verl.trainer.main_ppo \\
    model_engine=dp \\
    algorithm.adv_estimator=grpo \\
    actor_rollout_ref.model.path=org/model \\
    "${DATA[@]}" "${ACTOR[@]}" \\
    +critic.fsdp.param_offload=True \\
    actor_rollout_ref.rollout.n=4 \\
    trainer.logger='["console","wandb"]' \\
    trainer.n_gpus_per_node=$N_GPUS "$@" 2>&1 | tee run.log
"""


def imported(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, *arguments: str, code: int = 0) -> str:
    file = tmp_path / "run.sh"
    file.write_text(text)
    assert cli.main(["import-verl", str(file), *arguments]) == code
    return capsys.readouterr().out


def command_of(printed: str) -> list[str]:
    [command] = read_script(printed).commands
    assert command[:2] == ["paceline", "train"]
    return command[2:]


def test_a_script_becomes_a_script_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = imported(tmp_path, capsys, SCRIPT, "--set", "N_GPUS=4", "--", "trainer.save_freq=10")
    assert command_of(text) == [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.model.path=org/model",
        "data.train_files=['~/data/a/train.parquet', '~/data/b/train.parquet']",
        "data.max_prompt_length=2048",
        "data.train_batch_size=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.rollout.n=4",
        'trainer.logger=["console","wandb"]',
        "trainer.n_gpus_per_node=4",
        "trainer.save_freq=10",
        "critic.model.fsdp_config.param_offload=True",
    ]
    assert "# export VLLM_USE_V1=1\n" in text
    assert "abcdef0123456789" not in text
    assert "#   critic.fsdp.param_offload=True -> critic.model.fsdp_config.param_offload=True\n" in text
    assert "#   actor_rollout_ref.actor.use_torch_compile=False: layers run uncompiled unless" in text
    assert "Missing" not in text


def test_what_it_prints_means_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Our command, imported again, has nothing left to translate, and the same configuration."""
    from paceline.config.load import read_config
    from paceline.config.overrides import override_tree

    first = command_of(imported(tmp_path, capsys, SCRIPT))
    again = imported(tmp_path, capsys, shlex.join(["python", "-m", "verl.trainer.main_ppo", *first]))
    assert command_of(again) == first
    assert "Renamed" not in again
    overrides = read_script(SCRIPT).commands[-2][9:]
    assert read_config(override_tree(overrides)[1]).cfg == read_config(override_tree(first)[1]).cfg


def test_what_is_refused_is_said_and_stays_in_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = imported(tmp_path, capsys, SCRIPT, "--", "data.image_key=images", "trainer.nodes=2", code=1)
    assert command_of(text)[-2:] == ["data.image_key=images", "trainer.nodes=2"]
    assert "#   data.image_key is not supported yet: prompts are text. Leave it out.\n" in text
    assert "#   trainer.nodes is not a key; did you mean trainer.nnodes?\n" in text


def test_a_command_in_a_value_is_left_for_the_shell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = """NAME=run-$(date +%Y)
python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 \\
    data.train_files=a.parquet actor_rollout_ref.model.path=org/m trainer.experiment_name="$NAME"
"""
    text = imported(tmp_path, capsys, script)
    assert "    \"trainer.experiment_name='run-$(date +%Y)'\"\n" in text
    assert "is not run, and stands as it is written" in text


def test_what_is_no_override_leaves_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = imported(tmp_path, capsys, SCRIPT, "--", "a.b=]", code=1)
    assert "'a.b=]' is not an override" in text
    assert "trainer.n_gpus_per_node=8" in command_of(text)
    assert "critic.model.fsdp_config.param_offload=True" in command_of(text)


def test_a_launch_inside_of_another_shell_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = """srun --overlap docker exec box bash -c "cd /w && python -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 data.train_files=['~/a.parquet',~/b.parquet] \\
    actor_rollout_ref.model.path=org/m"
"""
    text = imported(tmp_path, capsys, script)
    assert "data.train_files=['~/a.parquet','~/b.parquet']" in command_of(text)


def test_a_script_without_a_launch_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.sh").write_text("echo hello\n")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["import-verl", str(tmp_path / "a.sh")])
    assert stopped.value.code != 0
    assert "has no command with `python -m verl.trainer.main_ppo`" in capsys.readouterr().err


def test_lines_that_a_comment_cuts_off_are_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "python -m verl.trainer.main_ppo \\\n algorithm.adv_estimator=gae \\\n # no \\\n trainer.nnodes=2\n"
    text = imported(tmp_path, capsys, script, code=1)
    assert "after a comment, the shell takes trainer.nnodes=2 for commands of their own" in text


def test_several_scripts_and_lists_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    lists = {
        "images.sh": ["data.image_key=images", "data.train_files=a.parquet", "actor_rollout_ref.model.path=org/m"],
        "mega.sh": ["model_engine=megatron", "data.train_files=a", "actor_rollout_ref.model.path=org/m", "a.b=1"],
    }
    (tmp_path / "lists.json").write_text(json.dumps(lists))
    assert cli.main(["import-verl", str(tmp_path / "run.sh"), str(tmp_path / "lists.json")]) == 1
    text = capsys.readouterr().out
    assert "text: 1 of 1 taken as they are\nimages: 0 of 1" in text
    assert "unknown: a\n" in text
