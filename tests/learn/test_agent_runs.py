"""Runs in which agents have conversations: the real trainer, agents and workers, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.in_process import train_in_process
from tests.runs import base_config, make_material, read_metrics, results
from tests.unit.agents.chats import FORGETS, tokenizer_with

ROLLOUT = "actor_rollout_ref__rollout__"
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
    names_of_agents = ("agent/", "val-aux/agent/")
    assert results(tmp_path / "with", *names_of_agents) == results(tmp_path / "without")
    assert read_metrics(tmp_path / "with")[2]["agent/num_turns/max"] == 1


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
