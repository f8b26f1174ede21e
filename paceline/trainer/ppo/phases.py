"""What the driver computes itself: requests, KL in the reward, advantages, and how a batch is dealt to optimizer steps.

Pure functions from DataProto to DataProto; no Ray, no models.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from paceline.algorithms import kl
from paceline.algorithms.advantages import get_adv_estimator
from paceline.algorithms.masking import masked_mean, zero_outside
from paceline.protocol import DataProto
from paceline.schema import REQUEST_COLUMNS


def make_requests(
    rows: dict[str, Any], *, n: int, seed: int, purpose: str, step: int, first_row: int = 0
) -> tuple[DataProto, DataProto]:
    """Split collated rows into requests for the rollout and labels for the rest, each prompt n times in a row.

    Every response has a seed of its own, made from (seed, purpose, step, its place), so that it does not depend on
    which device samples it. `uid` names the group of responses to one prompt. `first_row` is the place of the first
    prompt, where the prompts of a step come in several batches: their size then changes nothing.
    """
    data = DataProto.from_single_dict(rows)
    places = range(first_row, first_row + len(data))
    data.non_tensor_batch["uid"] = np.array([f"{purpose}-{step}-{place}" for place in places], dtype=object)
    labels = data.repeat(n, interleave=True)
    requests = labels.pop(batch_keys=REQUEST_COLUMNS)
    sequence = np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), step])
    seeds = sequence.generate_state(places.stop * n, dtype=np.uint64)[first_row * n :] >> np.uint64(1)
    requests.batch["seeds"] = torch.from_numpy(seeds.astype(np.int64))
    return requests, labels


def subtract_kl(data: DataProto, coefficient: float, kl_penalty: str = "kl") -> tuple[DataProto, dict[str, float]]:
    """Subtract the KL divergence from the reference from the scores of each token.

    token_level_rewards = token_level_scores - coefficient * KL(old || reference), on response tokens. The metric
    `actor/reward_kl_penalty` is the mean over responses of the mean over their tokens; an empty response has none.
    """
    mask = data.batch["response_mask"]
    divergence = kl.kl_penalty(data.batch["old_log_probs"], data.batch["ref_log_prob"], kl_penalty)
    divergence = zero_outside(divergence, mask)
    rewards = data.batch["token_level_scores"] - coefficient * divergence
    # A response without tokens has no divergence, which is not one of 0.
    of_each = masked_mean(divergence, mask, dim=-1)
    metrics = {
        "actor/reward_kl_penalty": masked_mean(of_each, mask.any(dim=-1)).item(),
        "actor/reward_kl_penalty_coeff": coefficient,
    }
    return data.union(DataProto.from_dict(tensors={"token_level_rewards": rewards})), metrics


def move_kl_coefficient(data: DataProto, kl_ctrl: kl.KLController, metrics: dict[str, float]) -> None:
    """Let the coefficient follow the divergence that `subtract_kl` measured on this batch."""
    num_responses = int(data.batch["response_mask"].any(dim=-1).sum())
    kl_ctrl.update(metrics["actor/reward_kl_penalty"], n_steps=num_responses)


def apply_kl_penalty(
    data: DataProto, kl_ctrl: kl.KLController, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """Subtract the KL divergence from the reference from the scores of each token, and move the coefficient."""
    data, metrics = subtract_kl(data, kl_ctrl.value, kl_penalty)
    move_kl_coefficient(data, kl_ctrl, metrics)
    return data, metrics


def nonfinite_places(data: DataProto, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Which of these columns are NaN or infinite on a response token, with a mask of the places."""
    mask = data.batch["response_mask"].bool()
    columns = {name: data.batch[name] for name in names if name in data.batch}
    broken = {
        name: ~torch.isfinite(column) & (mask if column.dim() == 2 else mask.any(dim=-1))
        for name, column in columns.items()
    }
    return {name: places for name, places in broken.items() if places.any()}


def rollout_mismatch(data: DataProto) -> dict[str, float]:
    """How far the probabilities of the sampled tokens differ between rollout and trainer, where both are known."""
    if not {"old_log_probs", "rollout_log_probs"} <= set(data.batch.keys()):
        return {}
    mask = data.batch["response_mask"].bool()
    if not mask.any():
        return {}
    trainer, rollout = (data.batch[name][mask].exp() for name in ("old_log_probs", "rollout_log_probs"))
    difference = (trainer - rollout).abs()
    return {
        "training/rollout_probs_diff_mean": difference.mean().item(),
        "training/rollout_probs_diff_max": difference.max().item(),
    }


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    gamma: float = 1.0,
    lam: float = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
) -> DataProto:
    """Add `advantages` and `returns` by the registered estimator.

    `values`, `reward_baselines` (scores of greedy responses) and `uid` go to the estimator where the data has them.
    """
    advantages, returns = get_adv_estimator(adv_estimator)(
        token_level_rewards=data.batch["token_level_rewards"],
        response_mask=data.batch["response_mask"],
        values=data.batch.get("values", None),
        index=data.non_tensor_batch.get("uid"),
        reward_baselines=data.batch.get("reward_baselines", None),
        gamma=gamma,
        lam=lam,
        norm_by_std=norm_adv_by_std_in_grpo,
    )
    return data.union(DataProto.from_dict(tensors={"advantages": advantages, "returns": returns}))


