"""The numbers that describe a step: scores, advantages, lengths, times, throughput.

Takes the finished batch of a step (columns as in `paceline.schema`) and gives plain floats by metric name. Rows
whose response mask is all zero are padding and enter no metric.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from tensordict import TensorDict

from paceline.errors import DataError
from paceline.protocol import DataProto
from paceline.report.timeline import FinishedCall, busy_seconds

PHASES_PER_TOKEN = ("old_log_prob", "ref", "values", "rm", "adv", "update_actor", "update_critic")
"""Phases that work on prompts and responses alike; generation is counted by response tokens alone."""


class Timer:
    """Adds up the wall-clock seconds of named blocks.

    >>> timer = Timer()
    >>> with timer("gen"):
    ...     pass
    >>> list(timer.seconds)
    ['gen']
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time that the block takes to `seconds[name]`, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def data_metrics(batch: DataProto, use_critic: bool) -> dict[str, float]:
    """What came out of the step's rollout: scores, rewards, advantages, returns, values, lengths.

    Scores and rewards are sums over each response; advantages, returns and values are taken token by token, without
    tokens that rollout correction rejected, unless it rejected all.
    `clip_ratio` of a length is the share of rows that fill the whole width, for a response most often because the
    length limit cut it. A step that was left out before its advantages has scores and lengths alone.
    """
    columns = _columns(batch)
    is_row = _response_rows(batch)
    token_mask = columns["response_mask"].bool()

    def per_sequence(column: str) -> torch.Tensor:
        return torch.where(token_mask, columns[column], 0.0).sum(dim=-1)[is_row]

    metrics = _mean_max_min("critic/score", per_sequence("token_level_scores"))
    if "advantages" in columns:
        metrics |= _mean_max_min("critic/rewards", per_sequence("token_level_rewards"))
        kept = columns.get("loss_mask", token_mask).bool()
        kept = kept if kept.any() else token_mask
        metrics |= _mean_max_min("critic/advantages", columns["advantages"][kept])
        returns = columns["returns"][kept]
        metrics |= _mean_max_min("critic/returns", returns)
        if use_critic:
            values = columns["values"][kept]
            metrics |= _mean_max_min("critic/values", values)
            metrics["critic/vf_explained_var"] = _explained_variance(values, returns)
    prompt_lengths, response_lengths = _lengths(batch)
    for name, lengths in (("response", response_lengths), ("prompt", prompt_lengths)):
        (width,) = batch.row_shape(f"{name}s")
        metrics |= _mean_max_min(f"{name}_length", lengths)
        metrics[f"{name}_length/clip_ratio"] = (lengths == width).float().mean().item()
    return metrics


def timing_metrics(batch: DataProto, timings: dict[str, float]) -> dict[str, float]:
    """`timing_s/<name>` for each timing in seconds, and `timing_per_token_ms/<name>` for phases that work on tokens."""
    prompt_lengths, response_lengths = _lengths(batch)
    num_response_tokens = int(response_lengths.sum())
    num_tokens = num_response_tokens + int(prompt_lengths.sum())
    num_tokens_of = {"gen": num_response_tokens} | dict.fromkeys(PHASES_PER_TOKEN, num_tokens)
    metrics = {f"timing_s/{name}": seconds for name, seconds in timings.items()}
    metrics |= {
        f"timing_per_token_ms/{name}": seconds * 1000 / num_tokens_of[name]
        for name, seconds in timings.items()
        if name in num_tokens_of
    }
    return metrics


def throughput_metrics(batch: DataProto, seconds_per_step: float, num_devices: int) -> dict[str, float]:
    """Tokens of prompts and responses in the step, its seconds, and tokens per second and device."""
    prompt_lengths, response_lengths = _lengths(batch)
    num_tokens = float(prompt_lengths.sum() + response_lengths.sum())
    return {
        "perf/total_num_tokens": num_tokens,
        "perf/time_per_step": seconds_per_step,
        "perf/throughput": num_tokens / (seconds_per_step * num_devices),
    }


def idle_metrics(records: Sequence[FinishedCall], pools: Sequence[str], start: float, end: float) -> dict[str, float]:
    """Seconds of a step in which no process of a pool was at work, and how busy all pools were together.

    `perf/overlap` is the busy time of all pools / (wall time x pools): 1 if no pool ever waits.
    """
    busy = {
        pool: busy_seconds([(record.start, record.end) for record in records if record.pool == pool], start, end)
        for pool in pools
    }
    wall = end - start
    metrics = {f"timing_s/idle/{pool}": wall - seconds for pool, seconds in busy.items()}
    return metrics | {"perf/overlap": sum(busy.values()) / (wall * len(pools))}


def _columns(batch: DataProto) -> TensorDict:
    assert batch.batch is not None
    return batch.batch


def _response_rows(batch: DataProto) -> torch.Tensor:
    """Which rows hold a response, (batch,)."""
    is_row = _columns(batch)["response_mask"].bool().any(dim=-1)
    if not is_row.any():
        raise DataError(
            f"None of the {len(batch)} rows of the batch has a response token; there is nothing to measure."
        )
    return is_row


def _lengths(batch: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens in each prompt and in each response, by the attention mask: a response mask may have holes."""
    columns = _columns(batch)
    attention_mask = columns["attention_mask"][_response_rows(batch)]
    prompt_width = columns["prompts"].shape[-1]
    return attention_mask[:, :prompt_width].sum(dim=-1), attention_mask[:, prompt_width:].sum(dim=-1)


def _mean_max_min(name: str, x: torch.Tensor) -> dict[str, float]:
    x = x.float()
    return {f"{name}/mean": x.mean().item(), f"{name}/max": x.max().item(), f"{name}/min": x.min().item()}


def _explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float:
    """1 - var(returns - values) / var(returns): 1 is a perfect critic, 0 one as good as a constant.

    0 where the returns don't vary, and there is nothing to explain.
    """
    if returns.max() == returns.min():
        return 0.0
    return (1 - (returns - values).var(unbiased=False) / returns.var(unbiased=False)).item()
