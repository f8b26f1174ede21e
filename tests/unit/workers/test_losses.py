"""The losses that the workers give to their engines: any cut of a mini-batch adds up to the same loss and metrics."""

from __future__ import annotations

import itertools
import math
import uuid
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from paceline.algorithms.aggregation import LOSS_AGG_MODES
from paceline.algorithms.policy_loss import register_policy_loss
from paceline.algorithms.rollout_correction import NO_CORRECTION, Rejection, RolloutCorrection
from paceline.catalog import LOSSES
from paceline.config import ActorConfig, CriticConfig, DistillationLossConfig, PolicyLossConfig
from paceline.errors import ConfigError
from paceline.protocol import DataProto
from paceline.workers.losses import MiniBatch, actor_loss, critic_loss, mean_metrics, with_mean_weight

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
@given(cuts=st.lists(st.integers(1, ROWS - 1), unique=True), mode=st.sampled_from(LOSS_AGG_MODES))
def test_micro_batches_add_up_to_the_whole_mini_batch(cuts: list[int], mode: str) -> None:
    batch, output, mini_batch = example()
    actor = actor_loss(ActorConfig(loss_agg_mode=mode, use_kl_loss=True, entropy_coeff=0.1), mini_batch)
    critic = critic_loss(CriticConfig(loss_agg_mode=mode), mini_batch)
    for loss_fn in (actor, critic):
        assert total(loss_fn, batch, output, cuts) == pytest.approx(total(loss_fn, batch, output, []), abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(1, ROWS - 1), unique=True),
    loss_mode=st.sampled_from(sorted(set(LOSSES.built_in) - {"bypass_mode"})),
    correction=st.sampled_from(
        [
            NO_CORRECTION,
            RolloutCorrection(rejections=(Rejection("token_k2", 0.0, 0.5),), bypass=True),
            RolloutCorrection("sequence", rejections=(Rejection("seq_mean_k3", 0.0, 0.4),), bypass=True),
        ]
    ),
)
def test_micro_batches_add_up_with_every_loss_and_correction(
    cuts: list[int], loss_mode: str, correction: RolloutCorrection
) -> None:
    batch, output, mini_batch = example()
    generator = torch.Generator().manual_seed(1)
    batch["rollout_is_weights"] = torch.rand(ROWS, WIDTH, generator=generator)
    batch["loss_mask"] = batch["response_mask"] * (torch.rand(ROWS, WIDTH, generator=generator) > 0.3)
    batch["high_covariance"] = torch.rand(ROWS, WIDTH, generator=generator) > 0.5
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss_mode, dro_beta=0.5))
    whole, parts = (total(actor_loss(config, mini_batch, correction), batch, output, edges) for edges in ([], cuts))
    assert parts == pytest.approx(whole, rel=1e-5, abs=1e-5)


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


def test_tokens_of_another_engine_weigh_what_their_column_says() -> None:
    """Two tokens of advantage 1, on-policy: the loss of each is -1 times its weight."""
    column = torch.tensor([[-1.0, -1.0]])
    batch = TensorDict(
        {
            "response_mask": torch.ones(1, 2, dtype=torch.int64),
            "old_log_probs": column,
            "rollout_is_weights": torch.tensor([[1.5, 0.25]]),
            "advantages": torch.ones(1, 2),
        },
        batch_size=[1],
    )
    output = {"log_probs": column.clone().requires_grad_(), "entropy": torch.zeros(1, 2)}
    loss_fn = actor_loss(ActorConfig(), MiniBatch(1, num_tokens=2, num_sequences=1))
    loss, _ = loss_fn(output, batch)
    loss.backward()
    weights = batch["rollout_is_weights"]
    assert float(loss.detach()) == pytest.approx(-float(weights.mean()))
    torch.testing.assert_close(output["log_probs"].grad, -weights / 2)


def test_a_mini_batch_of_empty_responses_has_loss_and_metrics_of_0() -> None:
    batch, output, _ = example()
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    nothing = MiniBatch(rows_per_shard=ROWS, num_tokens=0, num_sequences=0)
    for loss_fn in (actor_loss(ActorConfig(use_kl_loss=True), nothing), critic_loss(CriticConfig(), nothing)):
        assert set(total(loss_fn, batch, output, []).values()) == {0.0}


def double(rows: list[list[float]]) -> torch.Tensor:
    """In float64: a log ratio of the example is exactly at a clip, and float32 would round it over."""
    return torch.tensor(rows, dtype=torch.float64)


