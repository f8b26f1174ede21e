"""Each estimator and each policy loss raises the reward; without a learning rate none would (test_learning)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import RewardError
from paceline.protocol import DataProto
from paceline.trainer.ppo import phases
from tests.learn.test_learning import scores
from tests.runs import make_material, read_metrics

GROUPS = {"actor_rollout_ref__rollout__n": 4, "data__train_batch_size": 8}

ESTIMATORS: dict[str, dict[str, Any]] = {
    "rloo": GROUPS,
    "optimal_token_baseline": GROUPS,
    "reinforce_plus_plus": {},
}

# Relatives of those above, and what needs many steps; they take their turn in `make test-all`.
RELATIVES: dict[str, dict[str, Any]] = {
    "opo": GROUPS,
    "reinforce_plus_plus_baseline": GROUPS,
    # A random model's greedy response is one character again and again, all right or all wrong: a baseline far from the
    # mean, which costs steps.
    "remax": {"trainer__total_training_steps": 70},
    "grpo_passk": GROUPS,
    "gpg": GROUPS,
    "tir_optimal_token_baseline": GROUPS,
}

PARTS_REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Digits are what is wanted; few different characters are so a little."""
    length = max(1, len(solution_str))
    digits = sum(character.isdigit() for character in solution_str) / length
    return {"score": digits, "digits": digits, "plain": 1 - len(set(solution_str)) / length}
