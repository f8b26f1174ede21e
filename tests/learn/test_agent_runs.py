"""Runs in which agents have conversations: the real trainer, agents and workers, in this process."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.trainer.ppo.conversations import join_labels, last_rows
from paceline.trainer.ppo.scoring import grader_fields
from tests.in_process import build_in_process, train_in_process
from tests.learn.test_reward_model import scores_by_transformers
from tests.learn.test_schedules import pipelined
from tests.mixed import make_reward_model
from tests.runs import base_config, make_material, read_metrics, results
from tests.unit.agents.chats import FORGETS, tokenizer_with

ROLLOUT = "actor_rollout_ref__rollout__"
NAMES_OF_AGENTS = ("agent/", "val-aux/agent/")
DIGITS = '''
from paceline.agents import Environment

class Digits(Environment):
    """Every digit of a turn earns; it ends after three turns."""

    def __init__(self, most=3):
        self.left = most

    def reset(self, row, seed):
        if row["index"] == 3:
            raise ValueError("a row that no game is made of")
        return row["raw_prompt"]

    def step(self, text):
        self.left -= 1
        return "go on", sum(character.isdigit() for character in text) / 4, self.left == 0
'''


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_material(tmp_path_factory.mktemp("material"))


def games(material: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """A run of conversations with an environment, under a template that forgets."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "games.py").write_text(DIGITS)
    loop = {
        "name": "digits",
        "_target_": "paceline.agents.EnvironmentLoop",
        "environment": f"{run_dir}/games.py:Digits",
    }
    (run_dir / "loops.yaml").write_text(json.dumps([loop]))
    tokenizer_with(FORGETS).save_pretrained(run_dir / "tokenizer")
    settings: dict[str, Any] = {
        "actor_rollout_ref__model__tokenizer_path": str(run_dir / "tokenizer"),
        f"{ROLLOUT}agent__default_agent_loop": "digits",
        f"{ROLLOUT}agent__agent_loop_config_path": str(run_dir / "loops.yaml"),
        f"{ROLLOUT}agent__rewards": "turns",
        f"{ROLLOUT}multi_turn__max_tokens_per_turn": 16,
        "data__max_prompt_length": 140,
        "data__max_response_length": 110,
    }
    return base_config(material, run_dir, **(settings | changes))