def two_responses() -> tuple[TensorDict, torch.Tensor, MiniBatch]:
    """Five tokens, one of them between the others outside the mask; the policy's log-probs beside them."""
    batch = TensorDict(
        {
            "response_mask": torch.tensor([[1, 1, 1], [1, 0, 1]]),
            "old_log_probs": double([[-0.5, -1.2, -2.0], [-0.1, -0.7, -1.5]]),
            "advantages": double([[1.0, 1.0, 1.0], [-0.5, -0.5, -0.5]]),
        },
        batch_size=[2],
    )
    log_probs = double([[-0.4, -1.6, -1.0], [-0.3, -0.7, -1.45]]).requires_grad_()
    return batch, log_probs, MiniBatch(rows_per_shard=2, num_tokens=5, num_sequences=2)


def config_of(loss_mode: str, settings_of_loss: dict[str, float] | None = None, **settings: object) -> ActorConfig:
    return ActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss_mode, **(settings_of_loss or {})), **settings)


def loss_and_gradient(
    config: ActorConfig, correction: RolloutCorrection = NO_CORRECTION, **columns: torch.Tensor
) -> tuple[float, torch.Tensor]:
    batch, log_probs, mini_batch = two_responses()
    for name, column in columns.items():
        batch[name] = column
    output = {"log_probs": log_probs, "entropy": torch.zeros(2, 3)}
    loss, _ = actor_loss(config, mini_batch, correction)(output, batch)
    loss.backward()
    return float(loss.detach()), log_probs.grad


def tokens(*places: tuple[int, int]) -> torch.Tensor:
    marked = torch.zeros(2, 3, dtype=torch.bool)
    for row, t in places:
        marked[row, t] = True
    return marked


@pytest.mark.parametrize(
    ("config", "columns", "expected", "gradient"),
    [
        (config_of("vanilla"), {}, -0.408098, [[-1.10517, -0.67032, 0.0], [0.40937, 0.0, 0.52564]]),
        (config_of("gspo"), {}, -0.368064, [[0.0, 0.0, 0.0], [0.57984, 0.0, 0.57984]]),
        (config_of("cispo"), {}, 0.407417, [[-1.10517, -0.8, -1.2], [0.40937, 0.0, 0.52564]]),
        (config_of("dppo_tv"), {}, 0.125920, [[-1.10517, -0.67032, 0.0], [0.40937, 0.0, 0.52564]]),
        (config_of("dppo_kl", clip_ratio=0.05), {}, 0.150482, [[-1.10517, -0.67032, 0.0], [0.0, 0.0, 0.52564]]),
        (config_of("sapo"), {}, -0.734989, [[-0.91843, -0.54369, -1.16850], [0.50710, 0.0, 0.65657]]),
        (config_of("gpg"), {}, 0.425000, [[-1.0, -1.0, -1.0], [0.5, 0.0, 0.5]]),
        (
            config_of("clip_cov"),
            {"high_covariance": tokens((0, 0))},
            -0.187064,
            [[0.0, -0.67032, 0.0], [0.40937, 0.0, 0.52564]],
        ),
        (
            config_of("kl_cov"),
            {"high_covariance": tokens((1, 2))},
            -0.710754,
            [[-1.10517, -0.67032, -2.71828], [0.40937, 0.0, 0.62564]],
        ),
        (
            config_of("kl_cov", {"ppo_kl_coef": 1.0}),
            {"high_covariance": tokens((1, 2), (0, 0))},
            -0.681754,
            [[-0.10517, -0.67032, -2.71828], [0.40937, 0.0, 1.52564]],
        ),
        (config_of("geo_mean"), {}, -0.251672, [[-0.80601, -0.80601, 0.0], [0.57984, 0.0, 0.57984]]),
        (
            config_of("geo_mean"),
            {"rollout_is_weights": double([[2.0, 1.0, 0.5], [1.0, 0.0, 0.25]])},
            -0.367640,
            [[-0.80601, -0.80601, 0.0], [0.28992, 0.0, 0.28992]],
        ),
        (config_of("dro", {"dro_beta": 0.1}), {}, 0.437125, [[-0.99, -1.04, -0.90], [0.48, 0.0, 0.505]]),
    ],
    ids=lambda value: value.policy_loss.loss_mode if isinstance(value, ActorConfig) else None,
)
def test_losses_give_the_numbers_that_others_compute(
    config: ActorConfig, columns: dict[str, torch.Tensor], expected: float, gradient: list[list[float]]
) -> None:
    """The gradient is given times the number of tokens."""
    loss, found = loss_and_gradient(config, **columns)
    assert loss == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(5 * found, double(gradient), atol=1e-5, rtol=0)


