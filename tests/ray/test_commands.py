"""The commands of README and examples, typed as a user would."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.trainer.ppo.ray_trainer import fit
from tests.mixed import make_mixed_material, mixed_config
from tests.runs import as_overrides, base_config, make_material, read_metrics
from tests.tiny import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "split_placement"

SPLIT_EXAMPLE = (
    "examples/split_placement/main_ppo_split.py",
    "--config-path=config",
    "--config-name=ppo_trainer_split",
)


def run(arguments: list[str], folder: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_split_example_trains_on_two_pools(tmp_path: Path) -> None:
    material = make_mixed_material(tmp_path / "material")
    config = mixed_config(material, tmp_path / "run", trainer__total_training_steps=2)
    config.pop("custom_reward_function.path")
    run([*SPLIT_EXAMPLE, *as_overrides(config)], ROOT)
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [0, 1, 2]
    timeline = (tmp_path / "run" / "timeline.json").read_text()
    assert "actor_rollout_ref_pool actor_rollout+ref rank 0" in timeline
    assert "critic_pool critic+rm rank 0" in timeline


DYING_REWARD = '''
import os, pathlib, signal

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Kills the worker that called it, once, after the first checkpoint."""
    run = pathlib.Path(__file__).parent
    if (run / "run/checkpoints/latest_checkpointed_iteration.txt").exists() and not (run / "died").exists():
        (run / "died").touch()
        os.kill(os.getppid(), signal.SIGKILL)
    return 1.0
'''


@pytest.mark.slow
def test_the_split_example_has_restarts_the_live_view_notes_and_last_words(tmp_path: Path) -> None:
    config = base_config(
        make_material(tmp_path),
        tmp_path / "run",
        trainer__save_freq=1,
        trainer__max_restarts=1,
        trainer__live_view=True,
        actor_rollout_ref__actor__use_kl_loss=False,
        actor_rollout_ref__ref__log_prob_micro_batch_size_per_gpu=3,
    )
    (tmp_path / "reward.py").write_text(DYING_REWARD)
    shown = run([*SPLIT_EXAMPLE, *as_overrides(config)], ROOT, COLUMNS="500")  # the view breaks lines at its width
    assert (tmp_path / "died").exists()
    assert "starting again from the last checkpoint; 0 more restarts" in shown
    assert read_metrics(tmp_path / "run")[-1]["step"] == 4
    assert "no KL term is on, so there is no reference" in shown
    assert "╭─ paceline ─" in shown
    assert f"next: paceline report {tmp_path / 'run'}" in shown


def test_an_estimator_a_loss_and_a_worker_of_ones_own_need_no_change_here(tmp_path: Path) -> None:
    material = make_material(tmp_path / "material")
    config = base_config(
        material,
        tmp_path / "run",
        trainer__total_training_steps=16,
        algorithm__adv_estimator="median",
        actor_rollout_ref__actor__policy_loss__loss_mode="unclipped",
        actor_rollout_ref__actor__use_kl_loss=False,
        actor_rollout_ref__actor__optim__lr=4e-3,
        actor_rollout_ref__rollout__n=4,
        reward_model__enable=True,
        reward_model__model__path=str(material / "model"),
        reward_model__weights="{openai/gsm8k: {rule: 0, model: 1}}",
    )
    del config["custom_reward_function.path"]
    run(["examples/extending/main.py", *as_overrides(config)], ROOT)
    lines = read_metrics(tmp_path / "run")[1:]
    assert all("actor/importance_weight" in line for line in lines)
    scores = [line["reward/openai/gsm8k/model_score"] for line in lines]
    assert sum(scores[-4:]) > 1.3 * sum(scores[:4])
    code = [file.read_text() for file in (ROOT / "examples" / "extending").glob("*.py")]
    assert sum(len(text.splitlines()) for text in code) < 150


@pytest.mark.slow
def test_the_reward_model_example_teaches_a_policy(tmp_path: Path) -> None:
    output = run(["examples/reward_model/demo.py", "--output", str(tmp_path / "calm")], ROOT)
    assert "the trained model is in" in output
    right = read_metrics(tmp_path / "calm" / "reward_model")
    assert right[0]["val/accuracy"] < 0.9
    assert right[-1]["val/accuracy"] == 1.0
    lines = read_metrics(tmp_path / "calm" / "run")
    key = "val-core/Dahoas/full-hh-rlhf/reward/mean@1"
    assert lines[-1][key] > lines[0][key] + 1


def test_the_parts_of_the_split_example_can_be_imported() -> None:
    """From the clone and from their own folder."""
    code = "from examples.split_placement.main_ppo_split import RewardManager\nfrom split_monkey_patch import fit"
    run(["-c", code], ROOT, PYTHONPATH=str(EXAMPLE))


def readme_block(containing: str) -> str:
    blocks = (ROOT / "README.md").read_text().split("```python\n")[1:]
    (block,) = [block.split("```")[0] for block in blocks if containing in block]
    return block


@pytest.mark.slow
def test_the_python_example_of_the_readme_runs(tmp_path: Path) -> None:
    make_material(tmp_path)
    (tmp_path / "example.py").write_text(readme_block("run_ppo("))
    run(["example.py"], tmp_path, PYTHONPATH=str(ROOT))
    assert read_metrics(tmp_path / "runs" / "paceline" / "ppo")[-1]["step"] == 2


def test_the_readme_shows_the_loop_as_it_is() -> None:
    assert readme_block("def fit(").strip() == inspect.getsource(fit).strip()


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_the_documented_command_needs_no_other_overrides(tmp_path: Path, devices: int) -> None:
    """On all defaults: 30 epochs over a data set that is smaller than the default batch."""
    material = make_material(tmp_path / "material", rows=6)
    make_tiny_model(material / "model", max_position_embeddings=1024)  # the default lengths together
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    for name in ("train", "test"):
        (material / f"{name}.parquet").rename(tmp_path / "data" / "gsm8k" / f"{name}.parquet")
    command = ["-m", "paceline.trainer.main_ppo", f"trainer.n_gpus_per_node={devices}", "trainer.nnodes=1"]
    command += [f"actor_rollout_ref.model.path={material / 'model'}"]
    command += ["data.train_files=~/data/gsm8k/train.parquet", "data.val_files=~/data/gsm8k/test.parquet"]
    run(command, tmp_path, HOME=str(tmp_path), PYTHONPATH=str(ROOT))
    assert read_metrics(tmp_path / "runs" / "paceline" / "ppo")[-1]["step"] == 30
