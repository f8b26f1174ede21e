"""What the workers ask of their engines: micro-batches, numbers, moves between device and main memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import (
    ActorConfig,
    ActorRolloutRefConfig,
    CriticConfig,
    FsdpConfig,
    PolicyModelConfig,
    RefConfig,
    RewardModelConfig,
    RolloutConfig,
)
from paceline.engine import EngineSpec, register_engine
from paceline.protocol import DataProto
from paceline.workers.engine_workers import ActorRolloutRefWorker, RunContext, TrainingWorker
from tests.contract.engine_scenarios import PROMPT_WIDTH, make_mini_batch
from tests.tiny import make_tiny_model
from tests.unit.engine.test_micro_batch_engine import BOTH, PARAMETERS, RecordingEngine

RUN = RunContext(seed=0, device="cpu", total_optimizer_steps=1, max_prompt_length=4, max_response_length=4)

register_engine("recording")(RecordingEngine)


class SizesEngine:
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
    worker.actor, worker.reference = SizesEngine(), SizesEngine()
    worker.compute_log_prob(make_data())
    worker.compute_ref_log_prob(make_data())
    assert worker.actor.asked == worker.reference.asked == [asked]


@pytest.mark.parametrize(
    ("config", "update", "values"),
    [
        (CriticConfig(), {"micro_batch_size": 8}, {"micro_batch_size": 16}),
        (CriticConfig(use_dynamic_bsz=True), {"max_tokens": 4096}, {"max_tokens": 4096}),
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
    worker.engine = SizesEngine()
    worker.compute_values(make_data())
    asked: list[dict[str, int]] = []
    monkeypatch.setattr(worker, "train", lambda *_, prefix, **sizes: asked.append(sizes) or {f"{prefix}/loss": 0.0})
    monkeypatch.setattr("paceline.workers.role_worker.mean_metrics", lambda *_: {})
    worker.update_critic(make_data())
    assert worker.engine.asked == [values]
    assert asked == [update]


def test_each_role_shares_sequences_between_as_many_devices_as_its_section_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, int]] = []

    class Noted:
        def __init__(self, spec: EngineSpec) -> None:
            asked.append((spec.kind, spec.ulysses_sequence_parallel_size))

        def initialize(self) -> None:
            pass

    monkeypatch.setattr("paceline.workers.role_worker.get_engine", lambda name: Noted)
    for name in ("load_tokenizer", "JudgedText"):
        monkeypatch.setattr(f"paceline.workers.engine_workers.{name}", lambda *_, **__: None)
    policy = ActorRolloutRefConfig(actor=ActorConfig(ulysses_sequence_parallel_size=4))
    ActorRolloutRefWorker(policy, "actor_ref", RUN).init_model()
    TrainingWorker(CriticConfig(ulysses_sequence_parallel_size=2), "critic", RUN).init_model()
    TrainingWorker(RewardModelConfig(ulysses_sequence_parallel_size=8), "rm", RUN).init_model()
    assert asked == [("causal_lm", 4), ("causal_lm", 4), ("value", 2), ("sequence_classification", 8)]


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        (RewardModelConfig(), {"micro_batch_size": 16}),
        (RewardModelConfig(use_dynamic_bsz=True, forward_max_token_len_per_gpu=9), {"max_tokens": 9}),
    ],
)
def test_the_reward_model_has_a_budget_of_its_own(config: RewardModelConfig, asked: dict[str, int]) -> None:
    worker = TrainingWorker(config, "rm", RUN)
    worker.engine = SizesEngine()
    worker.judged_text = lambda data: data.batch
    worker.compute_rm_score(make_data())
    assert worker.engine.asked == [asked]


@pytest.mark.parametrize("name", ["native", "hf"])
@pytest.mark.parametrize(
    ("compute_dtype", "dtype", "expected"),
    [
        ("float32", None, torch.float32),
        ("bfloat16", None, torch.bfloat16),
        ("bfloat16", "float32", torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
    ],
)
def test_a_rollout_computes_in_the_numbers_of_the_actor_unless_it_has_a_setting_of_its_own(
    tmp_path: Path, name: str, compute_dtype, dtype, expected: torch.dtype
) -> None:
    folder = make_tiny_model(tmp_path / "model", hidden=16, layers=1)
    config = ActorRolloutRefConfig(
        model=PolicyModelConfig(path=str(folder), compute_dtype=compute_dtype),
        rollout=RolloutConfig(name=name, dtype=dtype),
    )
    worker = ActorRolloutRefWorker(config, "rollout", RUN)
    worker.init_model()
    assert worker.rollout.dtype == expected
    assert worker.rollout.model.dtype == torch.float32


def test_what_is_offloaded_moves_once_for_an_update_and_for_a_rollout(tmp_path: Path) -> None:
    model = PolicyModelConfig(path=str(make_tiny_model(tmp_path, hidden=16, layers=1)))
    actor = ActorConfig(strategy="recording", fsdp_config=FsdpConfig(param_offload=True, optimizer_offload=True))
    worker = ActorRolloutRefWorker(
        ActorRolloutRefConfig(model=model, actor=actor),
        "actor_rollout",
        replace(RUN, total_optimizer_steps=4, max_prompt_length=8, max_response_length=6),
    )
    worker.init_model()
    engine = worker.actor
    assert isinstance(engine, RecordingEngine)
    assert worker.rollout.model is engine.module
    engine.moves.clear()

    batch = make_mini_batch()
    worker.compute_log_prob(batch)
    assert engine.moves == PARAMETERS
    engine.moves.clear()

    counts = {"rows_per_shard": 3, "num_tokens": 9, "num_sequences": 3}
    batch.batch["old_log_probs"] = torch.zeros_like(batch.batch["advantages"])
    batch.meta_info |= {"passes": 2, "mini_batches": [counts, counts]}
    worker.update_actor(batch)
    assert engine.num_steps == 4
    assert engine.moves == BOTH
    engine.moves.clear()

    columns = ("input_ids", "attention_mask", "position_ids")
    prompts = DataProto.from_dict(
        {name: batch.batch[name][:, :PROMPT_WIDTH] for name in columns} | {"seeds": torch.arange(len(batch))},
        meta_info={"sampling": {}},
    )
    worker.generate_sequences(prompts)
    assert engine.moves == PARAMETERS