def test_truncated_importance_weights_give_the_number_that_others_compute() -> None:
    weights = double([[1.10517, 2.0, 0.90484], [1.0, 0.0, 0.67032]])
    assert loss_and_gradient(config_of("vanilla"), rollout_is_weights=weights)[0] == pytest.approx(-0.577228, abs=2e-6)


K3 = (Rejection("seq_mean_k3", 0.0, 0.1),)


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        (RolloutCorrection(bypass=True), -0.558127),
        # The first row is rejected, and its three tokens stay in the divisor.
        (RolloutCorrection(bypass=True, rejections=K3), 0.161873),
        # Its ratio to the rollout is the weight already.
        (RolloutCorrection("token", bypass=True), -0.558127),
        (RolloutCorrection("sequence", bypass=True, loss_type="reinforce"), 1.099034),
        (RolloutCorrection("token", 0.5, 2.0, bypass=True, loss_type="reinforce"), 0.554049),
        (RolloutCorrection(bypass=True, loss_type="reinforce"), 0.425),
    ],
)
def test_bypass_gives_the_numbers_that_others_compute(correction: RolloutCorrection, expected: float) -> None:
    rollout = double([[-0.6, -2.2, -1.9], [-0.1, -9.9, -1.1]])
    found, gradient = loss_and_gradient(config_of("vanilla"), correction, old_log_probs=rollout)
    assert found == pytest.approx(expected, abs=1e-6)
    assert loss_and_gradient(config_of("bypass_mode"), correction, old_log_probs=rollout)[0] == found
    assert (gradient[0].abs().sum() == 0) == (correction.rejections == K3 or correction.loss_type == "ppo_clip")


class TwoRanks:
    """Stands for an engine on two ranks, of which the other has passed this sum."""

    def __init__(self, other: float) -> None:
        self.other = other

    def sum_over_ranks(self, value: float) -> float:
        return value + self.other


@pytest.mark.parametrize(
    ("level", "mean"),
    [
        # Ratios of the policy to the rollout: e^0.2, e^0.6, e^0.9 (held at 2), and e^-0.2, e^-0.35.
        ("token", (math.exp(0.2) + math.exp(0.6) + 2 + math.exp(-0.2) + math.exp(-0.35) + 3.0) / 9),
        # Of the responses: e^1.7 (held at 2) and e^-0.55. The other rank has 3.0 of four tokens in two responses.
        ("sequence", (2 + math.exp(-0.55) + 3.0) / 4),
    ],
)
def test_in_bypass_weights_are_divided_by_their_mean_over_the_mini_batch(level: str, mean: float) -> None:
    batch, log_probs, _ = two_responses()
    batch["old_log_probs"] = double([[-0.6, -2.2, -1.9], [-0.1, -9.9, -1.1]])
    correction = RolloutCorrection(level, normalise=True, bypass=True, loss_type="reinforce")
    mini_batch = with_mean_weight(
        MiniBatch(2, num_tokens=9, num_sequences=4), TwoRanks(3.0), DataProto(batch), log_probs.detach(), correction
    )
    assert mini_batch.mean_weight == pytest.approx(mean)
    output = {"log_probs": log_probs, "entropy": torch.zeros(2, 3)}
    found, plain = (
        float(actor_loss(config_of("vanilla"), one, correction)(output, batch)[0].detach())
        for one in (mini_batch, replace(mini_batch, mean_weight=1.0))
    )
    assert found == pytest.approx(plain / mean)


