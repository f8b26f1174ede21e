"""What is said before a run starts."""

from __future__ import annotations

from typing import Any

from paceline.config.load import load_config
from paceline.trainer.plan import plan_warnings


def test_idle_devices_are_reported(good: dict[str, Any]):
    config = {
        **good,
        "algorithm": {"adv_estimator": "grpo"},
        "trainer": {"n_gpus_per_node": 4, "placement": {"name": "split"}},
    }
    assert "the 2 devices of critic_pool are not used" in "\n".join(plan_warnings(load_config(config)))
