"""The losses that the workers give to their engines: any cut of a mini-batch adds up to the same loss and metrics."""

from __future__ import annotations

import itertools
import uuid
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from paceline.algorithms.policy_loss import register_policy_loss
from paceline.config import ActorConfig, CriticConfig, PolicyLossConfig
from paceline.errors import ConfigError
from paceline.workers.losses import MiniBatch, actor_loss, critic_loss, mean_metrics

ROWS, WIDTH = 6, 5


def example() -> tuple[TensorDict, dict[str, torch.Tensor], MiniBatch]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 1, 3, 0, 2, 4])
    mask = (torch.arange(WIDTH)[None] < lengths[:, None]).long()

    def column() -> torch.Tensor:
        return torch.randn(ROWS, WIDTH, generator=generator) * mask

    batch = TensorDict(
        {
            "response_mask": mask,
            "old_log_probs": column(),
            "ref_log_prob": column(),
            "advantages": column(),
            "values": column(),
            "returns": column(),
        },
        batch_size=[ROWS],
    )
    output = {"log_probs": column(), "entropy": column().abs(), "values": column()}
    return batch, output, MiniBatch(rows_per_shard=ROWS, num_tokens=int(mask.sum()), num_sequences=ROWS)


def total(loss_fn, batch: TensorDict, output: dict[str, torch.Tensor], cuts: list[int]) -> dict[str, float]:
    """Loss and metrics summed over the parts between the cuts."""
    edges = [0, *sorted(cuts), ROWS]
    sums: dict[str, float] = {}
    for start, stop in itertools.pairwise(edges):
        loss, metrics = loss_fn({name: column[start:stop] for name, column in output.items()}, batch[start:stop])
        for name, value in {"loss": loss, **metrics}.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(1, ROWS - 1), unique=True),
    mode=st.sampled_from(["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]),
)
def test_micro_batches_add_up_to_the_whole_mini_batch(cuts: list[int], mode: str) -> None:
    batch, output, mini_batch = example()
    actor = actor_loss(ActorConfig(loss_agg_mode=mode, use_kl_loss=True, entropy_coeff=0.1), mini_batch)
    critic = critic_loss(CriticConfig(loss_agg_mode=mode), mini_batch)
    for loss_fn in (actor, critic):
        assert total(loss_fn, batch, output, cuts) == pytest.approx(total(loss_fn, batch, output, []), abs=1e-5)


def test_the_actors_loss_is_policy_loss_less_entropy_plus_kl() -> None:
    batch, output, mini_batch = example()
    config = ActorConfig(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="kl", entropy_coeff=0.1)
    found = total(actor_loss(config, mini_batch), batch, output, [])
    plain = total(actor_loss(replace(config, use_kl_loss=False, entropy_coeff=0.0), mini_batch), batch, output, [])
    tokens = mini_batch.num_tokens
    entropy = float(output["entropy"].sum()) / tokens
    kl = float((output["log_probs"] - batch["ref_log_prob"]).sum()) / tokens
    assert found["loss"] == pytest.approx(plain["loss"] - 0.1 * entropy + 0.5 * kl, abs=1e-5)
    assert found["entropy"] == pytest.approx(entropy, abs=1e-5)
    assert found["kl_loss"] == pytest.approx(kl, abs=1e-5)


def test_without_old_log_probs_the_old_policy_is_the_current_one() -> None:
    batch, output, mini_batch = example()
    without = batch.exclude("old_log_probs")
    found = total(actor_loss(ActorConfig(), mini_batch), without, output, [])
    # The ratio is 1, so the loss is minus the mean advantage and nothing is clipped.
    assert found["loss"] == pytest.approx(-float(batch["advantages"].sum()) / mini_batch.num_tokens, abs=1e-5)
    assert found["ppo_kl"] == 0.0
    assert found["pg_clipfrac"] == 0.0


def test_metrics_of_optimizer_steps_are_averaged_and_the_learning_rate_is_the_last() -> None:
    steps = [{"grad_norm": 1.0, "lr": 0.1}, {"grad_norm": 2.0, "lr": 0.2}]
    assert mean_metrics(steps, "actor") == {"actor/grad_norm": 1.5, "actor/lr": 0.2}


def test_tokens_of_another_engine_weigh_what_the_trainer_thinks_of_them_up_to_the_cap() -> None:
    """Two tokens of advantage 1, on-policy: the loss of each is -1 times min(e^(old - rollout), 2)."""
    column = torch.tensor([[-1.0, -1.0]])
    batch = TensorDict(
        {
            "response_mask": torch.ones(1, 2, dtype=torch.int64),
            "old_log_probs": column,
            "rollout_log_probs": torch.tensor([[-1.5, -9.0]]),
            "advantages": torch.ones(1, 2),
        },
        batch_size=[1],
    )
    output = {"log_probs": column.clone().requires_grad_(), "entropy": torch.zeros(1, 2)}
    loss_fn = actor_loss(ActorConfig(tis_imp_ratio_cap=2.0), MiniBatch(1, num_tokens=2, num_sequences=1))
    loss, _ = loss_fn(output, batch)
    loss.backward()
    weights = torch.tensor([[0.5, 0.0]]).exp() * torch.tensor([[1.0, 2.0]])
    assert float(loss.detach()) == pytest.approx(-float(weights.mean()))
    torch.testing.assert_close(output["log_probs"].grad, -weights / 2)


def test_a_mini_batch_of_empty_responses_has_loss_and_metrics_of_0() -> None:
    batch, output, _ = example()
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    nothing = MiniBatch(rows_per_shard=ROWS, num_tokens=0, num_sequences=0)
    for loss_fn in (actor_loss(ActorConfig(use_kl_loss=True), nothing), critic_loss(CriticConfig(), nothing)):
        assert set(total(loss_fn, batch, output, []).values()) == {0.0}


def two_responses() -> tuple[TensorDict, torch.Tensor, MiniBatch]:
    """Five tokens, one of them between the others outside the mask; the policy's log-probs beside them."""
    batch = TensorDict(
        {
            "response_mask": torch.tensor([[1, 1, 1], [1, 0, 1]]),
            "old_log_probs": torch.tensor([[-0.5, -1.2, -2.0], [-0.1, -0.7, -1.5]]),
            "rollout_log_probs": torch.tensor([[-0.6, -2.2, -1.9], [-0.1, -9.9, -1.1]]),
            "advantages": torch.tensor([[1.0, 1.0, 1.0], [-0.5, -0.5, -0.5]]),
        },
        batch_size=[2],
    )
    log_probs = torch.tensor([[-0.4, -1.6, -1.0], [-0.3, -0.7, -1.45]], requires_grad=True)
    return batch, log_probs, MiniBatch(rows_per_shard=2, num_tokens=5, num_sequences=2)


def config_of(loss_mode: str, **settings: object) -> ActorConfig:
    return ActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss_mode), **settings)