def test_bypass_anchors_other_losses_on_the_rollout() -> None:
    rollout = double([[-0.6, -2.2, -1.9], [-0.1, -9.9, -1.1]])
    found = loss_and_gradient(config_of("cispo"), RolloutCorrection(bypass=True), old_log_probs=rollout)[0]
    assert found == loss_and_gradient(config_of("cispo"), old_log_probs=rollout)[0]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # Token losses of vanilla are (-1.10517, -0.67032, -1.2) and (0.40937, 0.52564); the second and the last are
        # rejected. The divisors count them.
        ("token-mean", (-1.10517 - 1.2 + 0.40937) / 5),
        ("token-sum", -1.10517 - 1.2 + 0.40937),
        ("seq-mean-token-sum", (-1.10517 - 1.2 + 0.40937) / 2),
        ("seq-mean-token-mean", ((-1.10517 - 1.2) / 3 + 0.40937 / 2) / 2),
        ("seq-mean-token-sum-norm", (-1.10517 - 1.2 + 0.40937) / (2 * 3)),
    ],
)
def test_a_rejected_token_weighs_nothing_and_makes_no_other_weigh_more(mode: str, expected: float) -> None:
    kept = torch.tensor([[1, 0, 1], [1, 1, 0]])  # a token outside the response mask stays outside
    loss, gradient = loss_and_gradient(config_of("vanilla", loss_agg_mode=mode), loss_mask=kept)
    assert loss == pytest.approx(expected, abs=2e-5)
    assert gradient[0, 1] == gradient[1, 1] == gradient[1, 2] == 0


def test_entropy_and_kl_leave_rejected_tokens_out_and_so_does_the_critic() -> None:
    batch, output, mini_batch = example()
    batch["loss_mask"] = batch["response_mask"].clone()
    batch["loss_mask"][0] = 0
    without = batch.clone()
    without["response_mask"] = batch["loss_mask"]
    config = ActorConfig(use_kl_loss=True, entropy_coeff=0.1)
    for loss_fn in (actor_loss(config, mini_batch), critic_loss(CriticConfig(), mini_batch)):
        found, expected = (total(loss_fn, columns, output, []) for columns in (batch, without))
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)


def test_where_everything_is_rejected_the_loss_is_0() -> None:
    nothing = torch.zeros(2, 3, dtype=torch.int64)
    columns = {"loss_mask": nothing, "high_covariance": tokens()}
    for loss_mode in LOSSES.built_in:
        loss, gradient = loss_and_gradient(config_of(loss_mode, {"dro_beta": 0.1}), **columns)
        assert loss == 0
        assert gradient.tolist() == [[0.0] * 3] * 2


def test_the_bound_of_a_weight_is_3_or_20_unless_it_is_set() -> None:
    """One token, A = -1, whose probability rose from e^-8 to e^-3: by a ratio of e^5 = 148."""

    def loss_of(loss_mode: str, **settings: object) -> float:
        batch = TensorDict(
            {
                "response_mask": torch.ones(1, 1, dtype=torch.int64),
                "old_log_probs": double([[-8.0]]),
                "advantages": double([[-1.0]]),
            },
            batch_size=[1],
        )
        output = {"log_probs": double([[-3.0]]).requires_grad_(), "entropy": torch.zeros(1, 1)}
        loss, _ = actor_loss(config_of(loss_mode, **settings), MiniBatch(1, 1, 1))(output, batch)
        return float(loss.detach())

    assert loss_of("vanilla") == pytest.approx(3.0)
    assert loss_of("dppo_tv") == pytest.approx(20 * -3.0)
    assert loss_of("dppo_kl", clip_ratio_c=5.0) == pytest.approx(5 * -3.0)


def test_the_constant_of_dr_grpo_can_be_set() -> None:
    mode = {"loss_agg_mode": "seq-mean-token-sum-norm"}
    by_width = loss_and_gradient(config_of("vanilla", **mode))[0]
    assert loss_and_gradient(config_of("vanilla", loss_scale_factor=30.0, **mode))[0] == pytest.approx(by_width / 10)


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


