from __future__ import annotations

import pytest
import torch

from paceline.config import OptimConfig
from paceline.engine.optim import make_optimizer, make_schedule
from paceline.errors import ConfigError


def rates(total: int | None, steps: int, **fields: object) -> list[float]:
    schedule = make_schedule(OptimConfig(lr=1.0, **fields), total)
    return [schedule(step) for step in range(steps)]


def test_constant_stays_at_lr_and_needs_no_length() -> None:
    assert rates(None, 3) == [1.0, 1.0, 1.0]


def test_warmup_rises_in_equal_steps_and_never_takes_zero() -> None:
    assert rates(None, 6, lr_warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_to_its_floor_and_stays_there() -> None:
    expected = [1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]
    assert rates(4, 7, lr_scheduler_type="linear", min_lr_ratio=0.2) == pytest.approx(expected)


def test_cosine_is_half_way_at_half_time() -> None:
    expected = [0.5, 1.0, 1.0, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5, 0.0]
    assert rates(6, 7, lr_scheduler_type="cosine", lr_warmup_steps=2) == pytest.approx(expected, abs=1e-12)


def test_warmup_can_be_a_share_of_all_steps() -> None:
    assert rates(10, 3, lr_warmup_steps_ratio=0.2) == [0.5, 1.0, 1.0]


def test_warmup_steps_win_over_the_share() -> None:
    assert rates(10, 2, lr_warmup_steps=0, lr_warmup_steps_ratio=0.2) == [1.0, 1.0]


def test_a_warmup_longer_than_the_run_only_rises() -> None:
    assert rates(2, 3, lr_scheduler_type="linear", lr_warmup_steps=4) == [0.25, 0.5, 0.75]


@pytest.mark.parametrize("fields", [{"lr_scheduler_type": "cosine"}, {"lr_warmup_steps_ratio": 0.1}])
def test_a_schedule_that_needs_the_length_says_what_to_set(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="total_training_steps"):
        make_schedule(OptimConfig(**fields), None)


def test_an_unknown_schedule_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"(?i)did you mean .?cosine"):
        make_schedule(OptimConfig(lr_scheduler_type="cosin"), 10)


def test_the_optimizer_takes_its_settings_and_only_what_trains() -> None:
    trained = torch.nn.Parameter(torch.ones(2))
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    config = OptimConfig(lr=0.1, betas=(0.5, 0.6), eps=1e-3, weight_decay=0.2)
    (group,) = make_optimizer([trained, frozen], config).param_groups
    assert group["params"] == [trained]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.1, (0.5, 0.6), 1e-3, 0.2)