def loss_and_gradient(config: ActorConfig) -> tuple[float, torch.Tensor]:
    batch, log_probs, mini_batch = two_responses()
    loss, _ = actor_loss(config, mini_batch)({"log_probs": log_probs, "entropy": torch.zeros(2, 3)}, batch)
    loss.backward()
    return float(loss.detach()), log_probs.grad


@pytest.mark.parametrize(
    ("loss_mode", "expected", "gradient"),
    [
        ("vanilla", -0.408098, [[-1.10517, -0.67032, 0.0], [0.40937, 0.0, 0.52564]]),
        ("gspo", -0.368064, [[0.0, 0.0, 0.0], [0.57984, 0.0, 0.57984]]),
        ("cispo", 0.407417, [[-1.10517, -0.8, -1.2], [0.40937, 0.0, 0.52564]]),
    ],
)
def test_losses_with_all_defaults_give_the_numbers_that_others_compute(
    loss_mode: str, expected: float, gradient: list[list[float]]
) -> None:
    """The gradient is given times the number of tokens."""
    loss, found = loss_and_gradient(config_of(loss_mode))
    assert loss == pytest.approx(expected, abs=2e-6)
    torch.testing.assert_close(5 * found, torch.tensor(gradient), atol=1e-5, rtol=1e-5)


def test_truncated_importance_weights_give_the_number_that_others_compute() -> None:
    assert loss_and_gradient(config_of("vanilla", tis_imp_ratio_cap=2.0))[0] == pytest.approx(-0.577228, abs=2e-6)


def test_an_aggregation_that_is_set_counts_and_else_the_losss_own() -> None:
    by_sequence = loss_and_gradient(config_of("gspo", loss_agg_mode="seq-mean-token-mean"))[0]
    assert loss_and_gradient(config_of("gspo"))[0] == by_sequence
    # One number per response, -1.2 and 0.463874, over three and two tokens.
    by_token = loss_and_gradient(config_of("gspo", loss_agg_mode="token-mean"))[0]
    assert by_token == pytest.approx((3 * -1.2 + 2 * 0.463874) / 5, abs=1e-5)


def test_a_registered_loss_brings_its_aggregation() -> None:
    name = f"own-{uuid.uuid4()}"

    @register_policy_loss(name, loss_agg_mode="seq-mean-token-sum")
    def reinforce(old_log_prob, log_prob, advantages, response_mask, *, agg, **_):
        return agg(-advantages * log_prob), {}

    assert loss_and_gradient(config_of(name))[0] == pytest.approx((3.0 - 0.875) / 2)
    with pytest.raises(ConfigError, match="did you mean token-mean"):
        register_policy_loss("other", loss_agg_mode="token_mean")
