from __future__ import annotations

import importlib.util
import uuid
from dataclasses import replace
from typing import Any

import pytest

from paceline.algorithms.advantages import needs_baseline, needs_critic, needs_groups, register_adv_estimator
from paceline.algorithms.policy_loss import get_policy_loss, register_policy_loss, usual_loss_agg_mode
from paceline.catalog import BACKENDS, ESTIMATORS, LOGGERS, LOSSES, ROLLOUTS
from paceline.config.checks import check_config, known_names
from paceline.config.load import load_config
from paceline.engine import HfEngine, engine_interface, get_engine, register_engine
from paceline.rollout import rollout_interface
from paceline.rollout.rollout_interface import get_rollout, register_rollout

CATALOGS = {"estimators": ESTIMATORS, "losses": LOSSES, "backends": BACKENDS, "rollouts": ROLLOUTS, "loggers": LOGGERS}


@pytest.mark.parametrize("catalog", CATALOGS.values(), ids=CATALOGS)
def test_every_built_in_name_lives_where_the_catalogue_says(catalog: Any) -> None:
    assert all(importlib.util.find_spec(module) for module in catalog.modules.values())


def test_what_is_registered_is_what_the_catalogue_says() -> None:
    for name, entry in ESTIMATORS.built_in.items():
        found = (needs_critic(name), needs_groups(name), needs_baseline(name))
        assert found == (entry.needs_critic, entry.needs_groups, entry.needs_baseline)
    for name, loss in LOSSES.built_in.items():
        assert get_policy_loss(name).__module__ == loss.module
        assert usual_loss_agg_mode(name) == loss.loss_agg_mode


@pytest.mark.parametrize("name", [name for name, entry in BACKENDS.built_in.items() if not entry.package])
def test_a_built_in_engine_takes_what_the_catalogue_says(name: str) -> None:
    engine, entry = get_engine(name), BACKENDS.built_in[name]
    assert engine.__module__ == entry.module
    assert (engine.takes_lora, engine.takes_bfloat16, engine.takes_offload) == (
        entry.lora,
        entry.bfloat16,
        entry.offload,
    )


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
    known = known_names(cfg)
    assert name in known.critic_estimators
    assert name in known.baseline_estimators
    assert name not in known.group_estimators
    assert not [problem for problem in check_config(cfg, known=known) if name in problem]
    # What its class refuses is told before anything starts.
    model = replace(cfg.actor_rollout_ref.model, compute_dtype="bfloat16")
    other = replace(cfg, actor_rollout_ref=replace(cfg.actor_rollout_ref, model=model))
    [problem] = [problem for problem in check_config(other, known=known) if name in problem]
    assert problem.startswith("actor_rollout_ref.model.compute_dtype=bfloat16")
