"""What counts as unusual."""

from __future__ import annotations

import random

import pytest

from paceline.report.anomalies import FEWEST, Anomalies


def watched(name: str, values: list[float]) -> list[list[str]]:
    watch = Anomalies()
    return [watch.look({name: value}) for value in values]


@pytest.mark.parametrize(
    ("name", "usual", "unusual"),
    [
        ("actor/grad_norm", 0.5, 50.0),
        ("actor/ppo_kl", 0.01, 5.0),
        ("actor/entropy", 2.0, 0.05),
        ("critic/score/mean", 0.2, 0.95),
        ("training/rollout_probs_diff_max", 1e-6, 0.2),
    ],
)
def test_a_step_far_from_its_run_is_named(name: str, usual: float, unusual: float) -> None:
    generator = random.Random(0)
    values = [usual * (1 + 0.05 * generator.random()) for _ in range(30)]
    found = watched(name, [*values, unusual, usual])
    assert found[:30] == [[]] * 30
    assert found[30][0].startswith(f"{name} is ")
    assert found[31] == []  # what was far did not become usual


def test_learning_is_not_unusual() -> None:
    generator = random.Random(1)
    scores = [min(1.0, 0.01 * step) + 0.1 * generator.random() for step in range(200)]
    assert watched("critic/score/mean", scores) == [[]] * 200
    norms = [generator.lognormvariate(0.0, 0.4) for _ in range(500)]
    assert sum(map(bool, watched("actor/grad_norm", norms))) == 0


def test_nothing_is_unusual_before_there_is_a_usual_one() -> None:
    assert watched("actor/grad_norm", [1.0] * (FEWEST - 1) + [1000.0]) == [[]] * FEWEST


def test_what_is_not_finite_is_always_unusual() -> None:
    assert Anomalies().look({"actor/pg_loss": float("nan")}) == ["actor/pg_loss is nan"]
    assert Anomalies().look({"training/nonfinite/values": 3.0}) == ["values was not finite at 3 places"]
