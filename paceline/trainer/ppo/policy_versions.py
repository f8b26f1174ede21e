"""Which weights sampled which token, and how old they are when it trains."""

from __future__ import annotations

import torch

from paceline.protocol import DataProto


def with_versions(responses: DataProto, version: int) -> DataProto:
    """The responses with a column `policy_versions`: all their tokens were sampled by weights of this version."""
    versions = {"policy_versions": responses.batch["response_mask"].long() * version}
    return responses.union(DataProto.from_dict(tensors=versions))


def staleness_metrics(data: DataProto, version: int) -> dict[str, float]:
    """How many updates lie between the weights that sampled a token and those that train on it, of this `version`.

    Mean and maximum over tokens, and the share of the tokens of each age. Over responses, the mean of the updates while
    one was sampled, and of those since: what a response that goes on costs, and what one costs that waits.
    """
    mask = data.batch["response_mask"].bool()
    ages = (version - data.batch["policy_versions"])[mask]
    if not len(ages):
        return {}
    found, counts = torch.unique(ages, return_counts=True)
    shares = {
        f"training/staleness/share_of_tokens/{age}": count / len(ages)
        for age, count in zip(found.tolist(), counts.tolist(), strict=True)
    }
    is_row, versions = mask.any(dim=-1), data.batch["policy_versions"]
    last = versions.masked_fill(~mask, -1).amax(dim=-1)[is_row].double()
    first = versions.masked_fill(~mask, version).amin(dim=-1)[is_row].double()
    return {
        "training/staleness/in_flight": (last - first).mean().item(),
        "training/staleness/in_queue": (version - last).mean().item(),
        "training/staleness/mean": ages.double().mean().item(),
        "training/staleness/max": float(ages.max()),
        **shares,
    }
