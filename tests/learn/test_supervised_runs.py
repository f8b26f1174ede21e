"""Real runs on given texts, in this process: losses against a slow way, micro-batches, resuming, what is written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from paceline.config import DPOConfig, RewardModelTrainingConfig, SFTConfig, SupervisedConfig
from paceline.errors import CheckpointError
from paceline.report.live import closing_text
from paceline.report.page.build import page_data
from paceline.trainer.hf_export import export_run
from paceline.trainer.saved_policy import SamplingOptions, SavedPolicy
from tests.runs import read_metrics, results
from tests.texts import build_texts_trainer, make_texts, quiet_pairs, sums, text_config, train_on_texts, write_rows
from tests.tiny import CHAT_TEMPLATE

KINDS: dict[type[SupervisedConfig], str] = {
    SFTConfig: "chats",
    RewardModelTrainingConfig: "pairs",
    DPOConfig: "pairs",
}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_texts(tmp_path_factory.mktemp("texts"))


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "model/model.safetensors")


# The slow way: one text at a time, through Hugging Face's own models.


def token_log_probs(model: Any, text: str, start: int) -> torch.Tensor:
    """Of the characters from `start` on: the tiny tokenizer has a token for each."""
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        log_probs = model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return log_probs[start - 1 :]


def chat_text(messages: list[dict[str, str]]) -> str:
    return "".join(f"{message['role']}: {message['content']}\n" for message in messages)


def slow_sft_loss(folder: Path, rows: list[dict[str, Any]]) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    trained = []
    for row in rows:
        messages = row["messages"]
        for turn in range(1, len(messages), 2):
            before, after = chat_text(messages[:turn]) + "assistant: ", chat_text(messages[: turn + 1])
            trained.append(token_log_probs(model, after, len(before)))
    return -float(torch.cat(trained).mean())


def slow_pairs(folder: Path, row: dict[str, Any]) -> list[str]:
    before = chat_text(row["prompt"])
    return [before + f"assistant: {row[name]}\n" for name in ("chosen", "rejected")]


def slow_pair_loss(folder: Path, rows: list[dict[str, Any]]) -> float:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    losses = []
    for row in rows:
        with torch.no_grad():
            scores = [
                model(tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids).logits.item()
                for text in slow_pairs(folder, row)
            ]
        losses.append(math.log(1 + math.exp(scores[1] - scores[0])) + 0.01 * (scores[0] + scores[1]) ** 2)
    return sum(losses) / len(losses)


def slow_dpo_loss(folder: Path, base: Path, rows: list[dict[str, Any]], form: str, beta: float) -> float:
    model, reference = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (folder, base))
    losses = []
    for row in rows:
        start = len(chat_text(row["prompt"]) + "assistant: ")
        ratios = [
            token_log_probs(model, text, start) - token_log_probs(reference, text, start)
            for text in slow_pairs(folder, row)
        ]
        chosen, rejected = (float(ratio.sum() if form == "sigmoid" else ratio.mean()) for ratio in ratios)
        h = chosen - rejected
        losses.append((h - 1 / (2 * beta)) ** 2 if form == "ipo" else math.log(1 + math.exp(-beta * h)))
    return sum(losses) / len(losses)


def test_the_template_of_the_slow_way_is_that_of_the_tokenizer(material: Path) -> None:
    messages = sums(2)[1]["messages"]
    tokenizer = AutoTokenizer.from_pretrained(material / "model")
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.apply_chat_template(messages, tokenize=False) == chat_text(messages)


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_sft_learns_and_its_loss_is_that_of_the_model_it_writes(material: Path, tmp_path: Path, lora_rank: int) -> None:
    lora = {"model__lora_rank": lora_rank, "model__lora_alpha": 8, "trainer__val_before_train": True}
    run_dir = train_on_texts(SFTConfig, text_config(material, tmp_path, trainer__test_freq=6, **lora))
    lines = read_metrics(run_dir)
    assert len(lines) == 7
    held_out = sums(5, seed=1)
    assert lines[0]["val/loss"] == pytest.approx(slow_sft_loss(material / "model", held_out), rel=1e-5)
    assert lines[-1]["val/loss"] == pytest.approx(slow_sft_loss(run_dir / "model", held_out), rel=1e-5)
    assert lines[-1]["val/loss"] < 0.8 * lines[0]["val/loss"]
    (page,) = page_data([run_dir])["runs"]
    summary, config = dict(page["summary"]), {key: differs for key, _, _, differs in page["config"]}
    assert summary["model"] == str(material / "model")
    assert config["data.max_length"]
    assert not config["data.trained_turns"]
    assert summary["val/loss"] == f"{lines[0]['val/loss']:.4f} → {lines[-1]['val/loss']:.4f}"
    assert closing_text(run_dir).startswith("lowest validation loss")


def test_a_checkpoint_is_exported_and_answers_as_that_of_ppo_does(material: Path, tmp_path: Path) -> None:
    config = text_config(material, tmp_path / "run", model__lora_rank=4, trainer__save_freq=None)
    run_dir = train_on_texts(SFTConfig, config)
    exported = export_run(run_dir, tmp_path / "exported")
    assert exported.merged
    found = load_file(tmp_path / "exported/model.safetensors")
    for name, weight in weights_of(run_dir).items():
        torch.testing.assert_close(found[name], weight)
    policy = SavedPolicy.open(str(run_dir), None, SamplingOptions(temperature=0, max_tokens=4))
    assert policy.origin.step == 6
    assert policy.origin.config.actor_rollout_ref.model.lora_rank == 4


def test_a_reward_model_is_no_policy(material: Path, tmp_path: Path) -> None:
    config = text_config(material, tmp_path / "run", "pairs", trainer__save_freq=None)
    run_dir = train_on_texts(RewardModelTrainingConfig, config)
    with pytest.raises(CheckpointError, match="is a reward model, and no policy"):
        export_run(run_dir, tmp_path / "exported")


def test_a_reward_model_has_the_loss_of_its_pairs_and_can_be_read(material: Path, tmp_path: Path) -> None:
    centered = {"loss__center_rewards_coefficient": 0.01, "trainer__test_freq": 6}
    run_dir = train_on_texts(RewardModelTrainingConfig, text_config(material, tmp_path, "pairs", **centered))
    last = read_metrics(run_dir)[-1]
    assert last["val/loss"] == pytest.approx(slow_pair_loss(run_dir / "model", quiet_pairs(5, seed=1)), rel=1e-4)
    assert last["val/accuracy"] == 1.0
    assert last["val/margin"] > 1.0


@pytest.mark.parametrize(
    ("form", "beta", "lora_rank"), [("sigmoid", 0.1, 0), ("sigmoid_norm", 2.0, 0), ("ipo", 0.2, 0), ("sigmoid", 0.1, 4)]
)
def test_dpo_has_the_loss_of_its_form_against_the_model_at_the_start(
    material: Path, tmp_path: Path, form: str, beta: float, lora_rank: int
) -> None:
    settings = {"loss__form": form, "loss__beta": beta, "model__lora_rank": lora_rank, "trainer__test_freq": 6}
    run_dir = train_on_texts(DPOConfig, text_config(material, tmp_path, "pairs", **settings))
    lines = read_metrics(run_dir)
    assert lines[0]["train/loss"] == pytest.approx(1 / (2 * beta) ** 2 if form == "ipo" else math.log(2), rel=1e-4)
    slow = slow_dpo_loss(run_dir / "model", material / "model", quiet_pairs(5, seed=1), form, beta)
    assert lines[-1]["val/loss"] == pytest.approx(slow, rel=1e-4)
    assert lines[-1]["val/accuracy"] == 1.0


@pytest.mark.parametrize("root", KINDS, ids=lambda root: root.__name__)
def test_micro_batches_and_packing_change_an_update_by_rounding_alone(
    material: Path, tmp_path: Path, root: type[SupervisedConfig]
) -> None:
    """Padding is what a rank gets that has no row left; with packing, rows are not padded at all."""
    cuts: list[dict[str, Any]] = [
        {"data__micro_batch_size_per_gpu": 4, "model__use_remove_padding": False},
        {"data__micro_batch_size_per_gpu": 1, "model__use_remove_padding": False},
        {"data__micro_batch_size_per_gpu": 3, "model__use_remove_padding": True},
        {"data__max_token_len_per_gpu": 60, "model__use_remove_padding": True},
        {"data__max_token_len_per_gpu": 1, "model__use_remove_padding": False},
        {"data__max_token_len_per_gpu": 60, "engine__strategy": "fsdp2"},
    ]
    runs = [
        train_on_texts(root, text_config(material, tmp_path / str(number), KINDS[root], optim__lr=1e-3, **cut))
        for number, cut in enumerate(cuts)
    ]
    first = read_metrics(runs[0])
    for run_dir in runs[1:]:
        for line, other in zip(first, read_metrics(run_dir), strict=True):
            for name in ("train/loss", "train/grad_norm"):
                assert other[name] == pytest.approx(line[name], rel=2e-4, abs=1e-6)
        expected, found = weights_of(runs[0]), weights_of(run_dir)
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=2e-4)


@pytest.mark.parametrize("root", KINDS, ids=lambda root: root.__name__)
def test_resumed_equals_uninterrupted_within_at_and_across_epochs(
    material: Path, tmp_path: Path, root: type[SupervisedConfig]
) -> None:
    """An epoch has three steps; the run ends in the third."""
    config = {"trainer__total_training_steps": 7, "optim__lr_scheduler_type": "cosine", "trainer__test_freq": 2}
    whole = train_on_texts(root, text_config(material, tmp_path / "whole", KINDS[root], **config))
    for stop in (2, 3, 5):
        folder = tmp_path / f"stopped_{stop}"
        changed = text_config(material, folder, KINDS[root], trainer__save_freq=stop, **config)
        trainer = build_texts_trainer(root, changed)
        ends = trainer.end

        def end_there(*arguments: Any, at: int = stop, ends: Any = ends, folder: Path = folder) -> None:
            if arguments and read_metrics_count(folder) + 1 == at:
                (folder / "stop").touch()
            ends(*arguments)

        trainer.end = end_there  # type: ignore[method-assign]
        trainer.fit()
        assert len(read_metrics(folder)) == stop
        resumed = train_on_texts(root, changed)
        assert results(resumed, "train/never") == results(whole)
        expected, found = weights_of(whole), weights_of(resumed)
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def read_metrics_count(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(read_metrics(folder)) if file.exists() else 0


def test_a_step_that_is_not_finite_ends_the_run_or_is_left_out(material: Path, tmp_path: Path) -> None:
    from paceline.errors import NonFiniteError

    broken = {"optim__lr": 1e30, "trainer__total_training_steps": 3}
    with pytest.raises(NonFiniteError):
        train_on_texts(SFTConfig, text_config(material, tmp_path / "stop", **broken))
    run_dir = train_on_texts(
        SFTConfig, text_config(material, tmp_path / "skip", trainer__on_nonfinite="skip", **broken)
    )
    assert read_metrics(run_dir)[-1]["train/skipped_updates"] == 1.0


def test_only_validation_trains_nothing(material: Path, tmp_path: Path) -> None:
    run_dir = train_on_texts(SFTConfig, text_config(material, tmp_path, trainer__val_only=True))
    assert [set(line) - {"step"} for line in read_metrics(run_dir)] == [{"val/loss"}]
    assert not (run_dir / "model").exists()


@pytest.mark.slow
def test_a_reward_model_finds_a_hidden_rule_although_a_tenth_of_the_labels_is_wrong(tmp_path: Path) -> None:
    material = make_texts(tmp_path / "material")
    write_rows(material / "pairs.parquet", quiet_pairs(512, seed=2, flipped=0.1))
    write_rows(material / "val_pairs.parquet", quiet_pairs(256, seed=3))
    config = text_config(
        material,
        tmp_path / "run",
        "pairs",
        data__train_batch_size=32,
        optim__lr=1e-3,
        trainer__total_epochs=3,
        trainer__val_before_train=True,
        trainer__test_freq=None,
    )
    lines = read_metrics(train_on_texts(RewardModelTrainingConfig, config))
    assert 0.2 < lines[0]["val/accuracy"] < 0.8
    assert lines[-1]["val/accuracy"] > 0.9
    assert lines[-1]["val/calibration_error"] < 0.2
