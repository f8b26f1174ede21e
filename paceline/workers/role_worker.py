"""What all roles on an engine have in common: a random state, training over mini-batches, checkpoints."""

from __future__ import annotations

import hashlib
import logging
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, Unpack, cast

import numpy as np
import torch
from safetensors import SafetensorError

from paceline.algorithms.rollout_correction import NO_CORRECTION, RolloutCorrection
from paceline.config import DistillationLossConfig, FrozenFsdpConfig, FsdpConfig, ModelConfig, OptimConfig
from paceline.config.derived import TOKEN_BUDGET, backend_for
from paceline.engine import Engine, EngineSpec, LossFn, MicroBatchSize, get_engine
from paceline.engine.hf_models import ModelKind
from paceline.engine.lora import LoraSpec
from paceline.errors import NonFiniteError
from paceline.files import storage_error
from paceline.protocol import DataProto
from paceline.protocol.digest import tensor_digest
from paceline.single_controller.base import Dispatch, DispatchMode, Worker, register
from paceline.workers.losses import MiniBatch, mean_metrics
from paceline.workers.sampling_thread import TURNS

logger = logging.getLogger(__name__)

T = TypeVar("T")
RandomState = dict[str, Any]
"""Of each generator by its name: python, numpy, torch, and the kind of accelerator."""
Method = TypeVar("Method", bound=Callable[..., object])


@dataclass(frozen=True)
class RunContext:
    """What every worker knows of the run besides its own section of the config."""

    seed: int
    device: str
    total_optimizer_steps: int
    """Optimizer steps of this role in the whole run: the length of its learning-rate schedule."""
    max_prompt_length: int
    max_response_length: int
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0
    skip_nonfinite: bool = False
    """Leave an optimizer step out, instead of ending the run, when its loss or gradient is not finite."""
    correction: RolloutCorrection = NO_CORRECTION
    """Of samples of another distribution, where it is made during the update (bypass)."""
    collective_timeout_seconds: float | None = None
    """How long workers may wait for each other in one collective; None is PyTorch's own limit."""
    distillation: DistillationLossConfig | None = None
    """What the policy learns from teachers; None: the run has none."""


def role_method(dispatch_mode: DispatchMode) -> Callable[[Method], Method]:
    """A remote method that returns a future."""
    return register(dispatch_mode=dispatch_mode, blocking=False)


def micro_batches(dynamic: bool | None, rows: int | None, max_tokens: int | None, *, usual_rows: int) -> MicroBatchSize:
    """Micro-batches of so many rows or, if dynamic, of so many tokens at most.

    The driver chooses a budget of tokens for its workers; one that was made without a driver takes TOKEN_BUDGET.
    """
    return {"max_tokens": max_tokens or TOKEN_BUDGET} if dynamic else {"micro_batch_size": rows or usual_rows}


@contextmanager
def storage_errors(folder: str) -> Iterator[None]:
    """Around code that only writes files: what torch and safetensors raise becomes a storage error of `folder`."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise storage_error(Path(folder), error) from error


def dealt_mini_batches(data: DataProto) -> Iterator[tuple[DataProto, MiniBatch]]:
    """This rank's rows of each mini-batch, and its counts, in the order that the driver dealt (`deal_mini_batches`)."""
    for _ in range(data.meta_info["passes"]):
        start = 0
        for mini_batch in (MiniBatch(**counts) for counts in data.meta_info["mini_batches"]):
            yield data[start : start + mini_batch.rows_per_shard], mini_batch
            start += mini_batch.rows_per_shard


def built(part: T | None) -> T:
    """A part of a worker that `init_model` makes."""
    if part is None:
        raise RuntimeError("this worker has no such model: call init_model first, on a worker of the right role.")
    return part


