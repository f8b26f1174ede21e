"""Whole PPO and GRPO runs on real Ray workers: one loop, the same numbers in every placement, exact resume.

What is compared with them and needs no Ray itself runs in this process, which also shows that Ray changes no number.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from paceline.trainer.main_ppo import run_ppo
from tests.in_process import train_in_process
from tests.mixed import CODE, HH, make_mixed_material, mixed_config
from tests.runs import as_omegaconf, base_config, read_metrics, results

STEPS = 4


@pytest.fixture(scope="module", autouse=True)
def ray_session():
    ray.init("local", num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PACELINE_CHECK_INPUTS": "1"}})
    yield
    ray.shutdown()


# Split, no column of an answer comes to the driver before it is read; colocated, these small ones come at once.
SPLIT = {"trainer__placement__name": "split", "trainer__n_gpus_per_node": 2, "trainer__columns_stay_bytes": 0}
GRPO = {
    "algorithm__adv_estimator": "grpo",
    "actor_rollout_ref__rollout__n": 4,
    "actor_rollout_ref__actor__ppo_mini_batch_size": 8,
}


def train_on_ray(config: dict[str, Any]) -> None:
    run_ppo(as_omegaconf(config))


@pytest.fixture(scope="module")
def finished(material: Path, tmp_path_factory: pytest.TempPathFactory):
    """Runs by name, each done once for all tests of this file."""
    done: dict[str, Path] = {}
    folder = tmp_path_factory.mktemp("runs")

    def run(name: str, train: Callable[[dict[str, Any]], None] = train_on_ray, **changes: Any) -> Path:
        if name not in done:
            train(base_config(material, folder / name, **changes))
            done[name] = folder / name
        return done[name]

    return run


def ppo(finished, placement: dict[str, Any], name: str) -> Path:
    return finished(
        name, trainer__save_freq=2, trainer__test_freq=2, actor_rollout_ref__actor__ppo_epochs=2, **placement
    )


def test_ppo_gives_the_same_numbers_colocated_and_split(finished) -> None:
    colocated = results(ppo(finished, {}, "ppo"))
    split = results(ppo(finished, SPLIT, "ppo-split"))
    assert [line["step"] for line in colocated] == [0, 1, 2, 3, 4]
    assert colocated == split


@pytest.mark.slow
def test_ppo_gives_the_same_numbers_with_the_rollout_on_a_pool_of_its_own(finished) -> None:
    apart = ppo(finished, {"trainer__placement__rollout_devices": 1, "trainer__n_gpus_per_node": 2}, "ppo-apart")
    assert results(apart) == results(ppo(finished, {}, "ppo"))
    assert max(line.get("training/rollout_probs_diff_max", 0.0) for line in read_metrics(apart)) < 1e-6


@pytest.mark.slow
def test_grpo_runs_without_a_critic_and_gives_the_same_numbers_colocated_and_split(finished) -> None:
    colocated = results(finished("grpo", train=train_in_process, **GRPO))
    split = results(finished("grpo-split", **GRPO, **SPLIT))
    assert colocated == split
    assert "critic/vf_loss" not in colocated[-1]
    # One epoch of one mini-batch: the update's own pass has the old log-probs, and the ratio is 1; a row is verified.
    assert colocated[-1]["actor/ppo_kl"] == 0.0
    assert colocated[-1]["training/rollout_probs_diff_max"] < 1e-5


@pytest.mark.slow
def test_rule_reward_model_and_code_in_one_batch_give_the_same_numbers_colocated_and_split(
    tmp_path: Path,
) -> None:
    material = make_mixed_material(tmp_path / "material")
    train_in_process(mixed_config(material, tmp_path / "colocated", trainer__overlap="none"))
    train_on_ray(mixed_config(material, tmp_path / "split", reward_model__num_workers=2, **SPLIT))
    colocated, split = results(tmp_path / "colocated"), results(tmp_path / "split")
    assert colocated == split
    assert colocated[-1][f"reward/{HH}/model_score"] != 0.0
    assert colocated[-1][f"reward/{CODE}/score"] == 0.0  # an untrained model writes no program
    last = read_metrics(tmp_path / "split")[-1]
    assert {"timing_s/idle/actor_rollout_ref_pool", "timing_s/idle/critic_pool", "perf/overlap"} <= set(last)


def test_a_run_stopped_and_resumed_equals_one_that_was_not(finished, material: Path) -> None:
    whole = ppo(finished, {}, "ppo")
    changes = {"trainer__save_freq": 2, "trainer__test_freq": 2, "actor_rollout_ref__actor__ppo_epochs": 2}
    stopped = finished("stopped", train=train_in_process, trainer__total_training_steps=2, **changes)
    # What a crash between a checkpoint and the end leaves: lines of steps that will be done again.
    with (stopped / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, "actor/pg_loss": 99.0}) + '\n{"step": 4, "torn')
    train_in_process(base_config(material, stopped, **changes))
    assert results(stopped) == results(whole)


def test_metrics_have_the_names_that_users_know(finished) -> None:
    last = read_metrics(ppo(finished, {}, "ppo"))[-1]
    expected = {
        *(f"actor/{name}" for name in ("pg_loss", "ppo_kl", "pg_clipfrac", "pg_clipfrac_lower", "entropy", "kl_loss")),
        *("actor/grad_norm", "actor/lr", "critic/vf_loss", "critic/vf_clipfrac", "critic/vf_explained_var"),
        *("critic/grad_norm", "critic/lr", "training/global_step", "training/epoch"),
        *(
            f"critic/{name}/{kind}"
            for name in ("score", "rewards", "advantages", "returns", "values")
            for kind in ("mean", "max", "min")
        ),
        *(f"{name}_length/{kind}" for name in ("response", "prompt") for kind in ("mean", "max", "min", "clip_ratio")),
        *(
            f"timing_s/{name}"
            for name in (
                "gen",
                "old_log_prob",
                "ref",
                "values",
                "reward",
                "adv",
                "update_actor",
                "update_critic",
                "step",
            )
        ),
        *("timing_per_token_ms/gen", "timing_per_token_ms/update_actor"),
        *("perf/total_num_tokens", "perf/time_per_step", "perf/throughput"),
        "val-core/openai/gsm8k/reward/mean@1",
    }
    assert not expected - set(last)
    # 20 prompts in batches of 8: the third batch is the tail of the epoch, the fourth begins the next.
    assert [line["training/epoch"] for line in read_metrics(ppo(finished, {}, "ppo"))[1:]] == [0, 0, 0, 1]


def test_the_time_of_every_step_holds_its_own_updates(finished) -> None:
    """Though the next rollout is issued before they have ended."""
    for line in read_metrics(ppo(finished, {}, "ppo"))[1:]:
        assert line["timing_s/step"] >= line["timing_s/update_actor"] + line["timing_s/update_critic"]


def test_the_timeline_has_a_named_row_per_process_and_a_span_per_call(finished) -> None:
    for name, placement, pools in (
        ("ppo", {}, {"global_pool"}),
        ("ppo-split", SPLIT, {"actor_rollout_ref_pool", "critic_pool"}),
    ):
        events = json.loads((ppo(finished, placement, name) / "timeline.json").read_text())["traceEvents"]
        rows = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
        for pool in pools:
            assert any(pool in row and "rank" in row for row in rows), rows
        spans = [event for event in events if event["ph"] == "X"]
        for method in ("generate_sequences", "compute_values", "update_actor", "update_critic"):
            steps = [event["args"]["step"] for event in spans if event["name"] == method]
            assert set(steps) >= {1, 2, 3, 4}, method
        updates = [event for event in spans if event["name"] in ("update_actor", "update_critic")]
        assert len(updates) == 2 * STEPS
        assert (len({event["pid"] for event in updates}) == 2) == (name == "ppo-split")


def test_the_run_folder_holds_config_checkpoints_and_metrics(finished) -> None:
    run = ppo(finished, {}, "ppo")
    assert (run / "config.yaml").exists()
    assert (run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip() == str(STEPS)
    assert sorted(path.name for path in (run / "checkpoints").glob("global_step_*")) == [
        "global_step_2",
        "global_step_4",
    ]


def test_the_checkpoint_of_the_actor_is_a_hugging_face_folder(finished) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ppo(finished, {}, "ppo") / "checkpoints" / "global_step_4" / "actor"
    assert AutoModelForCausalLM.from_pretrained(folder).config.model_type == "qwen2"
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == 1
