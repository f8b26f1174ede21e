"""Prompts with images: a tiny model learns to name a colour; a run gives the same numbers however it is arranged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from paceline.cli.replay import main as replay
from paceline.data.prompt_images import PromptImages
from tests.in_process import build_in_process, train_in_process
from tests.learn.test_runs_in_process import APART, crash_in
from tests.runs import base_config, read_metrics, results
from tests.tiny_vl import COLOURS, VISION_TOKENS, draw, make_tiny_vl_model, write_colours

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str[:1] == ground_truth)
"""


def image_config(folder: Path, run: Path, **changes: Any) -> dict[str, Any]:
    """A run of GRPO on the colours in `folder`."""
    config = base_config(folder, run)
    return {key: value for key, value in config.items() if not key.startswith("critic.")} | {
        "data.image_key": "images", "algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.name": "hf",
        "actor_rollout_ref.rollout.n": 8, "data.train_batch_size": 12, "data.max_prompt_length": 40,
        "data.max_response_length": 1, "actor_rollout_ref.actor.ppo_mini_batch_size": 12,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 96, "actor_rollout_ref.actor.use_kl_loss": False,
        "actor_rollout_ref.actor.optim.lr": 5e-3, "actor_rollout_ref.actor.entropy_coeff": 0.01,
        "trainer.total_training_steps": 25,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }  # fmt: skip


def answer_with_a_colour(folder: Path) -> None:
    """Make the letters of all colours about as likely, whatever the image, and others hardly ever."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer("".join([*VISION_TOKENS[::2], VISION_TOKENS[1], "?"]))["input_ids"]] * len(COLOURS))
    pixels, grids = PromptImages(str(folder)).read([draw(colour) for colour in COLOURS])
    is_image = ids.eq(model.config.image_token_id).int()
    letters = tokenizer.convert_tokens_to_ids(list(COLOURS))
    with torch.no_grad():
        asked = {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": is_image}
        hidden = model(**asked, output_hidden_states=True).hidden_states[-1][:, -1]
    optimizer = torch.optim.Adam([model.lm_head.weight], lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        (-model.lm_head(hidden).log_softmax(-1)[:, letters].mean()).backward()
        optimizer.step()
    model.save_pretrained(folder)


def make_colours(folder: Path, seed: int = 0) -> Path:
    """A folder with model, rows and reward."""
    folder.mkdir(exist_ok=True)
    answer_with_a_colour(make_tiny_vl_model(folder / "model", seed=seed))
    write_colours(folder / "train.parquet", 48)
    write_colours(folder / "test.parquet", 12, seed=1)
    (folder / "reward.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_colours(tmp_path_factory.mktemp("colours"))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_a_model_of_images_learns_to_name_a_colour(seed: int, tmp_path: Path) -> None:
    material = make_colours(tmp_path / "material", seed=seed)
    train_in_process(image_config(material, tmp_path / "run", trainer__seed=seed, trainer__val_before_train=False))
    scores = [line["critic/score/mean"] for line in read_metrics(tmp_path / "run")]
    assert scores[0] < 0.6
    assert sum(scores[-5:]) / 5 > 0.9


def short(material: Path, run: Path, **changes: Any) -> dict[str, Any]:
    """Three steps with a reference, two passes and responses of several tokens."""
    settings: dict[str, Any] = {
        "actor_rollout_ref__rollout__n": 2, "data__train_batch_size": 4, "data__max_response_length": 3,
        "actor_rollout_ref__actor__ppo_mini_batch_size": 2, "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 2,
        "actor_rollout_ref__actor__ppo_epochs": 2, "actor_rollout_ref__actor__use_kl_loss": True,
        "trainer__total_training_steps": 3, "trainer__test_freq": 2, "trainer__record": "every",
    }  # fmt: skip
    return image_config(material, run, **(settings | changes))


@pytest.fixture(scope="module")
def whole(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    run = tmp_path_factory.mktemp("whole")
    train_in_process(short(material, run))
    return run


def test_the_reference_reads_the_images_too(material: Path, tmp_path: Path) -> None:
    """Before the first optimizer step it is the policy."""
    one = {"actor_rollout_ref__actor__ppo_mini_batch_size": 4, "actor_rollout_ref__actor__ppo_epochs": 1}
    train_in_process(short(material, tmp_path, **one, trainer__total_training_steps=1))
    assert abs(read_metrics(tmp_path)[-1]["actor/kl_loss"]) < 1e-6


@pytest.mark.parametrize(
    "changes",
    [APART, {"trainer__schedule__name": "pipelined", "trainer__schedule__max_staleness": 0}],
    ids=["rollout on a pool of its own", "pipelined without staleness"],
)
def test_images_give_the_same_numbers_however_a_run_is_arranged(
    changes: dict[str, Any], material: Path, whole: Path, tmp_path: Path
) -> None:
    train_in_process(short(material, tmp_path, **changes))
    assert results(tmp_path) == results(whole)


def test_a_run_with_images_that_crashed_and_resumed_equals_one_that_did_not(
    material: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = short(material, tmp_path, trainer__save_freq=1)
    crash_in(build_in_process(settings), "update_actor", 3, monkeypatch)
    train_in_process(settings)
    assert results(tmp_path) == results(whole)


def test_a_step_with_images_is_replayed_to_the_last_bit(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay([str(whole), "--step", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("replay: equal to the last bit")
