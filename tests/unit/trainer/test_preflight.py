"""What is wrong with models, prompts and rewards is told before Ray starts, also in a dry run, all at once."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.errors import ConfigError, DataError, PacelineError, UnknownDataSourceError
from paceline.trainer import preflight
from paceline.trainer.main_ppo import run_ppo
from tests.runs import as_omegaconf, as_overrides, base_config, write_sums
from tests.tiny import make_tiny_model, make_tiny_tokenizer

CHAT = [{"role": "user", "content": "1+1="}]
ROW = {"prompt": CHAT, "data_source": "openai/gsm8k", "reward_model": {"ground_truth": "2"}}


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "init", lambda **kwargs: pytest.fail("Ray was started"))


def dry_run(material: Path, **changes: Any) -> None:
    config = base_config(material, material / "run", trainer__dry_run=True, trainer__device="cpu", **changes)
    del config["custom_reward_function.path"]
    run_ppo(as_omegaconf(config))


def problem(material: Path, kind: type[PacelineError] = DataError, **changes: Any) -> str:
    with pytest.raises(kind) as caught:
        dry_run(material, **changes)
    return str(caught.value)


def rows_file(path: Path, *changes: dict[str, Any]) -> str:
    pq.write_table(pa.Table.from_pylist([{**ROW, **change} for change in changes]), path)
    return str(path)


def test_good_data_give_a_plan(material: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dry_run(material)
    assert "responses per optimizer step" in capsys.readouterr().out


def test_the_split_example_looks_at_its_data_too(material: Path, tmp_path: Path) -> None:
    from examples.split_placement.main_ppo_split import SplitTaskRunner

    file = rows_file(tmp_path / "odd.parquet", {"prompt": 3})
    config = base_config(material, tmp_path / "run", trainer__dry_run=True, data__train_files=file)
    with pytest.raises(DataError, match=r"The prompt in row 0 of .*odd\.parquet is 3\. Column"):
        run_ppo(as_omegaconf(config), SplitTaskRunner)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"data_source": "who/knows"}, UnknownDataSourceError, "No scorer for data_source 'who/knows' (1 of 2 rows)"),
        ({"data_source": "openai/gsm8kk"}, UnknownDataSourceError, "Did you mean openai/gsm8k?"),
        ({"data_source": None}, DataError, "1 of 2 rows have no 'data_source'"),
        ({"reward_model": {"ground_truth": None}}, DataError, "1 of 2 rows have no reward_model.ground_truth"),
        (
            {"data_source": "paceline/code", "reward_model": {"ground_truth": "x = 1"}},
            DataError,
            "1 of 2 rows have a ground truth that can't be used",
        ),
        ({"prompt": [{"role": "user", "content": "9" * 99}]}, DataError, "are longer than data.max_prompt_length=32"),
        ({"prompt": []}, DataError, "must hold a string, or a chat"),
        ({"prompt": [{"role": "user", "content": None}]}, DataError, "must hold a string, or a chat"),
    ],
    ids=str,
)
def test_a_row_that_would_end_the_run_is_found(
    material: Path, tmp_path: Path, change: dict[str, Any], kind: type[PacelineError], message: str
) -> None:
    files = rows_file(tmp_path / "train.parquet", {}, change)
    assert message in problem(material, kind, data__train_files=files)


def test_prompts_that_are_numbers_and_sources_that_are_lists_are_told(material: Path, tmp_path: Path) -> None:
    numbers = rows_file(tmp_path / "numbers.parquet", {"prompt": 1}, {"prompt": 2})
    assert "must hold a string, or a chat" in problem(material, data__train_files=numbers)
    lists = rows_file(tmp_path / "lists.parquet", {"data_source": ["openai/gsm8k"]})
    text = problem(material, data__train_files=lists)
    assert "in the column 'data_source', which names the scorer of a row as text" in text


def test_all_prompts_too_long_for_a_filter_are_told_also_of_large_files(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = [{"prompt": "9" * 40}] * 8
    files = rows_file(tmp_path / "train.parquet", *long)
    changes = {"data__train_files": files, "data__filter_overlong_prompts": True}
    assert "All 8 prompts are longer than data.max_prompt_length=32" in problem(material, **changes)
    monkeypatch.setattr(preflight, "SMALL", 4)
    monkeypatch.setattr(preflight, "SAMPLED", 2)
    assert "All 8 prompts are longer than data.max_prompt_length=32" in problem(material, **changes)
    # The sample alone is too long: no reason to stop.
    rows_file(tmp_path / "train.parquet", *long, {"prompt": "1+1="})
    dry_run(material, **changes)


def test_every_file_of_large_data_is_sampled(material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "SMALL", 4)
    monkeypatch.setattr(preflight, "SAMPLED", 4)
    good = str(write_sums(tmp_path / "a.parquet", 20))
    bad = rows_file(tmp_path / "b.parquet", {"data_source": "who/knows"})
    assert "who/knows" in problem(material, UnknownDataSourceError, data__train_files=[good, bad])


def test_all_problems_are_told_together(material: Path, tmp_path: Path) -> None:
    unknown = rows_file(tmp_path / "train.parquet", {"data_source": "who/knows"})
    numbers = rows_file(tmp_path / "test.parquet", {"prompt": 1})
    changes = {"data__train_files": unknown, "data__val_files": numbers, "data__max_response_length": 4000}
    with pytest.raises(ConfigError) as caught:
        dry_run(material, **changes)
    assert len(caught.value.problems) == 3


def test_lengths_beyond_the_models_positions_are_told(material: Path) -> None:
    text = problem(material, ConfigError, data__max_response_length=600)
    assert "make 632 tokens, but the model of actor_rollout_ref.model.path has 512 positions" in text
    assert "or set actor_rollout_ref.model.max_position_embeddings." in text
    dry_run(
        material,
        data__max_response_length=600,
        actor_rollout_ref__model__max_position_embeddings=632,
        algorithm__adv_estimator="grpo",
        actor_rollout_ref__rollout__n=2,
    )


def test_a_tokenizer_that_is_larger_than_the_model_is_told(material: Path, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", vocab=50)
    text = problem(material, ConfigError, actor_rollout_ref__model__path=str(model))
    assert "the model has 50 embeddings (vocab_size), and the tokenizer of" in text


def test_a_token_that_was_added_for_another_use_may_be_beyond_the_vocabulary(material: Path, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.save_pretrained(model)
    dry_run(material, actor_rollout_ref__model__path=str(model))
    files = rows_file(tmp_path / "train.parquet", {"prompt": "<image>"})
    text = problem(material, ConfigError, actor_rollout_ref__model__path=str(model), data__train_files=files)
    assert "has the token" in text


def test_a_relative_folder_that_does_not_exist_is_told_without_waiting_for_the_hub(
    material: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")
    text = problem(material, ConfigError, actor_rollout_ref__model__path="models/mine")
    assert "there is no folder" in text
    assert "models/mine, and as a hub id it can't be used" in text
    assert "127.0.0.1 can't be reached" in text


def test_wandb_without_a_login_is_told(material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    cfg = preflight.PPOConfig()
    cfg = preflight.dataclasses.replace(cfg, trainer=preflight.dataclasses.replace(cfg.trainer, logger=["wandb"]))
    [text] = preflight.login_problems(cfg)
    assert text.startswith("trainer.logger=wandb has no login for api.wandb.ai. Run `wandb login`")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert not list(preflight.login_problems(cfg))
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password abcdefgh\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert not list(preflight.login_problems(cfg))


def test_a_missing_login_hides_no_other_problem(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    text = problem(material, ConfigError, trainer__logger=["wandb"], data__max_prompt_length=400_000)
    assert "has no login for api.wandb.ai" in text
    assert "positions" in text


def test_a_model_of_images_is_refused_where_there_is_none_of_its_text(material: Path, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for kind, is_refused in (("qwen2_5_vl", True), ("qwen2", False)):
        (folder / "config.json").write_text(json.dumps({**config, "model_type": kind, "vision_config": {"depth": 2}}))
        if is_refused:
            text = problem(material, ConfigError, actor_rollout_ref__model__path=str(folder))
            assert "is a model of images and text (qwen2_5_vl), and prompts are text. Set it to a model of text" in text
        else:
            dry_run(material, actor_rollout_ref__model__path=str(folder))


def test_images_want_a_model_that_reads_them(material: Path) -> None:
    changes = {
        "data__image_key": "images",
        "algorithm__adv_estimator": "grpo",
        "actor_rollout_ref__rollout__n": 2,
        "actor_rollout_ref__rollout__name": "hf",
    }
    text = problem(material, ConfigError, **changes)
    assert "is a model of kind qwen2; those that read images here are qwen2_vl and qwen2_5_vl." in text


def test_swanlab_without_a_login_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("SWANLAB_API_KEY", "SWANLAB_MODE", "SWANLAB_ROOT", "SWANLAB_SAVE_DIR", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    cfg = preflight.PPOConfig()
    cfg = preflight.dataclasses.replace(cfg, trainer=preflight.dataclasses.replace(cfg.trainer, logger=["swanlab"]))
    [text] = preflight.login_problems(cfg)
    assert text.startswith("trainer.logger=swanlab has no login. Run `swanlab login`")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    assert not list(preflight.login_problems(cfg))
    monkeypatch.delenv("SWANLAB_MODE")
    (tmp_path / ".swanlab").mkdir()
    (tmp_path / ".swanlab/.netrc").write_text("machine api.swanlab.cn login user password abcdefgh\n")
    assert not list(preflight.login_problems(cfg))


def test_more_devices_than_cores_are_worth_a_remark(
    material: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight.os, "sched_getaffinity", lambda pid: {0, 1})
    changes = {"actor_rollout_ref__actor__strategy": "fsdp2", "critic__strategy": "fsdp2"}
    dry_run(material, trainer__n_gpus_per_node=2, **changes)
    assert "cores" not in caplog.text
    dry_run(material, trainer__n_gpus_per_node=4, **changes)
    assert "trainer.n_gpus_per_node=4 on a CPU are 4 processes, and this machine has 2 cores" in caplog.text


def test_a_dry_run_by_the_command_reads_the_data_too(
    train_command: Callable[..., subprocess.CompletedProcess[str]], material: Path, tmp_path: Path
) -> None:
    config = base_config(material, tmp_path / "run", trainer__dry_run=True)
    del config["custom_reward_function.path"]
    (tmp_path / "train.jsonl").write_text(json.dumps({**ROW, "data_source": "who/knows"}) + "\n")
    config["data.train_files"] = str(tmp_path / "train.jsonl")
    done = train_command(*as_overrides(config), cwd=tmp_path)
    assert done.returncode == 1
    assert "No scorer for data_source 'who/knows'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


AGENTS = "actor_rollout_ref__rollout__"


def test_agents_that_can_not_be_made_are_told_with_the_rows_that_name_them(material: Path, tmp_path: Path) -> None:
    on = {f"{AGENTS}multi_turn__enable": True}
    rows = rows_file(tmp_path / "rows.parquet", {"agent_name": "tool_agent"}, {"agent_name": "tool_agnt"})
    said = problem(material, ConfigError, data__train_files=rows, **on)
    assert "'tool_agnt' is not known; did you mean tool_agent?" in said
    tools = tmp_path / "tools.yaml"
    tools.write_text("tools: [{class_name: no.such.Tool}]")
    said = problem(material, ConfigError, **on, **{f"{AGENTS}multi_turn__tool_config_path": str(tools)})
    assert "tools[0].class_name=no.such.Tool: ModuleNotFoundError" in said
    loops = tmp_path / "loops.yaml"
    loops.write_text("- {name: x, _target_: paceline.agents.tools.Tool}")
    own = {"agent__agent_loop_config_path": str(loops), "agent__default_agent_loop": "x"}
    said = problem(material, ConfigError, **{f"{AGENTS}{name}": value for name, value in own.items()})
    assert "the loop x can't be made of _target_=paceline.agents.tools.Tool" in said


def taught(material: Path, teacher: Path, **changes: Any) -> dict[str, Any]:
    return {"distillation__enabled": True, "distillation__teacher_models__one__model_path": str(teacher), **changes}


def test_a_teacher_with_other_tokens_is_refused(material: Path, tmp_path: Path) -> None:
    teacher = make_tiny_model(tmp_path / "teacher")
    dry_run(material, **taught(material, teacher))
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = problem(material, ConfigError, **taught(material, teacher))
    assert f"distillation.teacher_models.one.model_path={teacher}: its tokenizer is another" in said
    assert "2 tokens are not the same, such as '7'" in said


def test_a_teacher_with_too_few_positions_is_refused(material: Path, tmp_path: Path) -> None:
    teacher = make_tiny_model(tmp_path / "teacher", max_position_embeddings=36)
    said = problem(material, ConfigError, **taught(material, teacher))
    assert "make 40 tokens, but the model of distillation.teacher_models.one.model_path has 36 positions" in said


def test_rows_that_no_teacher_has_are_told(material: Path, tmp_path: Path) -> None:
    key = {"distillation__teacher_models__one__key": "math"}
    said = problem(material, DataError, **taught(material, material / "model", **key))
    assert "no teacher has rows with data_source=openai/gsm8k" in said
    assert "distillation.teacher_models has math" in said


def test_a_teacher_alone_wants_no_rewards(material: Path, tmp_path: Path) -> None:
    rows = {"data__train_files": rows_file(tmp_path / "odd.parquet", *[{"data_source": "who/knows"}] * 8)}
    alone = {"distillation__distillation_loss__use_task_rewards": False}
    dry_run(material, **taught(material, material / "model", **rows, **alone))
    assert "who/knows" in problem(material, UnknownDataSourceError, **taught(material, material / "model", **rows))
