"""The interface of a rollout engine, and the engines by name. What goes in and out of it is in `sampling_requests`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import torch

from paceline.catalog import ROLLOUTS, Registry, RolloutEntry
from paceline.config import ModelConfig, RolloutConfig
from paceline.errors import PacelineError
from paceline.protocol.image_columns import ImageInputs
from paceline.rollout.held_weights import Held
from paceline.rollout.sampling_requests import (
    Completion,
    Request,
    RequestId,
    SamplingParams,
    check_finite,
    check_requests,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""By their names in the configuration."""
CachePolicy = Literal["recompute", "keep"]
"""What new weights do to the keys and values of responses under way."""


@dataclass(frozen=True)
class RolloutSpec:
    """What a worker's rollout engine is made from."""

    model: ModelConfig
    """Where the model's configuration and first weights are."""
    module: Callable[[], PreTrainedModel]
    """Gives a Hugging Face model to sample from: the actor's own module where it lies whole in this process, else a
    copy that `update_weights` fills. Not called by engines that have models of their own."""
    config: RolloutConfig
    max_prompt_length: int
    max_response_length: int
    eos_token_ids: frozenset[int]
    """The tokenizer's. An engine adds those that the model's generation config names."""
    pad_token_id: int
    device: str
    dtype: torch.dtype = torch.float32
    """Numbers of the forward pass."""