def num_mini_batches(num_rows: int, rows_per_mini_batch: int) -> int:
    """Optimizer steps per pass; the last one of a smaller batch may be smaller."""
    return -(-num_rows // rows_per_mini_batch)


def share_out(rows: int, devices: Sequence[int]) -> list[slice]:
    """Consecutive rows for each of several pools, by the number of its devices.

    >>> share_out(10, [3, 1])
    [slice(0, 7, None), slice(7, 10, None)]
    """
    ends = [rows * counted // sum(devices) for counted in itertools.accumulate(devices, initial=0)]
    return [slice(start, end) for start, end in itertools.pairwise(ends)]


def balanced_order(lengths: np.ndarray, sizes: list[int]) -> np.ndarray:
    """Row numbers such that consecutive shards of these sizes have about the same sum of lengths.

    The longest row that is left goes to the shard with the least so far; in a shard rows keep their order.

    >>> balanced_order(np.array([9, 8, 1, 2]), [2, 2])
    array([0, 2, 1, 3])
    """
    shards: list[list[int]] = [[] for _ in sizes]
    load = np.zeros(len(sizes))
    for row in np.argsort(-lengths, kind="stable"):
        shard = min((i for i, size in enumerate(sizes) if len(shards[i]) < size), key=lambda i: load[i])
        shards[shard].append(int(row))
        load[shard] += lengths[row]
    return np.array([row for shard in shards for row in sorted(shard)], dtype=int)


def deal_mini_batches(
    data: DataProto,
    *,
    rows_per_mini_batch: int,
    num_shards: int,
    epochs: int = 1,
    shuffle_seed: list[int] | None = None,
    balance: bool = False,
) -> DataProto:
    """Order the rows so that an even cut into `num_shards` gives each shard its part of every mini-batch.

    Which responses form a mini-batch is decided here, over the whole batch, so the number of shards does not change
    any update. A mini-batch that does not divide is filled up with rows whose response_mask is zero: they weigh
    nothing. The counts in `meta_info["mini_batches"]` leave them out, and responses without tokens too. With a seed
    each epoch deals anew; then the rows of all epochs are laid out one after another, else one layout is passed over
    `meta_info["passes"]` times. With `balance` the rows inside a mini-batch change places so that all shards have
    about as many tokens.

    With rows 0..5, mini-batches of 4 and 2 shards: mini-batch 0 is (0 1 2 3) and 1 is (4 5); shard 0 gets 0 1 4,
    shard 1 gets 2 3 5.
    """
    num_rows = len(data)
    orders = [np.arange(num_rows)]
    if shuffle_seed is not None:
        generator = np.random.default_rng(shuffle_seed)
        orders = [generator.permutation(num_rows) for _ in range(epochs)]
    tokens_per_row = data.batch["response_mask"].sum(dim=-1).numpy()
    lengths = data.batch["attention_mask"].sum(dim=-1).numpy() if balance else tokens_per_row
    shards: list[list[np.ndarray]] = [[] for _ in range(num_shards)]
    mini_batches = []
    for order in orders:
        for start in range(0, num_rows, rows_per_mini_batch):
            rows = order[start : start + rows_per_mini_batch]
            rows_per_shard = -(-len(rows) // num_shards)
            if balance and num_shards > 1:
                full, rest = divmod(len(rows), rows_per_shard)
                sizes = [rows_per_shard] * full + ([rest] if rest else [])
                rows = rows[balanced_order(lengths[rows], sizes)]
            padded = np.concatenate([rows, np.full(rows_per_shard * num_shards - len(rows), -1)])
            for shard, part in zip(shards, padded.reshape(num_shards, rows_per_shard), strict=True):
                shard.append(part)
            mini_batches.append(
                {
                    "rows_per_shard": rows_per_shard,
                    "num_tokens": int(tokens_per_row[rows].sum()),
                    "num_sequences": int((tokens_per_row[rows] > 0).sum()),
                }
            )
    layout = np.concatenate([part for shard in shards for part in shard])
    dealt = data[:] if np.array_equal(layout, np.arange(num_rows)) else data[layout.clip(min=0)]
    padding = torch.from_numpy(layout < 0)
    if padding.any():
        dealt.batch["response_mask"] = dealt.batch["response_mask"].masked_fill(padding[:, None], 0)
    dealt.meta_info = {
        **dealt.meta_info,
        "mini_batches": mini_batches,
        "passes": epochs if shuffle_seed is None else 1,
    }
    return dealt