def test_single_turns_through_agents_are_the_same_run(material: Path, tmp_path: Path) -> None:
    train_in_process(base_config(material, tmp_path / "without", trainer__test_freq=2))
    through_agents = {f"{ROLLOUT}multi_turn__enable": True, "trainer__test_freq": 2}
    train_in_process(base_config(material, tmp_path / "with", **through_agents))
    assert results(tmp_path / "with", *NAMES_OF_AGENTS) == results(tmp_path / "without")
    assert read_metrics(tmp_path / "with")[2]["agent/num_turns/max"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_single_turns_through_agents_are_the_same_pipelined_run(
    material: Path, tmp_path: Path, max_staleness: int
) -> None:
    ahead = {**pipelined(max_staleness), "trainer__test_freq": 2}
    train_in_process(base_config(material, tmp_path / "without", **ahead))
    train_in_process(base_config(material, tmp_path / "with", **{f"{ROLLOUT}multi_turn__enable": True}, **ahead))
    found = results(tmp_path / "with", *NAMES_OF_AGENTS)
    assert found == results(tmp_path / "without")
    assert [line.get("training/staleness/max", 0) for line in found[1:]] == [0, *[max_staleness] * 3]


@pytest.mark.slow
def test_conversations_ahead_of_their_step_come_through_a_checkpoint(material: Path, tmp_path: Path) -> None:
    run = {**pipelined(1), "trainer__total_training_steps": 3, "trainer__save_freq": 1}
    train_in_process(games(material, tmp_path / "whole", **run))
    folder = tmp_path / "whole" / "checkpoints" / "global_step_1"
    assert (folder / "rollouts" / "step_2.responses.safetensors").exists()
    path = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": str(folder)}
    train_in_process(games(material, tmp_path / "resumed", **run, **path))
    whole, resumed = (
        next(line for line in results(tmp_path / name) if line["step"] == 2) for name in ("whole", "resumed")
    )
    assert resumed == whole  # sampled once, and trained as it was
    assert resumed["training/staleness/max"] == 1
    assert resumed["agent/rows"] > 8


def streaming(max_staleness: int, **changes: Any) -> dict[str, Any]:
    schedule = {"trainer__schedule__name": "streaming", "trainer__schedule__max_staleness": max_staleness}
    return {**schedule, **changes}


APART = {"trainer__n_gpus_per_node": 2, "trainer__placement__rollout_devices": 1}


@pytest.mark.slow
def test_a_stream_of_conversations_without_staleness_is_sync_up_to_rounding(material: Path, tmp_path: Path) -> None:
    """Which of them are decoded together is a matter of time."""
    steps = {f"{ROLLOUT}multi_turn__enable": True, "trainer__total_training_steps": 2, "trainer__test_freq": 1}
    train_in_process(base_config(material, tmp_path / "sync", **steps))
    train_in_process(base_config(material, tmp_path / "streaming", **steps, **streaming(0)))
    for one, other in zip(results(tmp_path / "streaming"), results(tmp_path / "sync"), strict=True):
        one.pop("training/too_old_groups", None)
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("placement", [{}, APART])
@pytest.mark.parametrize("on_update", ["continue", "finish", "restart"])
def test_conversations_of_a_streaming_run_are_no_staler_than_its_bound(
    material: Path, tmp_path: Path, placement: dict[str, Any], on_update: str
) -> None:
    run = {"trainer__total_training_steps": 4, "trainer__test_freq": 2, **placement}
    group = {f"{ROLLOUT}n": 2, "algorithm__adv_estimator": "grpo"}
    train_in_process(games(material, tmp_path, **run, **group, **streaming(1, trainer__schedule__on_update=on_update)))
    lines = read_metrics(tmp_path)[1:]
    assert [line["agent/num_turns/max"] for line in lines] == [3] * 4
    assert all(line["training/staleness/max"] <= 1 for line in lines)
    assert sum(line["agent/failed"] for line in lines) >= 1
    assert all(line["actor/grad_norm"] > 0 for line in lines)


@pytest.mark.slow
def test_conversations_that_wait_for_their_step_come_through_a_checkpoint(material: Path, tmp_path: Path) -> None:
    run = {"trainer__total_training_steps": 3, "trainer__save_freq": 1, **streaming(1)}
    run["trainer__schedule__on_update"] = "finish"
    train_in_process(games(material, tmp_path / "whole", **run))
    folder = tmp_path / "whole" / "checkpoints" / "global_step_1"
    assert (folder / "rollouts" / "step_2.responses.safetensors").exists()
    path = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": str(folder)}
    train_in_process(games(material, tmp_path / "resumed", **run, **path))
    names = ("whole", "resumed")
    whole, resumed = (next(line for line in results(tmp_path / name) if line["step"] == 2) for name in names)
    assert resumed == whole  # sampled once, and trained as they were
    assert resumed["agent/rows"] > 8


def judged(material: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """A run whose reward model reads conversations in a template of its own."""
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    settings: dict[str, Any] = {
        "reward_model__enable": True,
        "reward_model__model__path": str(make_reward_model(run_dir / "judge", material / "model", template)),
        "reward_model__weights": {"openai/gsm8k": {"rule": 1.0, "model": 1.0}},
    }
    return settings | changes


def test_a_reward_model_reads_whole_conversations(material: Path, tmp_path: Path) -> None:
    own = judged(material, tmp_path)
    trainer = build_in_process(games(material, tmp_path, **own, **{f"{ROLLOUT}agent__rewards": "end"}))
    requests, labels, _ = trainer.draw_requests("training", step=0)
    batch = join_labels(labels, trainer.generate(requests, labels=labels).get())
    graded = trainer.grade(batch).get()
    fields, last = grader_fields(graded), last_rows(batch)
    assert len(batch) > len(last) == 8
    chats = batch.non_tensor_batch["conversation_chat"]
    assert max(len(chat) for chat in chats) >= 5
    special = re.compile("|".join(map(re.escape, trainer.tokenizer.all_special_tokens)))
    texts = ["".join(f"<{item['role']}>{special.sub('', item['content'])}\n" for item in chats[row]) for row in last]
    failed = [batch.non_tensor_batch["conversation_info"][row]["ended_by"] == "error" for row in last]
    expected = scores_by_transformers(tmp_path / "judge", texts)
    for place, row in enumerate(last):
        if not failed[place]:
            assert fields["model_score"][row] == pytest.approx(expected[place], rel=1e-4)
    totals = graded.batch["token_level_scores"].sum(dim=-1)
    whose = batch.batch["conversation"]
    assert all(totals[row] == totals[whose == whose[row]][-1] for row in range(len(batch)))


@pytest.mark.slow
@pytest.mark.parametrize("placement", [{}, {"trainer__placement__name": "split", "trainer__n_gpus_per_node": 2}])
def test_a_reward_model_scores_single_turns_through_agents_as_without(
    material: Path, tmp_path: Path, placement: dict[str, Any]
) -> None:
    for name, agents in (("without", {}), ("with", {f"{ROLLOUT}multi_turn__enable": True})):
        own = judged(material, tmp_path / name, trainer__test_freq=2, **placement, **agents)
        train_in_process(base_config(material, tmp_path / name, **own))
    found = results(tmp_path / "with", *NAMES_OF_AGENTS)
    assert found == results(tmp_path / "without")
    assert all("critic/score/mean" in line for line in found[1:])


PROGRAM = """
import json, sys
from openai import OpenAI

messages = json.load(sys.stdin)["raw_prompt"]
answer = OpenAI().chat.completions.create(model="any", messages=messages)
text = answer.choices[0].message.content
print(json.dumps({"reward": sum(character.isdigit() for character in text) / len(text)}))
"""


@pytest.mark.slow
def test_a_run_trains_on_what_a_program_does_with_openais_client(material: Path, tmp_path: Path) -> None:
    pytest.importorskip("openai")
    run = games(material, tmp_path, data__train_batch_size=4, trainer__total_training_steps=2)
    (tmp_path / "program.py").write_text(PROGRAM)
    loop = {"name": "digits", "_target_": "paceline.agents.gateway.ProgramLoop"}
    loops = [{**loop, "command": [sys.executable, str(tmp_path / "program.py")]}]
    (tmp_path / "loops.yaml").write_text(json.dumps(loops))
    train_in_process(run)
    lines = read_metrics(tmp_path)[-2:]
    assert [(line["agent/failed"], line["agent/num_turns/mean"]) for line in lines] == [(0, 1)] * 2
    assert all(line["critic/score/max"] > 0 and line["actor/grad_norm"] > 0 for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_a_run_trains_on_games_whose_turns_have_rewards(material: Path, tmp_path: Path, estimator: str) -> None:
    group = {f"{ROLLOUT}n": 2 if estimator == "grpo" else 1, "algorithm__adv_estimator": estimator}
    run = {**group, "trainer__test_freq": 2, "trainer__total_training_steps": 3}
    train_in_process(games(material, tmp_path / "run", **run))
    lines = read_metrics(tmp_path / "run")
    assert [line["agent/num_turns/max"] for line in lines[1:]] == [3, 3, 3]
    assert all(line["training/rollout_probs_diff_max"] < 1e-4 for line in lines[1:])
    assert sum(line.get("agent/splits", 0) for line in lines[1:]) > 0
    assert sum(line["agent/failed"] for line in lines[1:]) >= 1
    assert all(line["actor/grad_norm"] > 0 for line in lines[1:])
    again = tmp_path / "again"
    train_in_process(games(material, again, **run))
    # Which turns are decoded together is a matter of time, and with it the last bits of log-probs.
    for one, other in zip(results(again)[:2], results(tmp_path / "run")[:2], strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)
