"""What a configuration chooses by name: the catalogue tells the truth, and a name means one thing."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.algorithms.advantages import estimator_needs, get_adv_estimator, register_adv_estimator
from paceline.algorithms.policy_loss import get_policy_loss, loss_traits, register_policy_loss
from paceline.catalog import (
    BACKENDS,
    ESTIMATORS,
    LOGGERS,
    LOSSES,
    ROLLOUTS,
    Catalog,
    EstimatorEntry,
    NameEntry,
    Registry,
)
from paceline.config.checks import check_config
from paceline.config.load import load_config
from paceline.engine import HfEngine, engine_interface, get_engine, register_engine
from paceline.errors import ConfigError
from paceline.rewards import _select_rm_score_fn, by_source, register_scorer
from paceline.rollout import rollout_interface
from paceline.rollout.rollout_interface import get_rollout, register_rollout

CATALOGS = {"estimators": ESTIMATORS, "losses": LOSSES, "backends": BACKENDS, "rollouts": ROLLOUTS, "loggers": LOGGERS}


@pytest.mark.parametrize("catalog", CATALOGS.values(), ids=CATALOGS)
def test_every_built_in_name_lives_where_the_catalogue_says(catalog: Any) -> None:
    assert all(importlib.util.find_spec(module) for module in catalog.modules.values())


def test_what_is_registered_is_what_the_catalogue_says() -> None:
    for name, entry in ESTIMATORS.built_in.items():
        assert get_adv_estimator(name).__module__ == entry.module
        assert estimator_needs(name) == entry
    for name, loss in LOSSES.built_in.items():
        assert get_policy_loss(name).__module__ == loss.module
        assert loss_traits(name) == loss


@pytest.mark.parametrize("name", [name for name, entry in BACKENDS.built_in.items() if not entry.package])
def test_a_built_in_engine_takes_what_the_catalogue_says(name: str) -> None:
    engine, entry = get_engine(name), BACKENDS.built_in[name]
    assert engine.__module__ == entry.module
    takes = (engine.takes_lora, engine.takes_bfloat16, engine.takes_offload, engine.takes_compile, engine.takes_packing)
    assert takes == (entry.lora, entry.bfloat16, entry.offload, entry.compiles, entry.packing)


def test_registering_adds_to_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    native = get_rollout("native")  # a module registers itself once, so not in a table that is put back
    for registry in (engine_interface._ENGINES, rollout_interface._ENGINES):  # other tests look at all names
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    name = f"test-{uuid.uuid4()}"
    register_adv_estimator(name, needs_critic=True, needs_baseline=True)(lambda **_: None)  # type: ignore[arg-type]
    register_policy_loss(name)(lambda **_: None)  # type: ignore[arg-type]
    register_engine(name)(type("Mine", (HfEngine,), {"takes_bfloat16": False}))
    register_rollout(name)(type("MyRollout", (native,), {}))
    cfg = load_config(
        {
            "algorithm": {"adv_estimator": name},
            "actor_rollout_ref": {
                "actor": {"strategy": name, "policy_loss": {"loss_mode": name}},
                "rollout": {"name": name},
            },
        }
    )
    assert ESTIMATORS.get(name) == EstimatorEntry(needs_critic=True, needs_baseline=True)
    assert not [problem for problem in check_config(cfg) if name in problem]
    # What its class refuses is told before anything starts.
    model = replace(cfg.actor_rollout_ref.model, compute_dtype="bfloat16")
    other = replace(cfg, actor_rollout_ref=replace(cfg.actor_rollout_ref, model=model))
    [problem] = [problem for problem in check_config(other) if name in problem]
    assert problem.startswith("actor_rollout_ref.model.compute_dtype=bfloat16")


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
    monkeypatch.setattr(by_source._SCORERS, "_entries", dict(by_source._SCORERS._entries))
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


@dataclass(frozen=True)
class Record:
    function: object


def test_records_are_the_same_if_their_functions_are_and_give_way_only_to_an_override():
    registry: Registry[Record, NameEntry] = Registry(Catalog("data_source", {}))
    registry.register("mine")(Record(partial(sorted, reverse=True)))
    registry.register("mine")(Record(partial(sorted, reverse=True)))
    other = Record(partial(sorted, reverse=False))
    with pytest.raises(ConfigError, match="data_source=mine is already registered"):
        registry.register("mine")(other)
    registry.register("mine", override=True)(other)
    assert registry.entries == {"mine": other}
