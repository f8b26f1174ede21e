"""The schedule: how far the rollout may run ahead of the training, and what can't be combined with that."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.catalog import ROLLOUTS
from paceline.config import PPOConfig
from paceline.config.derived import ROLLOUT_POOL, estimator_in_use, rollout_pools
from paceline.config.keys import known_keys, value_of
from paceline.errors import ConfigError

OF_STREAMING = ("on_update", "kv_cache", "on_too_old")


def check_schedule(cfg: PPOConfig) -> Iterator[str]:
    """Staleness that a schedule does not have, log-probs that stale responses can't have, and what streaming can't."""
    schedule = cfg.trainer.schedule
    if schedule.name == "streaming":
        yield from _check_streaming(cfg)
    else:
        for name in OF_STREAMING:
            key = f"trainer.schedule.{name}"
            if value_of(cfg, key) != known_keys()[key].default:
                yield (
                    f"{key}={value_of(cfg, key)} has no part in trainer.schedule.name={schedule.name}, where no "
                    f"response outlives an update; set trainer.schedule.name=streaming or leave it out."
                )
    if schedule.max_staleness < 1:
        return
    if schedule.name == "sync":
        yield (
            f"trainer.schedule.max_staleness={schedule.max_staleness} has no part in trainer.schedule.name=sync, where "
            "the newest weights sample; set trainer.schedule.name=pipelined or leave it 0."
        )
    elif cfg.actor_rollout_ref.rollout.trust_log_probs:
        yield (
            "actor_rollout_ref.rollout.trust_log_probs=True takes the log-probs of the weights that sampled for those "
            f"of the weights before the update; with trainer.schedule.max_staleness={schedule.max_staleness} they are "
            "others. Set it to False."
        )


def _check_streaming(cfg: PPOConfig) -> Iterator[str]:
    """What needs a batch as a whole, or all devices of it in step."""
    rollout, asked = cfg.actor_rollout_ref.rollout, "trainer.schedule.name=streaming"
    engine, estimator = ROLLOUTS.get(rollout.name), estimator_in_use(cfg)
    if engine is not None and not engine.takes_requests_singly:
        yield f"{asked}: actor_rollout_ref.rollout.name={rollout.name} samples whole batches; set native or vllm."
    if rollout.engine_kwargs.vllm.get("async_scheduling"):
        yield (
            f"{asked}: with actor_rollout_ref.rollout.engine_kwargs.vllm.async_scheduling=True vLLM begins a step "
            "before the one under way has ended, so weights can't change between two; leave it out."
        )
    if rollout.tensor_model_parallel_size > 1:
        yield (
            f"{asked}: workers that share an engine (actor_rollout_ref.rollout.tensor_model_parallel_size="
            f"{rollout.tensor_model_parallel_size}) sample in step; set that to 1, or trainer.schedule.name=pipelined."
        )
    if estimator is not None and estimator.needs_baseline:
        yield (
            f"{asked}: algorithm.adv_estimator={cfg.algorithm.adv_estimator} wants greedy responses by the same "
            "weights as the others; set trainer.schedule.name=pipelined."
        )
    if cfg.algorithm.filter_groups.enable:
        yield (
            f"{asked}: algorithm.filter_groups.enable=True draws further prompts inside a step, whose responses would "
            "wait behind those under way; set trainer.schedule.name=pipelined."
        )
    try:
        pools = rollout_pools(cfg.trainer)
    except ConfigError:  # said elsewhere
        return
    if len(pools) > 1:
        yield f"{asked}: the rollout is on {' and '.join(pools)}; name one pool in trainer.placement.rollout_on."
    if cfg.trainer.schedule.kv_cache == "keep" and pools != [ROLLOUT_POOL]:
        yield (
            "trainer.schedule.kv_cache=keep wants a rollout with devices of its own; set "
            "trainer.placement.rollout_devices or trainer.schedule.kv_cache=recompute."
        )


def schedule_notes(cfg: PPOConfig) -> Iterator[str]:
    """A rollout that runs ahead on the devices that train saves little time: worth a word, and no error."""
    schedule = cfg.trainer.schedule
    try:
        apart = rollout_pools(cfg.trainer) == [ROLLOUT_POOL]
    except ConfigError:  # said elsewhere
        return
    if schedule.name == "pipelined" and schedule.max_staleness > 0 and not apart:
        yield (
            f"trainer.schedule.max_staleness={schedule.max_staleness}: nothing is gained, because the rollout shares "
            "devices with what trains and waits for it; set trainer.placement.rollout_devices."
        )
