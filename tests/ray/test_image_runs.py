"""Runs on prompts with images on Ray: the same numbers wherever the rollout is, and on two devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from paceline.trainer.hf_export import export_run
from paceline.trainer.main_ppo import run_ppo
from tests.learn.test_images import image_config, make_colours
from tests.runs import as_omegaconf, read_metrics, results


@pytest.fixture(scope="module", autouse=True)
def ray_session():
    ray.init("local", num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PACELINE_CHECK_INPUTS": "1"}})
    yield
    ray.shutdown()


@pytest.mark.slow
def test_a_run_with_images_gives_the_same_numbers_where_the_rollout_has_devices_of_its_own(tmp_path: Path) -> None:
    material = make_colours(tmp_path / "material")
    changes = {"trainer__total_training_steps": 3, "trainer__test_freq": 2, "data__max_response_length": 4}
    kl = {"actor_rollout_ref__actor__use_kl_loss": True, "actor_rollout_ref__actor__ppo_epochs": 2}
    places = {
        "together": {"trainer__save_freq": 3},
        "apart": {"trainer__placement__rollout_devices": 1, "trainer__n_gpus_per_node": 2},
        "two": {"trainer__n_gpus_per_node": 2, "actor_rollout_ref__actor__strategy": "fsdp2"},
    }
    for name, place in places.items():
        config = image_config(material, tmp_path / name, **changes, **kl, **place)
        run_ppo(as_omegaconf(config))
    together, apart = (results(tmp_path / name) for name in ("together", "apart"))
    assert together == apart
    one, two = (read_metrics(tmp_path / name)[1] for name in ("together", "two"))
    assert one["critic/score/mean"] == two["critic/score/mean"]
    assert one["actor/grad_norm"] == pytest.approx(two["actor/grad_norm"], rel=1e-3)
    exported = export_run(tmp_path / "together", tmp_path / "exported")
    assert exported.largest_difference < 1e-5
    assert (tmp_path / "exported/preprocessor_config.json").is_file()
