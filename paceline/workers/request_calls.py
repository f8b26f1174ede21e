"""What the driver asks of a rollout whose requests come and go one by one.

Each argument that is a list has one item per rank, so that the driver chooses who samples what; answers are lists, too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
import torch

from paceline.protocol import DataProto
from paceline.rollout import Completion, Request, RolloutEngine, SamplingParams
from paceline.rollout.postprocess import prompt_token_lists, to_batch
from paceline.rollout.rollout_interface import CachePolicy, RequestId
from paceline.single_controller.base import Dispatch, call_tag
from paceline.workers.role_worker import RoleWorker, RunContext, built, role_method
from paceline.workers.sampling_thread import SamplingThread

SAMPLED = "sampled"
"""In the record of a call that collects: when was sampled since the last one, as (start, end, version)."""


class RequestCalls(RoleWorker):
    """The part of a worker with a rollout that takes single requests.

    Where the rollout has a process of its own, `start_sampling` makes it decode beside calls, which are short. Where it
    shares the process with the actor, `decode_until` decodes inside a call.
    """

    leaves_inputs_alone = True

    def __init__(self, role: str, run: RunContext) -> None:
        super().__init__(role, run)
        self.rollout: RolloutEngine | None = None
        self.sampling: SamplingThread | None = None
        self.kv_cache: CachePolicy = "recompute"
        """What new weights do to the keys and values of responses under way."""
        self.prompts: dict[RequestId, DataProto] = {}
        """The rows of the requests under way."""

    def rollout_on_device(self, version: int | None = None) -> AbstractContextManager[None]:
        """Around decoding: the weights to sample from are those of the policy, and on the device.

        `version` is that of the weights that the driver counts on; None: it did not say.
        """
        raise NotImplementedError

    @role_method(Dispatch.ONE_TO_ALL)
    def start_sampling(self, kv_cache: CachePolicy = "recompute") -> None:
        """Decode in a thread from now on. Only for a rollout that shares its process with no model that trains."""
        if self.trained_engine is not None:
            raise RuntimeError(f"{self.role_name} trains in this process: its rollout decodes in calls (decode_until).")
        self.kv_cache = kv_cache
        self.sampling = SamplingThread(built(self.rollout))

    @role_method(Dispatch.ALL_TO_ALL)
    def submit_requests(self, data: DataProto | None) -> None:
        """Sample a response to each row, named by column `request_id`, as `meta_info["sampling"]` says.

        Rows that `abort_requests` gave go on where they were.
        """
        self.check_sampling()
        if data is not None:
            requests = requests_of(data, self.run.max_response_length)
            built(self.rollout).submit(requests)
            self.prompts |= {request.id: prompt_row(data, row) for row, request in enumerate(requests)}

    @role_method(Dispatch.ONE_TO_ALL)
    def collect_finished(self) -> DataProto:
        """The responses that have ended since the last call."""
        self.check_sampling()
        if self.sampling is not None:
            call_tag.get({})[SAMPLED] = self.sampling.sampled()
        return self._answer(built(self.rollout).collect())

    @role_method(Dispatch.ALL_TO_ALL)
    def abort_requests(self, ids: list[RequestId]) -> DataProto:
        """Drop requests that were not collected; gives what was sampled of them."""
        self.check_sampling()
        return self._answer(built(self.rollout).abort(ids))

    @role_method(Dispatch.ONE_TO_ALL)
    def pause_sampling(self) -> None:
        """Keep all requests as they are until `resume_sampling`."""
        built(self.sampling).is_paused = True

    @role_method(Dispatch.ONE_TO_ALL)
    def resume_sampling(self) -> None:
        built(self.sampling).is_paused = False

    @role_method(Dispatch.ALL_TO_ALL)
    def decode_until(self, num_finished: int) -> DataProto:
        """Decode in this call until so many responses have ended, or all have; gives them."""
        self.check_sampling()
        rollout, collected = built(self.rollout), []
        with self.rollout_on_device(), rollout.decoding():
            call_tag.get({})["version"] = rollout.version
            collected += rollout.collect()
            while rollout.has_work and len(collected) < num_finished:
                rollout.step()
                collected += rollout.collect()
        rollout.sleep()
        return self._answer(collected)

    def check_sampling(self) -> None:
        """Raise what ended the thread."""
        if self.sampling is not None:
            self.sampling.check()

    def _answer(self, collected: list[tuple[RequestId, Completion]]) -> DataProto:
        """Columns as of `generate_sequences`, with the version of each token; and what the engine still has to do."""
        rollout = built(self.rollout)
        answer = DataProto()
        if collected:
            prompts = DataProto.concat([self.prompts.pop(name) for name, _ in collected])
            completions, longest = [completion for _, completion in collected], self.run.max_response_length
            answer = to_batch(prompts, completions, longest, self.run.pad_token_id, with_versions=True)
            ended = [done.finished_by_eos or len(done.token_ids) == longest for done in completions]
            answer.batch["is_finished"] = torch.tensor(ended)
            answer.batch["seeds"] = prompts.batch["seeds"]
            names = np.empty(len(collected), dtype=object)
            names[:] = [name for name, _ in collected]
            answer.non_tensor_batch["request_id"] = names
        answer.meta_info |= {
            "version": rollout.version,
            "num_running": rollout.num_running,
            "num_waiting": rollout.num_waiting,
            "not_begun": rollout.not_begun,
        }
        return answer


def requests_of(data: DataProto, max_tokens: int) -> list[Request]:
    """The requests of a batch of prompts or, where it has the column `responses`, of responses to go on with."""
    sampling = SamplingParams(max_tokens=max_tokens, **data.meta_info["sampling"])
    sampled = sampled_before(data) if "responses" in data.batch else [None] * len(data)
    prompts = [prompt_row(data, row) for row in range(len(data))]
    return [
        Request(name, prompt_token_lists(prompt)[0], sampling, seed, sampled=before)
        for name, prompt, seed, before in zip(
            data.non_tensor_batch["request_id"], prompts, data.batch["seeds"].tolist(), sampled, strict=True
        )
    ]


def prompt_row(data: DataProto, row: int) -> DataProto:
    """The prompt alone, input_ids and attention_mask (1, prompt), with its seed."""
    part = data[row : row + 1]
    width = part.batch["prompts"].shape[1] if "prompts" in part.batch else part.batch["input_ids"].shape[1]
    columns = {name: part.batch[name][:, :width] for name in ("input_ids", "attention_mask")}
    return DataProto.from_dict(tensors={**columns, "seeds": part.batch["seeds"]})


def sampled_before(data: DataProto) -> list[Completion]:
    """What was sampled of each row, from the columns of a batch of responses with versions."""
    lengths = data.batch["response_mask"].sum(dim=1).tolist()
    columns = [data.batch[name].tolist() for name in ("responses", "rollout_log_probs", "policy_versions")]
    return [
        Completion(tokens[:length], log_probs[:length], False, versions[:length])
        for length, tokens, log_probs, versions in zip(lengths, *columns, strict=True)
    ]
