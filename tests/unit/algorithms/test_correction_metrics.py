from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from paceline.algorithms.correction_metrics import correction_metrics
from paceline.algorithms.rollout_correction import NO_CORRECTION, Rejection, RolloutCorrection
from tests.unit.algorithms.algorithm_cases import QUICK, Batch, batches
from tests.unit.algorithms.test_rollout_correction import MASK, ROLLOUT, TRAINER

ALL = RolloutCorrection("token", None, 2.0, True, (Rejection.of_ratio("token_k1", 0.5, 2.0),))


def of_example(correction: RolloutCorrection) -> dict[str, float]:
    found = correction_metrics(TRAINER, ROLLOUT, MASK, correction)
    assert all(name.startswith("rollout_corr/") for name in found)
    return {name.removeprefix("rollout_corr/"): value for name, value in found.items()}


def test_the_mismatch_is_the_numbers_that_others_compute() -> None:
    found = of_example(NO_CORRECTION)
    expected = {"kl": -0.12, "k3_kl": 0.159722, "ppl_ratio": 0.968967, "chi2_token": 1.175704, "chi2_seq": 2.919193}
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=2e-6)
    # By hand: the means of the log-probs of both rows are -1.233333 and -0.8, and -1.566667 and -0.6.
    expected = {
        "training_log_ppl": 1.0166667,
        "rollout_log_ppl": 1.0833333,
        "training_ppl": (math.exp(1.2333333) + math.exp(0.8)) / 2,
        "rollout_ppl": (math.exp(1.5666667) + math.exp(0.6)) / 2,
        "log_ppl_diff": -0.0666667,
        "log_ppl_abs_diff": 0.2666667,
        "log_ppl_diff_max": 0.2,
        "log_ppl_diff_min": -0.3333333,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=2e-6)
    assert not any("rollout_is" in name or "rollout_rs" in name for name in found)


def test_weights_are_measured_before_their_mean_is_taken_out() -> None:
    found = of_example(ALL)
    # Weights 1.10517, 2 (of 2.71828), 0.90484 and 1, 0.67032.
    expected = {
        "rollout_is_mean": 1.136066,
        "rollout_is_max": 2.0,
        "rollout_is_min": 0.67032,
        "rollout_is_eff_sample_size": 0.86164,
        "rollout_is_ratio_fraction_high": 0.2,
        "rollout_is_ratio_fraction_low": 0.0,
        "rollout_is_seq_max": 1.336670,
        "rollout_is_seq_min": 0.83516,
        "rollout_is_seq_max_deviation": 0.336670,
        "rollout_is_batch_norm_factor": 1.136066,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=5e-6)


def test_masked_weights_are_counted() -> None:
    found = of_example(RolloutCorrection("token", 0.9, 2.0))
    assert found["rollout_is_oob_ratio"] == pytest.approx(0.4)  # 2.718 and 0.670
    assert "rollout_is_batch_norm_factor" not in found
    # One weight for a response: 2.718 is raw in the extremes, and high.
    found = of_example(RolloutCorrection("sequence", None, 2.0))
    assert found["rollout_is_max"] == pytest.approx(math.e, abs=1e-5)
    assert found["rollout_is_ratio_fraction_high"] == pytest.approx(0.6)
    assert found["rollout_is_seq_fraction_high"] == 0.5


def test_shares_that_are_rejected() -> None:
    found = of_example(ALL)
    assert found["rollout_rs_token_k1_mean"] == pytest.approx(-0.12)
    assert found["rollout_rs_token_k1_fraction_low"] == pytest.approx(0.2)  # k1 is -log r, and r = e is above 2
    assert found["rollout_rs_token_k1_masked_fraction"] == pytest.approx(0.2)
    assert found["rollout_rs_masked_fraction"] == pytest.approx(0.2)
    assert found["rollout_rs_seq_masked_fraction"] == 0.0
    assert found["rollout_rs_all_masked"] == 0.0
    everything = of_example(RolloutCorrection(rejections=(Rejection("seq_sum_k2", 0.0, 1e-9),)))
    assert everything["rollout_rs_masked_fraction"] == 1.0
    assert everything["rollout_rs_seq_masked_fraction"] == 1.0
    assert everything["rollout_rs_all_masked"] == 1.0


@QUICK
@given(batch=batches())
def test_the_means_equal_the_slow_version_and_padding_enters_none(batch: Batch) -> None:
    trainer, rollout = batch["log_prob"], batch["old_log_prob"]
    found = correction_metrics(trainer, rollout, batch.mask, ALL)
    logs = [
        [(trainer[row, t] - rollout[row, t]).item() for t in bits.nonzero().flatten().tolist()]
        for row, bits in enumerate(batch.mask)
    ]
    rows = [row for row in logs if row]
    tokens = [log for row in rows for log in row]
    if not tokens:
        assert found == {}
        return
    weights = [min(math.exp(log), 2.0) for log in tokens]
    mean = sum(weights) / len(weights)
    expected = {
        "kl": -sum(tokens) / len(tokens),
        "k3_kl": sum(math.exp(log) - log - 1 for log in tokens) / len(tokens),
        "chi2_token": sum(math.exp(2 * log) for log in tokens) / len(tokens) - 1,
        "chi2_seq": sum(math.exp(2 * sum(row)) for row in rows) / len(rows) - 1,
        "ppl_ratio": sum(math.exp(-sum(row) / len(row)) for row in rows) / len(rows),
        "rollout_is_mean": mean,
        "rollout_is_std": math.sqrt(sum((weight - mean) ** 2 for weight in weights) / len(weights)),
        "rollout_is_eff_sample_size": mean**2 * len(weights) / sum(weight**2 for weight in weights),
        "rollout_rs_masked_fraction": sum(abs(log) > math.log(2) for log in tokens) / len(tokens),
        "rollout_rs_seq_masked_fraction": sum(all(abs(log) > math.log(2) for log in row) for row in rows) / len(rows),
    }
    for name, value in expected.items():
        assert found[f"rollout_corr/{name}"] == pytest.approx(value, rel=1e-6, abs=1e-6), name
    longer = batch.padded_right(2)
    padded = correction_metrics(longer["log_prob"], longer["old_log_prob"], longer.mask, ALL)
    assert padded == pytest.approx(found, rel=1e-6, abs=1e-9)
    assert all(torch.isfinite(torch.tensor(list(found.values()))))
