"""A worker whose responses do not depend on the model, and the task runner that uses it.

Batch shape changes the last bits of logits, so sampled tokens may flip between numbers of ranks. On recorded responses
everything else must agree.
"""

from __future__ import annotations

import random

from paceline.protocol import DataProto
from paceline.rollout.postprocess import to_batch
from paceline.rollout.rollout_interface import Completion
from paceline.single_controller.base import Dispatch
from paceline.trainer.main_ppo import TaskRunner
from paceline.trainer.ppo.roles import Role
from paceline.workers.engine_workers import ActorRolloutRefWorker, role_method


class ReplayWorker(ActorRolloutRefWorker):
    """Responses are made from the seed of each request."""

    @role_method(Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        completions = []
        for seed in prompts.batch["seeds"].tolist():
            generator = random.Random(seed)
            length = generator.randint(1, self.run.max_response_length)
            tokens = [generator.randint(3, 60) for _ in range(length)]
            completions.append(Completion(token_ids=tokens, log_probs=[-1.0] * length, finished_by_eos=False))
        return to_batch(prompts, completions, self.run.max_response_length, self.run.pad_token_id)


class ReplayRunner(TaskRunner):
    """The ordinary run with that worker."""

    def add_actor_rollout_worker(self, config) -> None:
        super().add_actor_rollout_worker(config)
        self.role_worker_mapping[Role.ActorRollout] = ReplayWorker
