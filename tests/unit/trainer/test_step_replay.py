"""What a replay makes of the configuration of a run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from paceline.config.load import load_config
from paceline.trainer.step_replay import replay_config


def test_one_process_takes_the_place_of_what_several_shared(tmp_path: Path) -> None:
    run = load_config(
        {
            "actor_rollout_ref": {
                "actor": {"strategy": "fsdp2", "ulysses_sequence_parallel_size": 2},
                "rollout": {
                    "weight_transfer": "broadcast",
                    "tensor_model_parallel_size": 2,
                    "agent": {"num_workers": 3},
                },
            },
            "reward_model": {"num_workers": 4, "enable_resource_pool": True, "n_gpus_per_node": 2, "nnodes": 1},
            "trainer": {"n_gpus_per_node": 8, "placement": {"name": "split", "rollout_devices": 2}},
        }
    )
    cfg = replay_config({"config": asdict(run), "total_steps": 5}, {}, tmp_path)
    rollout = cfg.actor_rollout_ref.rollout
    assert cfg.actor_rollout_ref.actor.ulysses_sequence_parallel_size == 1
    assert (rollout.weight_transfer, rollout.tensor_model_parallel_size, rollout.agent.num_workers) == (
        "object_store",
        1,
        1,
    )
    assert (cfg.reward_model.num_workers, cfg.reward_model.enable_resource_pool) == (1, False)
    assert (cfg.trainer.n_gpus_per_node, cfg.trainer.placement.rollout_devices) == (3, 1)
