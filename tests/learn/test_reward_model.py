"""The reward model in real runs, in this process: which rows it scores, how, and what comes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from paceline.errors import ConfigError, UnknownDataSourceError
from paceline.protocol import DataProto
from paceline.single_controller.in_process import InProcessWorkerGroup
from paceline.trainer.main_ppo import TaskRunner, complete_config
from paceline.trainer.ppo.ray_trainer import RayPPOTrainer
from paceline.trainer.ppo.scoring import grader_fields
from paceline.trainer.ppo.step import make_requests
from paceline.workers.engine_workers import TrainingWorker
from tests.in_process import build_in_process, train_in_process
from tests.mixed import CODE, GSM8K, HH, make_mixed_material, make_reward_model, mixed_config, mixed_rows, teach
from tests.runs import as_omegaconf, read_metrics, results


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixed_material(tmp_path_factory.mktemp("mixed"))


def sampled(trainer: RayPPOTrainer) -> DataProto:
    requests, labels, _ = trainer.draw_requests("training", step=0)
    return labels.union(trainer.generate(requests).get())


def scores_by_transformers(folder: Path, texts: list[str]) -> list[float]:
    """The slow way: one text at a time, through Hugging Face's own classifier."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    with torch.no_grad():
        return [model(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits.item() for text in texts]


def response_texts(trainer: RayPPOTrainer, batch: DataProto) -> list[str]:
    masks = batch.batch["response_mask"].bool()
    ids = [row[mask].tolist() for row, mask in zip(batch.batch["responses"], masks, strict=True)]
    return trainer.tokenizer.batch_decode(ids, skip_special_tokens=True)


def test_each_row_of_a_mixed_batch_is_scored_by_its_own_scorer(tmp_path: Path) -> None:
    """The model was taught the right answer to every sum and program, but for the last ones."""
    material = make_mixed_material(tmp_path / "material")
    rows = mixed_rows(12)
    answer = {GSM8K: "####{}", HH: "hello", CODE: "x={}"}
    right = [str(index if index < 9 else 0) for index in range(12)]
    answers = {
        row["prompt"][0]["content"]: answer[row["data_source"]].format(right[index]) for index, row in enumerate(rows)
    }
    teach(material / "model", answers)
    train_in_process(mixed_config(material, tmp_path / "run", actor_rollout_ref__actor__optim__lr=0.0))
    lines = read_metrics(tmp_path / "run")
    assert lines[0][f"val-core/{GSM8K}/acc/mean@1"] == pytest.approx(3 / 4)
    assert lines[0][f"val-core/{CODE}/acc/mean@1"] == pytest.approx(3 / 4)
    assert lines[0][f"val-core/{HH}/reward/mean@1"] != 0.0
    assert len(lines) == 4
    for source in (GSM8K, CODE):
        assert any(line[f"reward/{source}/score"] > 0 for line in lines[1:])
    for line in lines[1:]:
        assert line[f"reward/{HH}/score"] not in (0.0, 1.0)
        assert line["reward/grader_errors"] == 0.0
        assert line["timing_s/rm"] > 0


def test_a_reward_model_on_a_pool_of_its_own_gives_the_same_numbers(material: Path, tmp_path: Path) -> None:
    train_in_process(mixed_config(material, tmp_path / "shared"))
    own = {"reward_model__enable_resource_pool": True}
    train_in_process(mixed_config(material, tmp_path / "own", **own))
    assert results(tmp_path / "own") == results(tmp_path / "shared")
    pools = {
        event["args"]["name"].split()[0]
        for event in json.loads((tmp_path / "own" / "timeline.json").read_text())["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert "reward_model_pool" in pools


def test_the_model_reads_the_chat_in_its_own_template(material: Path, tmp_path: Path) -> None:
    trainer = build_in_process(mixed_config(material, tmp_path))
    batch = sampled(trainer)
    pending = trainer.score(batch)
    scores = pending.get().batch["token_level_scores"]
    is_hh = np.array([source == HH for source in batch.non_tensor_batch["data_source"]])
    texts = [
        f"[user] {chat[0]['content']}\n[assistant] {response}\n"
        for chat, response in zip(batch.non_tensor_batch["raw_prompt"], response_texts(trainer, batch), strict=True)
    ]
    expected = np.array(scores_by_transformers(material / "reward_model", texts))
    np.testing.assert_allclose(scores.sum(-1).numpy()[is_hh], expected[is_hh], rtol=1e-4)
    assert (scores[torch.from_numpy(~is_hh)] == 0).all()
    # At the last token of the response, and nowhere else.
    last = batch.batch["response_mask"].sum(dim=-1) - 1
    assert torch.equal(scores.nonzero()[:, 1], last[torch.from_numpy(is_hh)])
    assert np.isnan(grader_fields(pending.get())["model_score"][~is_hh]).all()


def test_a_model_that_speaks_as_the_policy_does_reads_the_sampled_tokens(material: Path, tmp_path: Path) -> None:
    judge = make_reward_model(tmp_path / "judge", material / "model")
    trainer = build_in_process(mixed_config(material, tmp_path / "run", reward_model__model__path=str(judge)))
    batch = sampled(trainer)
    scores = trainer.score(batch).get().batch["token_level_scores"].sum(-1).numpy()
    model = AutoModelForSequenceClassification.from_pretrained(judge, num_labels=1).eval()
    for row in np.flatnonzero([source == HH for source in batch.non_tensor_batch["data_source"]]):
        tokens = batch.batch["input_ids"][row][batch.batch["attention_mask"][row].bool()]
        with torch.no_grad():
            expected = model(input_ids=tokens[None]).logits.item()
        assert scores[row] == pytest.approx(expected, rel=1e-4)


def test_weights_add_the_models_score_to_a_rules(material: Path, tmp_path: Path) -> None:
    weights = {GSM8K: {"rule": 1.0, "model": 0.5}}
    trainer = build_in_process(mixed_config(material, tmp_path, reward_model__weights=weights))
    batch = sampled(trainer)
    pending = trainer.score(batch)
    scores = pending.get().batch["token_level_scores"].sum(-1).numpy()
    sources = batch.non_tensor_batch["data_source"]
    for row, source in enumerate(sources):
        weight = {GSM8K: 0.5, HH: 1.0, CODE: 0.0}[source]
        model_score = 0.0 if source == CODE else grader_fields(pending.get())["model_score"][row]
        assert scores[row] == pytest.approx(weight * model_score, rel=1e-5)


def test_validation_is_scored_by_rule_alone_if_the_configuration_says_so(material: Path, tmp_path: Path) -> None:
    from tests.runs import write_sums

    weights = {GSM8K: {"rule": 0.5, "model": 0.5}}
    settings = {"reward_model__weights": weights, "reward_model__validate": False}
    sums = str(write_sums(tmp_path / "sums.parquet", 8))
    trainer = build_in_process(mixed_config(material, tmp_path / "run", data__val_files=sums, **settings))
    requests, labels = make_requests(next(iter(trainer.val_dataloader)), n=1, seed=0, purpose="validation", step=0)
    batch = labels.union(trainer.generate(requests, trainer.cfg.actor_rollout_ref.rollout).get())
    for validation in (True, False):
        pending = trainer.grade(batch, validation=validation)
        assert ("model_score" in grader_fields(pending.get())) is not validation
    with pytest.raises(UnknownDataSourceError, match=f"{HH}.*has no rule"):
        build_in_process(mixed_config(material, tmp_path / "other", **settings))


def test_a_long_text_loses_its_beginning(material: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = build_in_process(mixed_config(material, tmp_path, reward_model__max_length=7))
    trainer.score(sampled(trainer)).get()
    assert "longer than the reward model reads (7 tokens)" in caplog.text


def test_a_model_without_a_score_head_is_refused(material: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no score head"):
        build_in_process(mixed_config(material, tmp_path, reward_model__model__path=str(material / "model")))


def test_a_model_that_nobody_asks_is_refused(material: Path, tmp_path: Path) -> None:
    from tests.runs import write_sums

    sums = str(write_sums(tmp_path / "sums.parquet", 8))
    with pytest.raises(ConfigError, match=r"reward_model\.weights"):
        build_in_process(mixed_config(material, tmp_path, data__train_files=sums, data__val_files=sums))


class LengthJudge(TrainingWorker):
    """A reward model of the user's own: no model at all."""

    def init_reward_model(self, config: Any) -> None:
        self.longest = self.run.max_response_length

    def score(self, data: DataProto) -> torch.Tensor:
        return data.batch["response_mask"].sum(dim=-1) / self.longest


class LengthRunner(TaskRunner):
    def add_reward_model_worker(self, config: Any) -> None:
        super().add_reward_model_worker(config)
        from paceline.trainer.ppo.roles import Role

        self.role_worker_mapping[Role.RewardModel] = LengthJudge


def test_a_reward_model_of_the_users_own_by_subclass(material: Path, tmp_path: Path) -> None:
    cfg = complete_config(as_omegaconf(mixed_config(material, tmp_path)))
    trainer = LengthRunner().build_trainer(cfg, InProcessWorkerGroup)
    trainer.init_workers()
    batch = sampled(trainer)
    scores = trainer.score(batch).get().batch["token_level_scores"].sum(-1)
    is_hh = torch.tensor([source == HH for source in batch.non_tensor_batch["data_source"]])
    lengths = batch.batch["response_mask"].sum(dim=-1) / 8
    assert torch.equal(scores, torch.where(is_hh, lengths, 0.0))
