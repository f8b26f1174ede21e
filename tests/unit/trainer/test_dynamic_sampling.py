"""Groups of equal scores make room for those of other prompts, in as many batches as are allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from paceline.config import FilterGroupsConfig
from paceline.errors import ConfigError, RewardError
from paceline.protocol import DataProto, DataProtoFuture
from paceline.trainer.ppo.dynamic_sampling import refill_groups

EQUAL, DIFFERENT = (1.0, 1.0), (0.0, 1.0)


def responses(name: str, groups: int) -> DataProto:
    """Two responses of one token to each of some prompts."""
    rows = 2 * groups
    uids = np.array([f"{name}-{row // 2}" for row in range(rows)], dtype=object)
    tensors = {"response_mask": torch.ones(rows, 1, dtype=torch.long)}
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids, "data_source": np.array(["s"] * rows)})


def refill(
    scores: list[list[tuple[float, float]]],
    *,
    wanted: int,
    most: int = 10,
    metric: str | None = "acc",
    components: tuple[str, ...] = (),
    fields_of: Callable[[float], dict[str, Any]] = lambda value: {"acc": value},
) -> tuple:
    """Batch i of the draws has groups with `scores[i]`; gives what was refilled, and the purposes of the draws."""
    given = iter(scores)
    purposes: list[str] = []

    def score(batch: DataProto) -> DataProtoFuture:
        values = torch.tensor([value for group in next(given) for value in group])[:, None]
        fields = np.array([{"score": v, **fields_of(v)} for v in values[:, 0].tolist()], dtype=object)
        return DataProtoFuture.of(
            DataProto.from_dict(
                tensors={"token_level_scores": values},
                non_tensors={"reward_extra_info": fields},
                meta_info={"metrics": {"reward/of": float(len(values))}},
            )
        )

    def draw(purpose: str) -> DataProto:
        purposes.append(purpose)
        return responses(purpose, len(scores[len(purposes)]))

    settings = FilterGroupsConfig(enable=True, metric=metric, max_num_gen_batches=most)
    first = responses("first", len(scores[0]))
    refilled = refill_groups(
        first, score, draw, settings, step=3, wanted=wanted, source_key="data_source", components=components
    )
    return refilled, purposes


def test_groups_with_signal_are_kept_in_order_until_there_are_enough() -> None:
    (batch, metrics), purposes = refill([[EQUAL, DIFFERENT], [DIFFERENT, DIFFERENT]], wanted=4)
    assert purposes == ["training, refill 1"]
    assert batch.non_tensor_batch["uid"].tolist() == ["first-1"] * 2 + ["training, refill 1-0"] * 2
    assert batch.batch["token_level_scores"][:, 0].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert (metrics["training/gen_batches"], metrics["training/share_kept"]) == (2.0, 0.5)


def test_metrics_are_of_all_responses_that_were_drawn() -> None:
    (_, metrics), _ = refill([[EQUAL, EQUAL], [DIFFERENT]], wanted=2)
    assert metrics["reward/s/acc"] == pytest.approx(5 / 6)


def test_with_too_few_groups_the_step_goes_on_with_those_that_were_found(caplog: pytest.LogCaptureFixture) -> None:
    (batch, _), purposes = refill([[DIFFERENT], [EQUAL]], wanted=4, most=2)
    assert (len(batch), len(purposes)) == (2, 1)
    assert "step 3: 2 of 4 responses are in groups with signal after 2 batches" in caplog.text


def test_without_any_group_the_run_ends() -> None:
    with pytest.raises(RewardError, match="step 3: in 2 batches every group"):
        refill([[EQUAL], [EQUAL]], wanted=2, most=2)


def test_a_score_that_is_not_finite_ends_the_search() -> None:
    (batch, metrics), purposes = refill([[(float("nan"), 1.0), EQUAL]], wanted=4)
    assert (len(batch), purposes, metrics) == (4, [], {"reward/of": 4.0})


def test_a_metric_that_no_response_has_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"filter_groups\.metric.*acc, score, seq_final_reward, seq_reward"):
        refill([[EQUAL]], wanted=2, metric="style")


@pytest.mark.parametrize("metric", [None, "seq_reward", "seq_final_reward", "score", "acc", "length"])
def test_each_metric_tells_groups_apart(metric: str | None) -> None:
    (batch, _), purposes = refill(
        [[EQUAL], [DIFFERENT]], wanted=2, metric=metric, fields_of=lambda value: {"acc": value, "length": 3 * value}
    )
    assert (len(batch), len(purposes)) == (2, 1)


def test_the_metric_score_is_that_before_the_overlong_penalty() -> None:
    (batch, _), purposes = refill(
        [[(1.0, 0.5)], [DIFFERENT]],
        wanted=2,
        metric="score",
        fields_of=lambda value: {"unshaped_score": float(value > 0), "overlong_penalty": value - float(value > 0)},
    )
    assert (len(batch), len(purposes)) == (2, 1)


def test_a_group_of_equal_scores_stays_if_one_of_the_parts_differs() -> None:
    parts = iter([(1.0, 0.0), (0.0, 1.0)])
    (batch, _), purposes = refill(
        [[EQUAL]],
        wanted=2,
        metric=None,
        components=("acc", "style"),
        fields_of=lambda _: dict(zip(("acc", "style"), next(parts), strict=True)),
    )
    assert (len(batch), purposes) == (2, [])


def test_a_part_that_a_response_lacks_is_refused() -> None:
    with pytest.raises(RewardError, match=r"gdpo_reward_keys has 'style', and the reward of response 0.*score, acc"):
        refill([[EQUAL]], wanted=2, metric=None, components=("acc", "style"))