def test_the_unbiased_kl_loss_weighs_each_token_by_its_ratio() -> None:
    batch, output, mini_batch = example()
    config = ActorConfig(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k1", unbiased_kl_loss=True)
    ratio = (output["log_probs"] - batch["old_log_probs"]).exp()
    expected = float((ratio * (output["log_probs"] - batch["ref_log_prob"])).sum()) / mini_batch.num_tokens
    found = total(actor_loss(config, mini_batch), batch, output, [2])
    assert found["kl_loss"] == pytest.approx(expected, abs=1e-5)
    # Without a pass for the old log-probs, the policy is the one that sampled.
    alone = total(actor_loss(config, mini_batch), batch.exclude("old_log_probs"), output, [2])
    plain = total(actor_loss(replace(config, unbiased_kl_loss=False), mini_batch), batch, output, [2])
    assert alone["kl_loss"] == pytest.approx(plain["kl_loss"], abs=1e-6)


def taught(mode: str, **settings: object) -> DistillationLossConfig:
    return DistillationLossConfig(loss_mode=mode, **{"use_task_rewards": False, **settings})


def one_row(**columns: list[float]) -> tuple[TensorDict, dict[str, torch.Tensor], MiniBatch]:
    """Three tokens that the policy sampled, with their log-probs under both models."""
    given = {"log_probs": [-1.0, -3.0, -0.5], "teacher_log_probs": [-1.5, -0.3, -0.5], **columns}
    tensors = {name: torch.tensor([values]) for name, values in given.items()}
    output = {"log_probs": tensors["log_probs"].clone().requires_grad_(), "entropy": torch.zeros(1, 3)}
    batch = {
        "response_mask": torch.ones(1, 3, dtype=torch.long),
        "old_log_probs": tensors["log_probs"],
        "teacher_log_probs": tensors["teacher_log_probs"],
    }
    return TensorDict(batch, batch_size=[1]), output, MiniBatch(rows_per_shard=1, num_tokens=3, num_sequences=1)


@pytest.mark.parametrize(
    ("config", "loss", "gradient"),
    [
        # D = (0.5, -2.7, 0), held within 2; advantages -D, and the ratio is 1.
        (
            taught("k1", use_policy_gradient=True, loss_max_clamp=2.0),
            -0.5,
            [0.5 / 3, -2 / 3, 0],
        ),
        (taught("k2"), (0.125 + 3.645) / 3, [0.5 / 3, -0.9, 0]),
        (taught("k2", loss_max_clamp=3.0), (0.125 + 3) / 3, [0.5 / 3, 0, 0]),
        (taught("k3"), (0.106531 + math.exp(2.7) - 3.7) / 3, [0.393469 / 3, (1 - math.exp(2.7)) / 3, 0]),
    ],
    ids=["k1 as advantage", "k2", "k2 within 3", "k3"],
)
def test_worked_numbers_of_a_teacher(config: DistillationLossConfig, loss: float, gradient: list[float]) -> None:
    batch, output, mini_batch = one_row()
    found, metrics = actor_loss(ActorConfig(), mini_batch, distillation=config)(output, batch)
    found.backward()
    assert found.item() == pytest.approx(loss, abs=1e-5)
    assert output["log_probs"].grad[0].tolist() == pytest.approx(gradient, abs=1e-5)
    assert metrics["actor/distillation/loss"].item() == pytest.approx(loss, abs=1e-5)
    assert "pg_loss" not in metrics


@pytest.mark.parametrize("mode", ["k1", "k2", "k3", "abs", "forward_kl_topk", "forward_kl_topk_tail"])
@pytest.mark.parametrize("agg_mode", sorted(LOSS_AGG_MODES))
def test_any_cut_of_a_taught_mini_batch_adds_up(mode: str, agg_mode: str) -> None:
    batch, output, mini_batch = example()
    generator = torch.Generator().manual_seed(5)
    batch["teacher_log_probs"] = torch.randn(ROWS, WIDTH, generator=generator)
    for columns in (batch, output):
        columns["top_log_probs"] = torch.randn(ROWS, WIDTH, 9, generator=generator).log_softmax(dim=-1)[..., :4]
    config = taught(mode, use_policy_gradient=mode == "k1", use_task_rewards=True, distillation_loss_coef=0.3)
    loss_fn = actor_loss(ActorConfig(loss_agg_mode=agg_mode), mini_batch, distillation=config)
    whole = total(loss_fn, batch, output, [])
    for cuts in ([3], [1, 2, 5]):
        assert total(loss_fn, batch, output, cuts) == pytest.approx(whole, rel=1e-5, abs=1e-6)
    rewarded = total(actor_loss(ActorConfig(loss_agg_mode=agg_mode), mini_batch), batch, output, [])
    assert whole["pg_loss"] == pytest.approx(rewarded["pg_loss"])
    both = rewarded["loss"] + 0.3 * whole["actor/distillation/loss"]
    assert whole["loss"] == pytest.approx(both, rel=1e-5, abs=1e-6)


def test_a_teachers_advantages_are_weighed_as_the_samples_are() -> None:
    batch, output, mini_batch = one_row()
    batch["rollout_is_weights"] = torch.tensor([[2.0, 0.5, 1.0]])
    config = taught("k1", use_policy_gradient=True)
    actor_loss(ActorConfig(), mini_batch, distillation=config)(output, batch)[0].backward()
    assert output["log_probs"].grad[0].tolist() == pytest.approx([2 * 0.5 / 3, -0.5 * 2.7 / 3, 0], abs=1e-5)