class RolloutEngine(ABC):
    """Samples responses to requests, which come and go one by one.

    `submit` takes requests at any time, each `step` samples more tokens of those that have a place, `collect` gives
    responses that have ended. Between two steps requests can be aborted and the weights can change. `generate` does all
    of it for a batch. A subclass defines the abstract methods, calls `finish` where a response has ended, and calls
    `super().__init__()`.
    """

    keeps_own_weights: ClassVar[bool] = False
    """True: its weights are never the actor's own tensors, so every new version comes by `update_weights`."""
    takes_images: ClassVar[bool] = False
    """Whether prompts may have images."""
    takes_requests_singly: ClassVar[bool] = True
    """False: a step samples all that was submitted to its end. See `BatchRollout`."""

    def __init__(self) -> None:
        self.version = 0
        """Of the weights."""
        self._under_way: dict[RequestId, Request] = {}
        self._finished: dict[RequestId, Completion] = {}
        self._versions: dict[RequestId, list[int]] = {}
        """Of the tokens that older weights sampled, where a response under way has such."""
        self._num_generated = 0
        self._is_decoding = False

    @classmethod
    @abstractmethod
    def from_spec(cls, spec: RolloutSpec) -> RolloutEngine:
        """The engine of a worker."""

    # For callers

    def generate(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams,
        seeds: list[int],
        images: list[ImageInputs] | None = None,
    ) -> list[Completion]:
        """One response per prompt, in the order of the prompts.

        `seeds` has one number per prompt. The random numbers of a request come from its seed alone: neither its
        neighbours nor the order nor the process's global random state have a part in them.
        """
        check_requests(prompts, seeds)
        numbers = range(self._num_generated, self._num_generated + len(prompts))
        self._num_generated = numbers.stop
        of_each: Sequence[ImageInputs | None] = images or [None] * len(prompts)
        requests = [
            Request(f"generate-{number}", prompt, sampling, seed, images=its_images)
            for number, prompt, seed, its_images in zip(numbers, prompts, seeds, of_each, strict=True)
        ]
        try:
            self.enqueue(requests)
            with self.decoding():
                for request in requests:
                    while request.id in self._under_way:
                        self.step()
            completions = [self._finished.pop(request.id) for request in requests]
            check_finite(completions)
        except BaseException:
            known = self._under_way.keys() | self._finished
            self.abort([request.id for request in requests if request.id in known])
            raise
        return completions

    def submit(self, requests: list[Request]) -> None:
        """Take requests. Their order has no part in their responses, but who comes first is admitted first."""
        check_requests([request.prompt_ids for request in requests], [request.seed for request in requests])
        ids = [request.id for request in requests]
        twice = [name for name, count in Counter([*ids, *self._under_way, *self._finished]).items() if count > 1]
        if twice:
            raise PacelineError(
                f"the ids {twice[:10]} come twice, or are those of requests under way or not collected; give each "
                "request an id of its own."
            )
        for request in requests:
            sampled = request.sampled
            if sampled is not None and (sampled.finished_by_eos or request.num_sampled >= request.sampling.max_tokens):
                raise PacelineError(
                    f"request {request.id!r} has {request.num_sampled} sampled tokens and has ended, with max_tokens="
                    f"{request.sampling.max_tokens}; there is nothing to go on with."
                )
        self.enqueue(requests)

    def enqueue(self, requests: list[Request]) -> None:
        """`submit` for checked requests."""
        if not self.takes_images and any(request.images is not None for request in requests):
            raise PacelineError(
                f"{type(self).__name__} does not read images. Set actor_rollout_ref.rollout.name=hf, or leave "
                "data.image_key out."
            )
        self.admit(requests)
        for request in requests:
            self._under_way[request.id] = request
            if request.sampled is not None:
                self._versions[request.id] = list(request.sampled.versions)

    @abstractmethod
    def step(self) -> None:
        """One decoding step of what is admitted; before it, prompts are computed where there is place for them."""

    def collect(self) -> list[tuple[RequestId, Completion]]:
        """The responses that have ended since the last `collect`."""
        finished, self._finished = self._finished, {}
        check_finite(list(finished.values()))
        return list(finished.items())

    def abort(self, ids: list[RequestId]) -> list[tuple[RequestId, Completion]]:
        """Drop these requests, whether they wait, are under way or have ended; gives what was sampled of each."""
        unknown = [name for name in ids if name not in self._under_way and name not in self._finished]
        if unknown:
            raise PacelineError(f"requests {unknown[:10]} can't be aborted: they were not submitted, or are collected.")
        for name, completion in self.withdraw([name for name in ids if name in self._under_way]).items():
            self.finish(name, completion)
        return [(name, self._finished.pop(name)) for name in ids]

    def update_weights(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        version: int | None = None,
        kv_cache: CachePolicy = "recompute",
    ) -> None:
        """Take new weights, named as in the Hugging Face model's state dict. All of them must come.

        With `takes_adapter`, LoRA's A and B come in their place, named as in peft's file.

        It may be called between two steps: responses under way go on with the new weights. With "recompute" their keys
        and values are computed again, so that further log-probs are those of the new weights; with "keep" the old ones
        stay, which is faster and less exact. What is submitted later never sees keys and values of old weights.
        Without `version`, it is one more than before.
        """
        self.load_weights(named_tensors)
        self.weights_changed(version, kv_cache)

    def weights_changed(self, version: int | None = None, kv_cache: CachePolicy = "recompute") -> None:
        """`update_weights` for an engine that samples from the actor's own module, after that was trained."""
        self.note_versions()
        self.renew_caches(kv_cache)
        self.version = self.version + 1 if version is None else version

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._under_way)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place, or whose keys and values must be computed again."""
        return len(self._under_way) - self.num_running

    @property
    def not_begun(self) -> list[RequestId]:
        """Those that wait for a place, with no more to lose than a first token if another engine takes them over."""
        if not self.num_waiting:
            return []
        return [name for name, request in self._under_way.items() if not self.num_sampled(request)]

    @property
    @abstractmethod
    def num_running(self) -> int:
        """Requests that have a place: a step decodes them."""

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Enter it around several steps to save what each would do again. The weights must not change inside.

        Blocks may nest: the outermost counts.
        """
        if self._is_decoding:
            yield
            return
        self._is_decoding = True
        try:
            with self.preparing():
                yield
        finally:
            self._is_decoding = False

    def preparing(self) -> AbstractContextManager[None]:
        """What an engine changes around steps: see `decoding`."""
        return nullcontext()

    @property
    def weights_dtype(self) -> torch.dtype:
        """What it holds its weights in: `update_weights` may be given these numbers, which are fewer bytes to send."""
        return torch.float32

    @property
    def takes_adapter(self) -> bool:
        """Whether it has the base weights of the policy, and `update_weights` wants LoRA's adapter alone."""
        return False

    @abstractmethod
    def sleep(self) -> None:
        """Give back the memory that only sampling needs, until `wake`."""

    @abstractmethod
    def wake(self) -> None:
        """Be ready for `step` again."""

    # For engines

    def held_weights(self) -> Mapping[str, Held] | None:
        """What it holds, by the names of the Hugging Face model's state dict, to be compared with what it was given.

        None, of an engine that can't say: then nothing is compared.
        """
        return None

    @abstractmethod
    def admit(self, requests: list[Request]) -> None:
        """Take new requests; raises without taking any."""

    @abstractmethod
    def withdraw(self, ids: list[RequestId]) -> dict[RequestId, Completion]:
        """Forget requests under way; gives what was sampled of them, earlier tokens included."""

    @abstractmethod
    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the weights. All of them must come: see `whole_state`."""

    @abstractmethod
    def num_sampled(self, request: Request) -> int:
        """How many tokens the response to a request under way has by now, earlier tokens included."""

    @abstractmethod
    def sampled_so_far(self, request: Request) -> Completion:
        """Tokens and log-probs of a request under way by now, earlier ones included. Not to be changed."""

    @abstractmethod
    def renew_caches(self, kv_cache: CachePolicy) -> None:
        """The weights are others than those that keys and values were computed with."""

    def finish(self, name: RequestId, completion: Completion) -> None:
        """A response has ended."""
        del self._under_way[name]
        completion.versions = self._versions.pop(name, [])
        completion.versions += [self.version] * (len(completion.token_ids) - len(completion.versions))
        self._finished[name] = completion

    def note_versions(self) -> None:
        """Before the version changes: remember it for the tokens that are there."""
        for name, request in self._under_way.items():
            versions = self._versions.setdefault(name, [])
            versions += [self.version] * (self.num_sampled(request) - len(versions))


def token_ids(configured: int | list[int] | None) -> set[int]:
    """The end-of-sequence tokens of a generation config, which names none, one or several."""
    if configured is None:
        return set()
    return set(configured) if isinstance(configured, list) else {configured}


def whole_state(
    model: torch.nn.Module, named_tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as they come, and at the end those that are missing because they are tied to one that came.

    `model` says which names, shapes and ties there are; it may be on the meta device. Unknown names, other shapes and
    weights that did not come raise a PacelineError in the middle of the iteration.
    """
    state = model.state_dict(keep_vars=True)
    uses = Counter(map(id, state.values()))
    came: dict[int, torch.Tensor] = {}
    """Of the weights with several names. Others are not kept: they may be large, and parts of a larger bucket."""
    missing = set(state)
    for name, tensor in named_tensors:
        if name not in state:
            raise PacelineError(f"update_weights got {name!r}, which the rollout's model does not have.")
        if state[name].shape != tensor.shape:
            raise PacelineError(
                f"update_weights got {name!r} of shape {tuple(tensor.shape)}; "
                f"the rollout's model has {tuple(state[name].shape)}."
            )
        if uses[id(state[name])] > 1 and id(state[name]) not in came:
            came[id(state[name])] = tensor.clone()
        missing.discard(name)
        yield name, tensor
    lost = [name for name in state if name in missing and id(state[name]) not in came]
    if lost:
        raise PacelineError(
            f"update_weights got no value for {len(lost)} of {len(state)} weights: {', '.join(lost[:5])}"
            f"{', ...' if len(lost) > 5 else ''}. Send the whole state dict of the actor."
        )
    for name in missing:
        yield name, came[id(state[name])]


EngineClass = TypeVar("EngineClass", bound=type[RolloutEngine])
_ENGINES: Registry[type[RolloutEngine], RolloutEntry] = Registry(ROLLOUTS)


def register_rollout(name: str) -> Callable[[EngineClass], EngineClass]:
    """Class decorator: makes a rollout engine known under `name`."""

    def decorate(engine: EngineClass) -> EngineClass:
        _ENGINES.register(name)(engine)
        if engine.__module__ != ROLLOUTS.modules.get(name):
            singly = getattr(engine, "takes_requests_singly", True)
            ROLLOUTS.add(name, RolloutEntry(takes_requests_singly=singly))
        return engine

    return decorate


def get_rollout(name: str) -> type[RolloutEngine]:
    """The engine class registered under `name`; ConfigError when there is none."""
    return _ENGINES.get(name)
