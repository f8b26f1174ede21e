"""What is offloaded moves once for an update, and for a rollout that samples from the actor's own module."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.config import ActorConfig, ActorRolloutRefConfig, FsdpConfig, PolicyModelConfig
from paceline.engine import register_engine
from paceline.protocol import DataProto
from paceline.workers.engine_workers import ActorRolloutRefWorker, RunContext
from tests.contract.engine_scenarios import PROMPT_WIDTH, make_mini_batch
from tests.tiny import make_tiny_model
from tests.unit.engine.test_micro_batch_engine import BOTH, PARAMETERS, RecordingEngine

RUN = RunContext(seed=0, device="cpu", total_optimizer_steps=4, max_prompt_length=8, max_response_length=6)

register_engine("recording")(RecordingEngine)


def test_an_update_and_a_rollout_move_once(tmp_path: Path) -> None:
    model = PolicyModelConfig(path=str(make_tiny_model(tmp_path, hidden=16, layers=1)))
    actor = ActorConfig(strategy="recording", fsdp_config=FsdpConfig(param_offload=True, optimizer_offload=True))
    worker = ActorRolloutRefWorker(ActorRolloutRefConfig(model=model, actor=actor), "actor_rollout", RUN)
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
