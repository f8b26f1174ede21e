"""How the rows of a batch are dealt to devices and to optimizer steps. Pure functions; no Ray, no models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from paceline.protocol import DataProto, DataProtoFuture


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


def even_sizes(rows: int, num_shards: int) -> list[int]:
    """How many rows each shard gets.

    >>> even_sizes(7, 3)
    [3, 2, 2]
    """
    base, extra = divmod(rows, num_shards)
    return [base + (shard < extra) for shard in range(num_shards)]


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


def call_balanced(
    method: Callable[[DataProto], DataProtoFuture], inputs: DataProto, num_shards: int
) -> DataProtoFuture:
    """Call a data-parallel method so that all shards have about as many tokens; the answers come in the rows' order."""
    if num_shards == 1:
        return method(inputs)
    lengths = inputs.batch["attention_mask"].sum(dim=-1).numpy()
    order = balanced_order(lengths, even_sizes(len(inputs), num_shards))
    return method(inputs[order]).then(lambda answers: answers[np.argsort(order)])


def deal_mini_batches(
    data: DataProto,
    *,
    rows_per_mini_batch: int,
    num_shards: int,
    epochs: int = 1,
    shuffle_seed: list[int] | None = None,
    balance: bool = False,
    columns_of: Callable[[DataProto, int], dict[str, torch.Tensor]] | None = None,
) -> DataProto:
    """Order the rows so that an even cut into `num_shards` gives each shard its part of every mini-batch.

    Which responses form a mini-batch is decided here, over the whole batch, so the number of shards does not change
    any update. A mini-batch that does not divide is filled up with rows whose response_mask is zero: they weigh
    nothing. The counts in `meta_info["mini_batches"]` leave them out, and responses without tokens too. With a seed
    each epoch deals again; then the rows of all epochs are laid out one after another, else one layout is passed over
    `meta_info["passes"]` times. With `balance` the rows inside a mini-batch change places so that all shards have
    about as many tokens. `columns_of` gives columns that depend on the mini-batch, from its rows in the order of `data`
    and its number.

    With rows 0..5, mini-batches of 4 and 2 shards: mini-batch 0 is (0 1 2 3) and 1 is (4 5); shard 0 gets 0 1 4,
    shard 1 gets 2 3 5.
    """
    tokens_per_row = data.batch["response_mask"].sum(dim=-1).numpy()
    lengths = data.batch["attention_mask"].sum(dim=-1).numpy() if balance else tokens_per_row
    shards: list[list[np.ndarray]] = [[] for _ in range(num_shards)]
    added: list[list[dict[str, torch.Tensor]]] = [[] for _ in range(num_shards)]
    mini_batches: list[dict[str, int]] = []
    for rows in _mini_batch_rows(len(data), rows_per_mini_batch, epochs, shuffle_seed):
        rows_per_shard = -(-len(rows) // num_shards)
        if columns_of is not None:
            in_order = np.sort(rows)
            columns = columns_of(data[in_order], len(mini_batches))
        if balance and num_shards > 1:
            rows = rows[balanced_order(lengths[rows], _shard_sizes(len(rows), rows_per_shard))]
        padded = np.concatenate([rows, np.full(rows_per_shard * num_shards - len(rows), -1)])
        for shard, part in enumerate(padded.reshape(num_shards, rows_per_shard)):
            shards[shard].append(part)
            if columns_of is not None:
                places = np.searchsorted(in_order, part)  # padding is -1, and takes the first row
                added[shard].append({name: column[places] for name, column in columns.items()})
        mini_batches.append({"rows_per_shard": rows_per_shard, **_counts(tokens_per_row[rows])})
    layout = np.concatenate([part for shard in shards for part in shard])
    dealt = data[:] if np.array_equal(layout, np.arange(len(data))) else data[layout.clip(min=0)]
    padding = torch.from_numpy(layout < 0)
    if padding.any():
        dealt.batch["response_mask"] = dealt.batch["response_mask"].masked_fill(padding[:, None], 0)
    parts = [part for shard in added for part in shard]
    for name in parts[0] if parts else ():
        dealt.batch[name] = torch.cat([part[name] for part in parts])
    dealt.meta_info = {
        **dealt.meta_info,
        "mini_batches": mini_batches,
        "passes": epochs if shuffle_seed is None else 1,
    }
    return dealt


def _counts(tokens_per_row: np.ndarray) -> dict[str, int]:
    return {"num_tokens": int(tokens_per_row.sum()), "num_sequences": int((tokens_per_row > 0).sum())}


def _shard_sizes(num_rows: int, rows_per_shard: int) -> list[int]:
    full, rest = divmod(num_rows, rows_per_shard)
    return [rows_per_shard] * full + ([rest] if rest else [])


def _mini_batch_rows(
    num_rows: int, rows_per_mini_batch: int, epochs: int, shuffle_seed: list[int] | None
) -> list[np.ndarray]:
    """The rows of each mini-batch: of one pass or, with a seed, of all epochs, each in an order of its own."""
    orders = [np.arange(num_rows)]
    if shuffle_seed is not None:
        generator = np.random.default_rng(shuffle_seed)
        orders = [generator.permutation(num_rows) for _ in range(epochs)]
    starts = range(0, num_rows, rows_per_mini_batch)
    return [order[start : start + rows_per_mini_batch] for order in orders for start in starts]