'''

# Two optimizer steps on each batch: in the second the ratios are not 1, so that the losses differ from REINFORCE.
TWO_STEPS = {**GROUPS, "algorithm__adv_estimator": "grpo", "actor_rollout_ref__actor__ppo_mini_batch_size": 4}

LOSSES: dict[str, dict[str, Any]] = {
    "gspo": {
        "actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-mean",
        "actor_rollout_ref__actor__clip_ratio": 0.02,
    },
    "cispo": {"actor_rollout_ref__actor__clip_ratio_low": 1.0, "actor_rollout_ref__actor__clip_ratio_high": 0.05},
    "clip_cov": {
        "actor_rollout_ref__actor__policy_loss__clip_cov_ratio": 0.02,
        "actor_rollout_ref__actor__policy_loss__clip_cov_lb": 0.1,
    },
}
SLOW_LOSSES: dict[str, dict[str, Any]] = {
    "sapo": {},
    "geo_mean": {"actor_rollout_ref__actor__clip_ratio": 0.02},
    "kl_cov": {"actor_rollout_ref__actor__policy_loss__kl_cov_ratio": 0.02},
    "dppo_tv": {"actor_rollout_ref__actor__clip_ratio": 0.002},
    "dppo_kl": {"actor_rollout_ref__actor__clip_ratio": 1e-4},
    "gpg": {},
    "dro": {"actor_rollout_ref__actor__policy_loss__dro_beta": 0.1},
}
NEVER_CLIP = ("sapo", "kl_cov", "gpg", "dro")

TOLD = "algorithm__rollout_correction__"
CORRECTIONS: dict[str, dict[str, Any]] = {
    # Bounds that bite: the rollout computes in bfloat16.
    "decoupled": {
        f"{TOLD}rollout_is": "token",
        f"{TOLD}rollout_is_threshold": "0.9_1.1",
        f"{TOLD}rollout_is_batch_normalize": True,
        f"{TOLD}rollout_rs": "token_k1,seq_mean_k3",
        f"{TOLD}rollout_rs_threshold": "1.002,0.001",
    },
    "bypass": {
        f"{TOLD}bypass_mode": True,
        f"{TOLD}loss_type": "reinforce",
        f"{TOLD}rollout_is": "sequence",
        f"{TOLD}rollout_is_batch_normalize": True,
        f"{TOLD}rollout_rs": "token_k2",
        f"{TOLD}rollout_rs_threshold": 1e-3,
    },
}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_material(tmp_path_factory.mktemp("material"), rows=64)


def assert_rises(found: list[float]) -> None:
    assert np.mean(found[-3:]) > np.mean(found[:3]) + 0.15, found


@pytest.mark.parametrize("name", [*ESTIMATORS, *(pytest.param(name, marks=pytest.mark.slow) for name in RELATIVES)])
def test_the_reward_rises_with_each_estimator(name: str, material: Path, tmp_path: Path) -> None:
    settings = (ESTIMATORS | RELATIVES)[name]
    assert_rises(scores(material, tmp_path, algorithm__adv_estimator=name, **settings))
    assert "critic/vf_loss" not in read_metrics(tmp_path)[-1]


def test_gdpo_raises_the_part_that_weighs_most(material: Path, tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(PARTS_REWARD)
    found = scores(
        material,
        tmp_path / "run",
        algorithm__adv_estimator="gdpo",
        algorithm__gdpo_reward_keys=["digits", "plain"],
        algorithm__gdpo_reward_weights=[1.0, 0.1],
        algorithm__filter_groups__enable=True,
        custom_reward_function__path=str(tmp_path / "parts.py"),
        **GROUPS,
    )
    assert_rises(found)
    lines = read_metrics(tmp_path / "run")
    assert [line["gdpo/digits/mean"] for line in lines] == pytest.approx(found)
    assert all(0 <= line["gdpo/plain/min"] <= line["gdpo/plain/max"] <= 1 for line in lines)


def test_gdpo_says_which_part_the_reward_lacks(material: Path, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="gdpo_reward_keys has 'style'"):
        scores(material, tmp_path, algorithm__adv_estimator="gdpo", algorithm__gdpo_reward_keys=["style"], **GROUPS)


def test_ppo_learns_from_rows_that_are_drawn_with_lambdas_of_their_own_and_an_unbiased_kl(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dealt: list[torch.Tensor] = []
    deal = phases.deal_mini_batches

    def watched(data: DataProto, **settings: Any) -> DataProto:
        dealt.append(data.batch["responses"])
        return deal(data, **settings)

    monkeypatch.setattr(phases, "deal_mini_batches", watched)
    changes = {
        "algorithm__use_pf_ppo": True,
        "algorithm__pf_ppo__weight_pow": 1.0,
        "algorithm__lam_critic": 1.0,
        "algorithm__lam_length_alpha": 1.0,
        "actor_rollout_ref__actor__kl_loss_type": "k3+",
        "actor_rollout_ref__actor__unbiased_kl_loss": True,
        "actor_rollout_ref__actor__ppo_mini_batch_size": 16,
    }
    assert_rises(scores(material, tmp_path, **changes))
    # Responses of a random model are all different: the critic and the actor of a step have the same ones twice.
    of_critic, of_actor = dealt[:2]
    assert torch.equal(of_critic, of_actor)
    assert len(of_actor) == 32 > len(of_actor.unique(dim=0))


@pytest.mark.parametrize("name", [*LOSSES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_LOSSES)])
def test_the_reward_rises_with_each_policy_loss(name: str, material: Path, tmp_path: Path) -> None:
    own = (LOSSES | SLOW_LOSSES)[name]
    changes = {**TWO_STEPS, **own, "actor_rollout_ref__actor__policy_loss__loss_mode": name}
    assert_rises(scores(material, tmp_path, **changes))
    lines = read_metrics(tmp_path)
    assert max(abs(line["actor/ppo_kl"]) for line in lines) > 0, "with ratios of 1 every loss is the same"
    if name not in NEVER_CLIP:
        assert max(line["actor/pg_clipfrac"] for line in lines) > 0, "nothing was clipped"


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_reward_rises_with_a_corrected_rollout(name: str, material: Path, tmp_path: Path) -> None:
    """An engine in other numbers than the trainer's; some of its tokens are rejected, and most train."""
    changes = {**TWO_STEPS, **CORRECTIONS[name], "actor_rollout_ref__rollout__dtype": "bfloat16"}
    assert_rises(scores(material, tmp_path, **changes))
    lines = read_metrics(tmp_path)
    rejected = [line["rollout_corr/rollout_rs_masked_fraction"] for line in lines]
    assert 0 < max(rejected) < 0.9
    assert all(0.5 < line["rollout_corr/rollout_is_mean"] < 2 for line in lines)


def test_a_step_of_which_everything_is_rejected_is_counted_and_gives_no_gradient(
    material: Path, tmp_path: Path
) -> None:
    """With a critic, and in bypass without one: no r is between 5 and 6."""
    nothing = {
        f"{TOLD}rollout_rs": "token_k1",
        f"{TOLD}rollout_rs_threshold": "5_6",
        "trainer__total_training_steps": 2,
    }
    for name, changes in {"decoupled": {}, "bypass": {**TWO_STEPS, f"{TOLD}bypass_mode": True}}.items():
        scores(material, tmp_path / name, actor_rollout_ref__actor__use_kl_loss=False, **nothing, **changes)
        for line in read_metrics(tmp_path / name):
            assert line["rollout_corr/rollout_rs_masked_fraction"] == 1.0
            assert line["actor/grad_norm"] == line["actor/pg_loss"] == line.get("critic/grad_norm", 0.0) == 0.0
            assert line.get("rollout_corr/rollout_rs_all_masked", 1.0) == 1.0
