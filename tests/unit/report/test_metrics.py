from __future__ import annotations

import time

import pytest
import torch

from paceline.errors import DataError
from paceline.protocol import DataProto
from paceline.report.metrics import Timer, data_metrics, throughput_metrics, timing_metrics


def _batch() -> DataProto:
    """Prompts of 3, 1 and 2 tokens (width 3), responses of 2, 1 and 4 (width 4), and a row of padding.

    The third response has a hole: its second token came from a tool. Outside the mask everything is 99.
    """
    return DataProto.from_dict(
        tensors={
            "prompts": torch.zeros(4, 3, dtype=torch.int64),
            "responses": torch.zeros(4, 4, dtype=torch.int64),
            "attention_mask": torch.tensor(
                [[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]]
            ),
            "response_mask": torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0]]),
            "token_level_scores": _columns([[0, 1], [0], [1, 1, 3]]),
            "token_level_rewards": _columns([[-1, 1], [-2], [0.5, 1, 3]]),
            "advantages": _columns([[1, 2], [-3], [0, 0, 6]]),
            "returns": _columns([[2, 2], [0], [4, 4, 0]]),
            "values": _columns([[1, 3], [0], [3, 5, 0]]),
        }
    )


def _columns(valid: list[list[float]]) -> torch.Tensor:
    """Valid entries of the first three rows, in the places that the response mask has for them."""
    column = torch.full((4, 4), 99.0)
    for row, (places, entries) in enumerate(zip([[0, 1], [0], [0, 2, 3]], valid, strict=True)):
        column[row, places] = torch.tensor(entries, dtype=torch.float32)
    return column


def test_data_metrics_hand_computed() -> None:
    metrics = data_metrics(_batch(), use_critic=True)
    expected = {
        "critic/score/mean": 2.0,  # 1, 0 and 5 per response
        "critic/score/max": 5.0,
        "critic/score/min": 0.0,
        "critic/rewards/mean": 2.5 / 3,  # 0, -2 and 4.5
        "critic/rewards/max": 4.5,
        "critic/rewards/min": -2.0,
        "critic/advantages/mean": 1.0,  # 6 over 6 tokens
        "critic/advantages/max": 6.0,
        "critic/advantages/min": -3.0,
        "critic/returns/mean": 2.0,  # 12 over 6 tokens
        "critic/returns/max": 4.0,
        "critic/returns/min": 0.0,
        "critic/values/mean": 2.0,  # 12 over 6 tokens
        "critic/values/max": 5.0,
        "critic/values/min": 0.0,
        # Errors 1, -1, 0, 1, -1, 0: mean 0, variance 4/6. Returns around 2: 0, 0, 4, 4, 4, 4: variance 16/6.
        "critic/vf_explained_var": 0.75,
        "response_length/mean": 7 / 3,
        "response_length/max": 4.0,
        "response_length/min": 1.0,
        "response_length/clip_ratio": 1 / 3,
        "prompt_length/mean": 2.0,
        "prompt_length/max": 3.0,
        "prompt_length/min": 1.0,
        "prompt_length/clip_ratio": 1 / 3,
    }
    assert metrics == pytest.approx(expected)
    assert all(type(value) is float for value in metrics.values())


def test_rejected_tokens_have_no_advantages_unless_all_are() -> None:
    batch = _batch()
    batch.batch["loss_mask"] = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]])
    metrics = data_metrics(batch, use_critic=True)
    assert metrics["critic/advantages/mean"] == pytest.approx(3.0)  # 1, 2 and 6
    assert metrics["critic/score/mean"] == pytest.approx(2.0)  # scores are of all responses
    batch.batch["loss_mask"] = torch.zeros(4, 4, dtype=torch.int64)
    assert data_metrics(batch, use_critic=True)["critic/advantages/mean"] == pytest.approx(1.0)


def test_without_a_critic_there_are_no_value_metrics() -> None:
    batch = _batch()
    batch.pop(batch_keys=["values"])
    metrics = data_metrics(batch, use_critic=False)
    assert "critic/returns/mean" in metrics
    assert not any("values" in name or "vf_" in name for name in metrics)


def test_returns_that_do_not_vary_leave_no_variance_to_explain() -> None:
    batch = _batch()
    batch.batch["returns"] = torch.full((4, 4), 0.1)
    assert data_metrics(batch, use_critic=True)["critic/vf_explained_var"] == 0.0


def test_a_critic_that_is_right_explains_all_variance() -> None:
    batch = _batch()
    batch.batch["values"] = batch.batch["returns"]
    assert data_metrics(batch, use_critic=True)["critic/vf_explained_var"] == 1.0


def test_timing_metrics_count_generation_by_response_tokens_and_other_phases_by_all() -> None:
    timings = {"gen": 0.7, "old_log_prob": 1.3, "update_actor": 2.6, "step": 5.0}
    # 7 response tokens; with the 6 of the prompts 13.
    assert timing_metrics(_batch(), timings) == pytest.approx(
        {
            "timing_s/gen": 0.7,
            "timing_s/old_log_prob": 1.3,
            "timing_s/update_actor": 2.6,
            "timing_s/step": 5.0,
            "timing_per_token_ms/gen": 100.0,
            "timing_per_token_ms/old_log_prob": 100.0,
            "timing_per_token_ms/update_actor": 200.0,
        }
    )


def test_throughput_is_per_second_and_device() -> None:
    assert throughput_metrics(_batch(), seconds_per_step=0.5, num_devices=2) == {
        "perf/total_num_tokens": 13.0,
        "perf/time_per_step": 0.5,
        "perf/throughput": 13.0,
    }


def test_a_batch_without_responses_is_an_error_that_says_so() -> None:
    batch = _batch()
    batch.batch["response_mask"] = torch.zeros(4, 4, dtype=torch.int64)
    with pytest.raises(DataError, match="None of the 4 rows"):
        data_metrics(batch, use_critic=True)


def test_the_timer_adds_up_blocks_of_one_name(monkeypatch) -> None:
    clock = iter([10.0, 12.5, 20.0, 21.0, 30.0, 30.25])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    timer = Timer()
    with timer("gen"):
        pass
    with timer("reward"):
        pass
    with timer("gen"):
        pass
    assert timer.seconds == {"gen": 2.75, "reward": 1.0}


def test_the_timer_counts_a_block_that_raises(monkeypatch) -> None:
    clock = iter([1.0, 4.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    timer = Timer()
    with pytest.raises(RuntimeError, match="stopped"), timer("gen"):
        raise RuntimeError("stopped")
    assert timer.seconds == {"gen": 3.0}
