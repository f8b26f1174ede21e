from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from paceline import external
from paceline.errors import ConfigError
from paceline.trainer.ppo.checkpoint import begin_checkpoint, complete_checkpoint
from paceline.trainer.saved_policy import SamplingOptions, SavedPolicy, find_model
from tests.runs import make_material


def test_steps_name_checkpoints_and_0_the_first_model(finished_run: Path) -> None:
    checkpoints = finished_run / "checkpoints"
    assert find_model(str(finished_run), 2).model == str(checkpoints / "global_step_2/actor")
    assert find_model(str(finished_run), None).model == str(checkpoints / "global_step_4/actor")
    assert find_model(str(checkpoints / "global_step_2"), None).model == str(checkpoints / "global_step_2/actor")
    assert find_model(str(finished_run), 0).model == str(finished_run.parent / "model")
    with pytest.raises(ConfigError, match="--step 4 is not the step of --model"):
        find_model(str(checkpoints / "global_step_2"), 4)
    with pytest.raises(ConfigError, match="no checkpoint of step 3; it has 2, 4"):
        find_model(str(finished_run), 3)
    with pytest.raises(ConfigError, match="is not a folder of a run"):
        find_model(str(finished_run.parent / "model"), 3)


def test_checkpoints_that_were_set_aside_are_not_the_latest_and_can_be_named(
    finished_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished_run, tmp_path / "run")
    checkpoints = tmp_path / "run/checkpoints"
    (checkpoints / "global_step_4").rename(checkpoints / "global_step_4.1")
    assert find_model(str(tmp_path / "run"), None).model == str(checkpoints / "global_step_2/actor")
    aside = find_model(str(checkpoints / "global_step_4.1"), None)
    assert aside.model == str(checkpoints / "global_step_4.1/actor")
    assert aside.config.data.max_response_length == 8, "the run's"


def test_a_run_without_checkpoints_says_how_to_get_them(finished_run: Path, tmp_path: Path) -> None:
    for name in ("config.yaml", "metrics.jsonl"):
        shutil.copy(finished_run / name, tmp_path / name)
    with pytest.raises(ConfigError, match=r"has no checkpoint; it has none. trainer.save_freq saves them"):
        find_model(str(tmp_path), None)


def test_a_secret_that_the_reward_needs_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run saves *** for it, which would go to the function as if it were the key."""
    folder = begin_checkpoint(tmp_path / "checkpoints", 2)
    (folder / "actor").mkdir()
    (folder / "actor/config.json").touch()
    complete_checkpoint(folder, {"global_step": 2})
    saved = tmp_path / "config.yaml"
    reward = "custom_reward_function: {path: reward.py, reward_kwargs: {judge: {api_key: VALUE}, url: 'http://a'}}\n"
    unused = "ray_kwargs: {ray_init: {runtime_env: {env_vars: {HF_TOKEN: '***'}}}}\n"
    saved.write_text(reward.replace("VALUE", "'***'") + unused)
    with pytest.raises(ConfigError) as caught:
        find_model(str(tmp_path), None)
    (problem,) = caught.value.problems
    assert problem.startswith(f"custom_reward_function.reward_kwargs.judge.api_key is *** in {saved}: ")
    assert "Write ${oc.env:NAME} there" in problem

    saved.write_text(reward.replace("VALUE", "'${oc.env:JUDGE_KEY}'") + unused)
    with pytest.raises(ConfigError, match="JUDGE_KEY"):
        find_model(str(tmp_path), None)
    monkeypatch.setenv("JUDGE_KEY", "abc")
    given = find_model(str(tmp_path), None).config.custom_reward_function.reward_kwargs
    assert given == {"judge": {"api_key": "abc"}, "url": "http://a"}


def test_the_module_of_a_run_is_imported_since_it_may_have_the_scorers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external, "_imported", {})
    folder = begin_checkpoint(tmp_path / "checkpoints", 2)
    (folder / "actor").mkdir()
    (folder / "actor/config.json").touch()
    complete_checkpoint(folder, {"global_step": 2})
    module = tmp_path / "a_runs_module.py"
    (tmp_path / "config.yaml").write_text(f"actor_rollout_ref: {{model: {{external_lib: '{module}'}}}}\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: .*external_lib=.*a_runs_module.py can't be imported"):
        find_model(str(tmp_path), None)
    module.write_text("")
    find_model(str(tmp_path), None)
    assert external.imported_modules() == (str(module),)


def test_prompts_take_no_more_memory_than_their_own_tokens(tmp_path: Path) -> None:
    material = make_material(tmp_path)
    policy = SavedPolicy.open(str(material / "model"), None, SamplingOptions(max_tokens=2))
    data = policy.read_data(str(material / "test.parquet"), limit=6)
    typed = [policy.read_prompt(text) for text in ("1+1=", "12345+1=")]
    for row in (*data, *typed):
        for name in ("input_ids", "attention_mask", "position_ids"):
            assert row[name].untyped_storage().nbytes() == 8 * len(row["input_ids"])
    batch = policy.answer(typed, n=1, seed=0).batch
    short, long = (len(row["input_ids"]) for row in typed)
    padding = long - short
    assert batch["prompts"][0].tolist() == [policy.tokenizer.pad_token_id] * padding + typed[0]["input_ids"].tolist()
    assert batch["attention_mask"][0, :long].tolist() == [0] * padding + [1] * short
    assert batch["position_ids"][0, :long].tolist() == [0] * padding + list(range(short))


def test_a_response_does_not_depend_on_which_prompts_came_before(tmp_path: Path) -> None:
    material = make_material(tmp_path)
    policy = SavedPolicy.open(str(material / "model"), None, SamplingOptions(max_tokens=4))
    rows = policy.read_data(str(material / "test.parquet"), limit=6)
    together = policy.answer(rows, n=2, seed=3).batch["responses"].tolist()
    parts = [policy.answer(rows[start : start + 2], n=2, seed=3, first_row=start) for start in (0, 2, 4)]
    assert [row for part in parts for row in part.batch["responses"].tolist()] == together


def test_vllm_does_not_read_adapters(tmp_path: Path) -> None:
    model = make_material(tmp_path) / "model"
    (model / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is an adapter of LoRA, and vLLM reads whole models"):
        SavedPolicy.open(str(model), None, SamplingOptions(), "vllm")
