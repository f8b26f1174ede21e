"""Choosing tokens: vectorised over rows, and each row on its own.

A row's token depends on that row's logits and on one uniform number made from (seed, position): not on the other rows,
not on any random state.
"""

from __future__ import annotations

import numpy as np
import torch

from paceline.rollout.rollout_interface import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(bits: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every input bit flips about half of the output bits."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def random_streams(seeds: list[int]) -> np.ndarray:
    """One state (uint64) per seed for `uniforms`. Mixed, since the streams of nearby raw seeds would overlap."""
    return _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64) + _GOLDEN)


def uniforms(streams: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    """The float64 numbers in [0, 1) at these positions (uint64) of these streams, which broadcast together.

    splitmix64 as a counter-based generator. 52 bits, not 53: then `u * total < total` holds for every positive double
    `total`, also after rounding.
    """
    bits = _mix(streams + (positions + np.uint64(1)) * _GOLDEN)
    return torch.from_numpy((bits >> np.uint64(12)).astype(np.float64) * 2.0**-52)


def choose_tokens(
    logits: torch.Tensor, uniform: torch.Tensor, sampling: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token of each row and its log-prob.

    Args:
        logits: (rows, vocabulary), of any floating dtype.
        uniform: (rows,) float64 in [0, 1); greedy decoding does not look at it.

    Returns:
        token ids (rows,) int64; log-probs (rows,) float32 over the full vocabulary.
    """
    logits = logits.float()
    if sampling.do_sample and sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    log_probs = torch.log_softmax(logits, dim=-1)
    if sampling.do_sample:
        tokens = _invert_cdf(_restrict(log_probs.exp(), sampling.top_k, sampling.top_p), uniform)
    else:
        tokens = log_probs.argmax(dim=-1)
    return tokens, log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def _restrict(probs: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Set the probabilities (rows, vocabulary) outside of top-k and then top-p to 0; the rest is not renormalised."""
    if top_k == -1 and top_p == 1.0:
        return probs
    if top_k != -1:
        kept, order = probs.topk(min(top_k, probs.shape[-1]), dim=-1)
    else:
        kept, order = probs.sort(dim=-1, descending=True, stable=True)
    if top_p < 1.0:
        mass = kept.double().cumsum(dim=-1)
        # A token is out when the tokens before it have enough mass: never the first.
        mass_before = mass - kept
        kept = kept.masked_fill(mass_before >= top_p * mass[:, -1:], 0.0)
    return torch.zeros_like(probs).scatter(-1, order, kept)


def _invert_cdf(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Per row, the token in whose share of the summed weights (rows, vocabulary) the uniform number falls.

    In the order of the vocabulary, not of the probabilities: a difference in the last bits of two nearly equal
    probabilities would swap them in a sorted order, and with them the outcome.
    """
    cdf = weights.cumsum(dim=-1, dtype=torch.float64)
    # right=True: the first token whose cdf exceeds the target, which is never one of weight 0.
    target = uniform.unsqueeze(-1) * cdf[:, -1:]
    # NaN is above every target and would give an index past the end, which ends a device: `check_finite` reports it.
    return torch.searchsorted(cdf, target, right=True).squeeze(-1).clamp(max=cdf.shape[-1] - 1)