class RoleWorker(Worker):
    """A role of the training loop with its own random state, on one engine or several."""

    leaves_inputs_alone = True

    def __init__(self, role: str, run: RunContext) -> None:
        super().__init__()
        self.role_name = role
        self.run = run
        self.rng = RoleRng(run.seed, role, self.rank)
        self.writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.writing: Future[None] | None = None
        self.writing_to = ""
        self.optimizer_steps: list[dict[str, float]] = []
        """Metrics of the last update, step by step."""

    @contextmanager
    def around_call(self) -> Iterator[None]:
        """Every call draws from the role's own random state, also in a subclass, and no thread decodes beside it."""
        with TURNS.call(), self.rng.swapped_in():
            yield

    def build_engine(
        self,
        strategy: str | None,
        model: ModelConfig,
        *,
        kind: ModelKind,
        optim: OptimConfig | None = None,
        grad_clip: float = 1.0,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        ulysses_sequence_parallel_size: int = 1,
        lora: LoraSpec | None = None,
        offload: FrozenFsdpConfig | None = None,
    ) -> Engine:
        spec = EngineSpec(
            model=model,
            kind=kind,
            optim=optim,
            grad_clip=grad_clip,
            total_optimizer_steps=self.run.total_optimizer_steps,
            device=self.run.device,
            tensor_model_parallel_size=tensor_model_parallel_size,
            pipeline_model_parallel_size=pipeline_model_parallel_size,
            ulysses_sequence_parallel_size=ulysses_sequence_parallel_size,
            lora=lora,
            param_offload=offload is not None and offload.param_offload,
            optimizer_offload=isinstance(offload, FsdpConfig) and offload.optimizer_offload,
            collective_timeout_seconds=self.run.collective_timeout_seconds,
        )
        engine = get_engine(backend_for(strategy, self.world_size))(spec)
        engine.initialize()
        return engine

    def train(
        self,
        engine: Engine,
        data: DataProto,
        make_loss: Callable[[DataProto, MiniBatch], LossFn],
        *,
        prefix: str,
        temperature: float = 1.0,
        **sizes: Unpack[MicroBatchSize],
    ) -> dict[str, float]:
        """One optimizer step per mini-batch.

        `sizes` comes from `micro_batches`. Returns the metrics of all steps together. An optimizer step whose loss or
        gradient is not finite raises or, if the run may skip, is left out and counted.
        """
        steps: list[dict[str, float]] = []
        skipped: Counter[str] = Counter()
        with engine.on_device(optimizer=True):
            for shard, mini_batch in dealt_mini_batches(data):
                try:
                    steps.append(
                        engine.train_batch(shard, make_loss(shard, mini_batch), temperature=temperature, **sizes)
                    )
                except NonFiniteError as error:  # on all ranks alike, before any weight has changed
                    if not self.run.skip_nonfinite:
                        raise
                    skipped[error.what] += 1
                    logger.warning("%s: %s This optimizer step is skipped.", self.role_name, error)
        self.optimizer_steps = steps
        counted = {f"{prefix}/skipped_updates": float(skipped.total())} if self.run.skip_nonfinite else {}
        why = {f"{prefix}/nonfinite/{what}": float(count) for what, count in skipped.items()}
        return mean_metrics(steps, prefix) | counted | why

    @role_method(Dispatch.ONE_TO_ALL)
    def describe_update(self) -> dict[str, object]:
        """What the last update did, for the flight recorder: metrics of each optimizer step, the weights' digest."""
        found = hashlib.blake2b(digest_size=16)
        for name, tensor in built(self.trained_engine).named_full_weights():
            found.update(f"{name} {tensor_digest(tensor)}\n".encode())
        return {
            "steps": self.optimizer_steps,
            "weights": found.hexdigest(),
            "ranks": self.world_size,
            "threads": torch.get_num_threads(),
        }

    @property
    def trained_engine(self) -> Engine | None:
        """The engine whose state a checkpoint holds; None for frozen roles."""
        raise NotImplementedError

    def on_new_weights(self) -> None:
        """Called after the trained engine's weights changed."""

    @role_method(Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        """Begin to save weights, optimizer, schedule and this rank's random state, in a folder that exists.

        What is saved is the state of this moment; the files are written while later calls run. `finish_checkpoint`
        must follow.
        """
        with storage_errors(folder):
            self.rng.save(self._rng_file(folder))
        if self.trained_engine is not None:
            snapshot = self.trained_engine.snapshot()
            self.writing, self.writing_to = self.writer.submit(self.trained_engine.write, snapshot, folder), folder

    @role_method(Dispatch.ONE_TO_ALL)
    def finish_checkpoint(self) -> None:
        """Wait until the files are on disk; raises if they could not be written."""
        writing, self.writing = self.writing, None
        if writing is not None:
            with storage_errors(self.writing_to):
                writing.result()

    @role_method(Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        if self.trained_engine is not None:
            self.trained_engine.load(Path(folder))
            self.on_new_weights()
        saved = self._rng_file(folder)
        if saved.exists():  # with more ranks than at saving, the new ones keep the state that they were seeded with
            self.rng.load(saved)

    def _rng_file(self, folder: str) -> Path:
        return Path(folder) / f"rng_{self.role_name}_rank_{self.rank}.pt"


class RoleRng:
    """Python's, numpy's and torch's random state of one role on one rank, seeded from (seed, role, rank).

    Roles in one process do not depend on each other's draws. Torch has a state on the CPU and one on the accelerator.
    """

    def __init__(self, seed: int, role: str, rank: int) -> None:
        words = np.random.SeedSequence([seed, zlib.crc32(role.encode()), rank]).generate_state(3)
        outside = _random_state()
        random.seed(int(words[0]))
        np.random.seed(int(words[1]))
        torch.manual_seed(int(words[2]))
        self._state = _random_state()
        self._is_swapped_in = False
        _set_random_state(outside)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Run a block on this role's state; the state outside is as it was afterwards."""
        outside = _random_state()
        _set_random_state(self._state)
        self._is_swapped_in = True
        try:
            yield
        finally:
            self._is_swapped_in = False
            self._state = _random_state()
            _set_random_state(outside)

    def save(self, path: Path) -> None:
        torch.save(_random_state() if self._is_swapped_in else self._state, path)

    def load(self, path: Path) -> None:
        self._state = torch.load(path, weights_only=True)
        if self._is_swapped_in:
            _set_random_state(self._state)


def _random_state() -> RandomState:
    name, keys, position, has_gauss, cached = cast(tuple[str, np.ndarray, int, int, float], np.random.get_state())
    state: RandomState = {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
    }
    for name, module in _accelerators():
        state[name] = module.get_rng_state()
    return state


def _accelerators() -> Iterator[tuple[str, ModuleType]]:
    """Kind and torch's module of this process's accelerator, if it has one: cuda, npu or any other."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        yield accelerator.type, torch.get_device_module(accelerator)


def _set_random_state(state: RandomState) -> None:
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, numpy_keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(numpy_keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    for kind, module in _accelerators():
        if kind in state:
            module.set_rng_state(state[kind])
