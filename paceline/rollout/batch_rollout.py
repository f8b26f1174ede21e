"""The base of rollout engines that sample a batch as a whole."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from paceline.errors import PacelineError
from paceline.rollout.rollout_interface import (
    CachePolicy,
    Completion,
    Request,
    RequestId,
    RolloutEngine,
    SamplingParams,
)


class BatchRollout(RolloutEngine):
    """Each step samples all that was submitted by then to its end. A subclass defines `sample`.

    So the weights never change in the middle of a response, and requests that go on from sampled tokens are refused.
    """

    takes_requests_singly: ClassVar[bool] = False

    @abstractmethod
    def sample(self, prompts: list[list[int]], sampling: SamplingParams, seeds: list[int]) -> list[Completion]:
        """One response per prompt, in the order of the prompts, from requests that were checked."""

    def step(self) -> None:
        by_sampling: dict[SamplingParams, list[Request]] = {}
        for request in self._under_way.values():
            by_sampling.setdefault(request.sampling, []).append(request)
        with self.decoding():
            for sampling, requests in by_sampling.items():
                prompts = [request.prompt_ids for request in requests]
                completions = self.sample(prompts, sampling, [request.seed for request in requests])
                for request, completion in zip(requests, completions, strict=True):
                    self.finish(request.id, completion)

    @property
    def num_running(self) -> int:
        return 0

    def admit(self, requests: list[Request]) -> None:
        begun = [request.id for request in requests if request.num_sampled]
        if begun:
            raise PacelineError(
                f"requests {begun[:10]} have sampled tokens to go on from; {type(self).__name__} samples whole "
                "responses only. Take an engine that takes requests one by one, such as native."
            )

    def withdraw(self, ids: list[RequestId]) -> dict[RequestId, Completion]:
        return {name: Completion([], [], False) for name in ids}

    def num_sampled(self, request: Request) -> int:
        return 0

    def sampled_so_far(self, request: Request) -> Completion:
        return Completion([], [], False)

    def renew_caches(self, kv_cache: CachePolicy) -> None:
        """No cache outlives a step."""
