"""Names for what a configuration can choose: the same thing twice is fine, another thing under its name is not."""

from __future__ import annotations

import importlib
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.algorithms.advantages import get_adv_estimator
from paceline.algorithms.policy_loss import get_policy_loss
from paceline.engine import engine_interface
from paceline.engine.engine_interface import get_engine, register_engine
from paceline.errors import ConfigError
from paceline.rewards import _select_rm_score_fn, register_scorer, scorers
from paceline.rollout import rollout_interface
from paceline.rollout.rollout_interface import get_rollout, register_rollout

MODULE = """
from paceline.algorithms.advantages import register_adv_estimator
from paceline.algorithms.policy_loss import register_policy_loss
from paceline.engine.engine_interface import register_engine
from paceline.rewards import register_scorer
from paceline.rollout.rollout_interface import register_rollout


@register_adv_estimator(NAME, needs_critic=False)
def estimator(*, token_level_rewards, response_mask, **_):
    return token_level_rewards, token_level_rewards


@register_policy_loss(NAME)
def loss(old_log_prob, log_prob, advantages, response_mask, *, agg, **_):
    return agg(-advantages * log_prob), {}


@register_engine(NAME)
class Engine: ...


@register_rollout(NAME)
class Rollout: ...


def score(solution_str, ground_truth, extra_info=None):
    return 1.0


register_scorer(NAME, score)
"""


@pytest.fixture(autouse=True)
def _forget_names() -> Iterator[None]:
    """Messages elsewhere list all names."""
    yield
    for registry in (engine_interface._ENGINES, rollout_interface._ENGINES):
        for name in [name for name in registry._entries if name.startswith("test-")]:
            del registry._entries[name]


def test_a_module_that_registers_may_be_imported_twice_and_the_latest_is_kept(tmp_path: Path, monkeypatch):
    name, module_name = f"test-{uuid.uuid4()}", f"registers_{uuid.uuid4().hex}"
    (tmp_path / f"{module_name}.py").write_text(f"NAME = {name!r}\n{MODULE}")
    monkeypatch.syspath_prepend(tmp_path)
    # All scorers travel with a reward manager, and another process could not import this one.
    monkeypatch.setattr(scorers, "_SCORERS", dict(scorers._SCORERS))
    first = importlib.import_module(module_name)
    del sys.modules[module_name]
    second = importlib.import_module(module_name)
    assert first.loss is not second.loss
    assert get_adv_estimator(name) is second.estimator
    assert get_policy_loss(name) is second.loss
    assert get_engine(name) is second.Engine
    assert get_rollout(name) is second.Rollout
    assert _select_rm_score_fn(name) is second.score
    register_engine(name)(second.Engine)
    register_rollout(name)(second.Rollout)
    register_scorer(name, second.score)


def test_another_function_under_a_name_that_is_taken_is_refused():
    name = f"test-{uuid.uuid4()}"
    engine, other = type("First", (), {}), type("Second", (), {})
    register_engine(name)(engine)
    with pytest.raises(ConfigError, match="already registered"):
        register_engine(name)(other)
    one, two = (lambda: 1), (lambda: 2)
    register_rollout(name)(one)
    register_rollout(name)(one)
    with pytest.raises(ConfigError, match="already registered"):
        register_rollout(name)(two)
