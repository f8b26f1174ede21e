"""`paceline quickstart` on an accelerator: real Ray workers, each with a device of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device import DEVICE, ON_CPU
from tests.learn.test_quickstart import quickstart
from tests.runs import read_metrics, results

pytestmark = [
    pytest.mark.device,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(ON_CPU, reason="for --device; test_quickstart.py has the CPU"),
]

# Ray finds GPUs itself; it is told of the simulated devices, as of others that it does not know.
KEYS = [f"trainer.device={DEVICE}", "trainer.total_training_steps=3", "trainer.test_freq=3", "trainer.save_freq=2"]
if DEVICE == "npu":
    KEYS += ["ray_kwargs.ray_init.num_cpus=2", "+ray_kwargs.ray_init.resources={NPU:2}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all: the first quickstart leaves its model to the others."""
    return tmp_path_factory.mktemp("quickstart")


def test_the_quickstart_gives_the_same_numbers_in_both_placements(folder: Path) -> None:
    *_, colocated = quickstart(folder, *KEYS)
    *_, split = quickstart(folder, "--placement", "split", *KEYS)
    lines = read_metrics(colocated)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(line["critic/vf_loss"] > 0 for line in lines[1:])
    # What was sampled is what was trained on, with the weights of that step.
    assert max(line["training/rollout_probs_diff_max"] for line in lines[1:]) < 1e-3
    assert results(colocated) == results(split)


def test_sharded_models_train_on_two_devices(folder: Path) -> None:
    sharded = ["actor_rollout_ref.actor.strategy=fsdp2", "critic.strategy=fsdp2", "trainer.n_gpus_per_node=2"]
    *_, run = quickstart(folder, *KEYS, *sharded)
    assert [line["step"] for line in read_metrics(run)] == [0, 1, 2, 3]
