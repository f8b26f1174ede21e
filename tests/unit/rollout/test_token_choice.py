"""Uniform numbers from seeds, and tokens from logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.errors import ConfigError
from paceline.rollout.rollout_interface import SamplingParams
from paceline.rollout.token_choice import _GOLDEN, _mix, choose_tokens, random_streams, uniforms

LARGEST_UNIFORM = 1 - 2.0**-52


def numbers_of(seeds: list[int], count: int) -> torch.Tensor:
    """The first numbers (seeds, count) of each stream."""
    return uniforms(random_streams(seeds)[:, None], np.arange(count, dtype=np.uint64))


def logits_of(probs: list[float]) -> torch.Tensor:
    return torch.tensor([probs]).log()


def support(probs: list[float], **limits: float) -> set[int]:
    """The tokens that a fine grid of uniform numbers reaches."""
    grid = torch.linspace(0, LARGEST_UNIFORM, 2001, dtype=torch.float64)
    tokens, _ = choose_tokens(logits_of(probs).expand(2001, -1), grid, SamplingParams(1, **limits))
    return set(tokens.tolist())


def test_generator_is_splitmix64() -> None:
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    counters = np.uint64(1234567) + np.arange(1, 6, dtype=np.uint64) * _GOLDEN
    assert _mix(counters).tolist() == published


def test_stream_of_a_seed_does_not_depend_on_its_neighbours_or_on_how_much_is_drawn() -> None:
    several = numbers_of([3, -1, 2**63, 7], 50)
    assert several.dtype == torch.float64
    assert torch.equal(several[3], numbers_of([7], 50)[0])
    assert torch.equal(several[3, :10], numbers_of([7], 10)[0])
    assert len({tuple(row) for row in several.tolist()}) == 4


def test_numbers_are_uniform_along_streams_and_across_consecutive_seeds() -> None:
    numbers = numbers_of(list(range(2000)), 100)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    for bins in (torch.histc(numbers, 100, 0, 1), torch.histc(numbers[:, 0], 100, 0, 1)):
        expected = bins.sum() / 100
        chi_square = ((bins - expected) ** 2 / expected).sum()
        assert abs(chi_square - 99) < 4 * (2 * 99) ** 0.5


def test_streams_are_uncorrelated_with_themselves_and_with_each_other() -> None:
    numbers = numbers_of(list(range(400)), 500) - 0.5
    for a, b in (
        (numbers[:, :-1], numbers[:, 1:]),  # along a stream
        (numbers[:-1], numbers[1:]),  # seed s and s + 1
        (numbers[:-1, 1:], numbers[1:, :-1]),  # streams shifted against each other
    ):
        correlation = (a * b).mean() * 12
        assert abs(correlation) < 4 / a.numel() ** 0.5


def test_largest_uniform_stays_below_every_total() -> None:
    totals = torch.cat([torch.rand(100_000, generator=torch.Generator().manual_seed(0)).double(), torch.ones(1)])
    totals = torch.cat([totals, torch.nextafter(totals, torch.zeros(1).double()), 2 - totals * 2.0**-52])
    assert torch.all(LARGEST_UNIFORM * totals < totals)


@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST_UNIFORM])
def test_impossible_tokens_are_never_chosen(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, -torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    tokens, log_probs = choose_tokens(logits, torch.tensor([uniform], dtype=torch.float64), SamplingParams(1))
    assert tokens.item() == (2 if uniform < 0.5 else 4)
    assert log_probs.item() == pytest.approx(np.log(0.5))


def test_token_boundaries_are_where_the_cumulative_probabilities_say() -> None:
    probs = [0.25, 0.5, 0.125, 0.125]
    grid = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 0.8749, 0.8751, LARGEST_UNIFORM], dtype=torch.float64)
    tokens, log_probs = choose_tokens(logits_of(probs).expand(8, -1), grid, SamplingParams(1))
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert log_probs.exp().tolist() == pytest.approx([probs[token] for token in tokens.tolist()])


def test_top_p_keeps_the_smallest_sufficient_set() -> None:
    probs = [0.1, 0.45, 0.05, 0.3, 0.1]
    assert support(probs) == {0, 1, 2, 3, 4}
    assert support(probs, top_p=0.01) == {1}
    assert support(probs, top_p=0.44) == {1}
    assert support(probs, top_p=0.46) == {1, 3}
    assert support(probs, top_p=0.74) == {1, 3}
    assert support(probs, top_p=0.76) == {0, 1, 3}  # of the equal tokens 0 and 4, the first
    assert support(probs, top_p=0.96) == {0, 1, 2, 3, 4}


def test_top_k_keeps_k_tokens_and_comes_before_top_p() -> None:
    probs = [0.1, 0.45, 0.05, 0.3, 0.1]
    assert support(probs, top_k=1) == {1}
    assert support(probs, top_k=2) == {1, 3}
    assert support(probs, top_k=99) == {0, 1, 2, 3, 4}
    assert len(support(probs, top_k=3)) == 3
    # 0.45 of 0.75 is 0.6: enough only after top-k has renormalised.
    assert support(probs, top_k=2, top_p=0.55) == {1}
    assert support(probs, top_p=0.55) == {1, 3}


def test_log_probs_are_of_the_full_distribution_at_the_temperature() -> None:
    probs = [0.1, 0.45, 0.05, 0.3, 0.1]
    tempered = torch.softmax(logits_of(probs)[0] / 0.5, dim=-1)
    _, log_probs = choose_tokens(
        logits_of(probs), torch.zeros(1).double(), SamplingParams(1, temperature=0.5, top_k=1, top_p=0.5)
    )
    assert log_probs.item() == pytest.approx(tempered[1].log().item(), abs=1e-6)


def test_greedy_takes_the_most_likely_token_and_ignores_the_temperature() -> None:
    logits = logits_of([0.1, 0.45, 0.05, 0.3, 0.1])
    tokens, log_probs = choose_tokens(
        logits, torch.full((1,), 0.99).double(), SamplingParams(1, temperature=0.1, do_sample=False)
    )
    assert tokens.item() == 1
    assert log_probs.item() == pytest.approx(np.log(0.45))


def test_half_precision_logits_are_summed_in_full_precision() -> None:
    logits = torch.zeros(1, 50_000, dtype=torch.bfloat16)
    tokens, log_probs = choose_tokens(logits, torch.tensor([0.77777]).double(), SamplingParams(1))
    assert tokens.item() == 38888
    assert log_probs.item() == pytest.approx(-np.log(50_000))


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"max_tokens": 0}, "at least 1 token"),
        ({"max_tokens": 1, "temperature": 0.0}, "do_sample=False"),
        ({"max_tokens": 1, "top_p": 0.0}, r"set it in \(0, 1\]"),
        ({"max_tokens": 1, "top_p": 1.1}, r"set it in \(0, 1\]"),
        ({"max_tokens": 1, "top_k": 0}, "-1 for no limit"),
    ],
)
def test_impossible_sampling_parameters_are_refused_with_a_remedy(wrong: dict, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        SamplingParams(**wrong)
