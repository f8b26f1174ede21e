"""Which micro-batches the workers ask their engines for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.config import (
    ActorConfig,
    ActorRolloutRefConfig,
    CriticConfig,
    RefConfig,
    RewardModelConfig,
    RolloutConfig,
)
from paceline.protocol import DataProto
from paceline.workers.engine_workers import ActorRolloutRefWorker, RunContext, TrainingWorker

RUN = RunContext(seed=0, device="cpu", total_optimizer_steps=1, max_prompt_length=4, max_response_length=4)


class RecordingEngine:
    """Takes note of the sizes it is asked for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, int]] = []

    def on_device(self, *, optimizer: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def without_adapter(self) -> AbstractContextManager[None]:
        return nullcontext()

    def infer_batch(self, data: DataProto, *, temperature: float = 1.0, **sizes: int) -> dict[str, torch.Tensor]:
        self.asked.append(sizes)
        return {name: torch.zeros(len(data), 4) for name in ("log_probs", "values")} | {
            "scores": torch.zeros(len(data))
        }

    def train_batch(self, data: DataProto, loss_fn: Any, *, temperature: float = 1.0, **sizes: int) -> dict[str, float]:
        self.asked.append(sizes)
        return {"loss": 0.0, "grad_norm": 0.0, "lr": 0.0}


def make_data() -> DataProto:
    data = DataProto.from_dict({"response_mask": torch.ones(2, 4, dtype=torch.int64)})
    data.meta_info |= {"passes": 1, "mini_batches": []}
    return data


ACTOR = ActorConfig(ppo_micro_batch_size_per_gpu=3, ppo_max_token_len_per_gpu=100)
ROWS_OF_16, BUDGET = {"micro_batch_size": 16}, {"max_tokens": 100}


@pytest.mark.parametrize(
    ("actor", "section", "asked"),
    [
        (ACTOR, {}, ROWS_OF_16),
        (replace(ACTOR, use_dynamic_bsz=True), {}, BUDGET),
        (replace(ACTOR, use_dynamic_bsz=True), {"log_prob_max_token_len_per_gpu": 7}, {"max_tokens": 7}),
        (replace(ACTOR, use_dynamic_bsz=True), {"log_prob_use_dynamic_bsz": False}, ROWS_OF_16),
        (ACTOR, {"log_prob_use_dynamic_bsz": True}, BUDGET),
        (ACTOR, {"log_prob_max_token_len_per_gpu": 7}, ROWS_OF_16),
    ],
)
def test_log_probs_are_computed_as_the_update_is_unless_they_have_settings_of_their_own(
    actor: ActorConfig, section: dict[str, Any], asked: dict[str, int]
) -> None:
    config = ActorRolloutRefConfig(actor=actor, rollout=RolloutConfig(**section), ref=RefConfig(**section))
    worker = ActorRolloutRefWorker(config, "actor_ref", RUN)
    worker.actor, worker.reference = RecordingEngine(), RecordingEngine()
    worker.compute_log_prob(make_data())
    worker.compute_ref_log_prob(make_data())
    assert worker.actor.asked == worker.reference.asked == [asked]


@pytest.mark.parametrize(
    ("config", "update", "values"),
    [
        (CriticConfig(), {"micro_batch_size": 8}, {"micro_batch_size": 16}),
        (CriticConfig(use_dynamic_bsz=True), {"max_tokens": 32768}, {"max_tokens": 32768}),
        (
            CriticConfig(use_dynamic_bsz=True, ppo_max_token_len_per_gpu=50, forward_max_token_len_per_gpu=70),
            {"max_tokens": 50},
            {"max_tokens": 70},
        ),
    ],
)
def test_the_critic_has_budgets_of_its_own(
    config: CriticConfig, update: dict[str, int], values: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = TrainingWorker(config, "critic", RUN)
    worker.engine = RecordingEngine()
    worker.compute_values(make_data())
    asked: list[dict[str, int]] = []
    monkeypatch.setattr(worker, "train", lambda *_, prefix, **sizes: asked.append(sizes) or {f"{prefix}/loss": 0.0})
    monkeypatch.setattr("paceline.workers.role_worker.mean_metrics", lambda *_: {})
    worker.update_critic(make_data())
    assert worker.engine.asked == [values]
    assert asked == [update]


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        (RewardModelConfig(), {"micro_batch_size": 16}),
        (RewardModelConfig(use_dynamic_bsz=True, forward_max_token_len_per_gpu=9), {"max_tokens": 9}),
    ],
)
def test_the_reward_model_has_a_budget_of_its_own(config: RewardModelConfig, asked: dict[str, int]) -> None:
    worker = TrainingWorker(config, "rm", RUN)
    worker.engine = RecordingEngine()
    worker.judged_text = lambda data: data.batch
    worker.compute_rm_score(make_data())
    assert worker.engine.asked == [asked]
