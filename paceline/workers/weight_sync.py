"""The policy's weights in parts, for a rollout in other processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

BUCKET_BYTES = 256 * 2**20
"""Large enough that calls cost nothing beside it, small enough that a rank never holds much of the model twice."""


def in_buckets(
    named_tensors: Iterable[tuple[str, Tensor]], max_bytes: int | None = None
) -> Iterator[dict[str, Tensor]]:
    """The tensors in their order, in dictionaries of at most `max_bytes` (BUCKET_BYTES); a larger one is alone.

    >>> from torch import zeros
    >>> [list(bucket) for bucket in in_buckets([("a", zeros(2)), ("b", zeros(2)), ("c", zeros(9))], max_bytes=16)]
    [['a', 'b'], ['c']]
    """
    max_bytes = max_bytes or BUCKET_BYTES
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named_tensors:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    yield bucket
