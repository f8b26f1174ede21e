"""Who gives the loop its steps with their rollouts, by `trainer.schedule`."""

from __future__ import annotations

from paceline.config.derived import uses_agents
from paceline.trainer.ppo.agent_pool import AgentPool
from paceline.trainer.ppo.phases import Phases
from paceline.trainer.ppo.request_pool import RequestPool
from paceline.trainer.ppo.rollouts_ahead import RolloutsAhead
from paceline.trainer.ppo.schedule import Schedule
from paceline.trainer.ppo.scoring import ask_rules
from paceline.trainer.ppo.stream import Stream
from paceline.trainer.ppo.streamed_rollouts import StreamedRollouts


def make_rollouts(phases: Phases, last_step: int) -> RolloutsAhead | StreamedRollouts:
    """Whole batches for steps ahead, or requests that go on across updates."""
    cfg, schedule = phases.cfg, phases.cfg.trainer.schedule
    if schedule.name == "streaming":
        grades_as_they_come = cfg.trainer.overlap == "full" and not uses_agents(cfg)
        return StreamedRollouts(
            Stream(schedule.max_staleness, last_step, in_order=schedule.on_too_old == "wait"),
            phases.train_dataloader,
            phases.draw_step,
            lambda: _request_pool(phases),
            n=cfg.actor_rollout_ref.rollout.n,
            on_update=schedule.on_update,
            sampling=phases.set_sampling,
            grade=(lambda batch: ask_rules(batch, phases.groups.reward)) if grades_as_they_come else None,
            phase=lambda name, **about: phases.log.phase(name, **about),
        )
    ahead = Schedule(schedule.max_staleness if schedule.name == "pipelined" else 0, last_step)
    return RolloutsAhead(ahead, phases.train_dataloader, phases.draw_step, phases.issue_rollout)


def _request_pool(phases: Phases) -> RequestPool | AgentPool:
    """Where single requests go. A rollout with devices of its own samples beside the calls."""
    schedule, is_beside = phases.cfg.trainer.schedule, phases.rollout_wg is not None
    if phases.conversations is not None:
        return AgentPool(phases.conversations, is_beside=is_beside, kv_cache=schedule.kv_cache)
    (group,) = phases.groups.generating
    if is_beside:
        group.start_sampling(schedule.kv_cache)
    return RequestPool(
        group,
        is_beside=is_beside,
        places=phases.cfg.actor_rollout_ref.rollout.max_num_seqs,
        is_fixed=schedule.max_staleness == 0,
    )
