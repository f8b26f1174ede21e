"""What every training backend must do, as one program that each of its ranks runs.

`run_backend` starts the ranks, each calls `run_scenarios` and leaves what it saw in a file. The tests compare these
observations with the `local` backend's and with plain transformers. One start for all scenarios: importing torch and
transformers takes longer than everything else.
"""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel

from paceline.config import ModelConfig, OptimConfig, TrainedModelConfig
from paceline.engine import Engine, EngineSpec, LossFn, get_engine, logprobs
from paceline.engine.backends.own_model import OwnModelEngine
from paceline.engine.hf_models import ModelKind
from paceline.engine.lora import LoraSpec
from paceline.engine.training_state import full_tensor, in_main_memory
from paceline.errors import CheckpointError, ConfigError, NonFiniteError
from paceline.protocol import DataProto
from paceline.speedups import fast_linear
from paceline.trainer.ppo.dealing import even_sizes
from tests.device import DEVICE

NUM_ROWS = 6
PROMPT_WIDTH = 8
RESPONSE_WIDTH = 6
TEMPERATURE = 0.7
PADDING_ROW = 3
MAX_GRAD_NORM = 1e-3
HEAD_SEED = 7
STEPS = 5
STEPS_BEFORE_SAVE = 3

# (valid prompt tokens, valid response tokens) of each row. No row fills its width, so every micro-batch can be cropped.
LENGTHS = [(3, 4), (6, 5), (1, 2), (5, 3), (4, 5), (2, 1)]


@dataclass(frozen=True)
class Backend:
    """A strategy, the number of ranks to try it with, and what it can do."""

    strategy: str
    num_ranks: int
    tensor_parallel: int = 1
    model_type: str = "qwen2"
    stages: int = 1
    packs: bool = True
    ulysses: int = 1
    """Ranks that share each sequence."""

    def __str__(self) -> str:
        parallel = f"-tp{self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        parallel += f"-pp{self.stages}" if self.stages > 1 else ""
        parallel += f"-ulysses{self.ulysses}" if self.ulysses > 1 else ""
        return f"{self.strategy}-{self.num_ranks}{parallel}-{self.model_type}"


@dataclass(frozen=True)
class Models:
    """Folders of models of one type: causal LMs with tied and with separate embeddings, and a sequence classifier."""

    tied: Path
    untied: Path
    classifier: Path


def make_mini_batch(seed: int = 0) -> DataProto:
    """A whole mini-batch with ragged rows, of which one is padding that dispatch added."""
    generator = torch.Generator().manual_seed(seed)
    width = PROMPT_WIDTH + RESPONSE_WIDTH
    attention_mask = torch.zeros(NUM_ROWS, width, dtype=torch.int64)
    for row, (num_prompt, num_response) in enumerate(LENGTHS):
        attention_mask[row, PROMPT_WIDTH - num_prompt : PROMPT_WIDTH + num_response] = 1
    response_mask = attention_mask[:, PROMPT_WIDTH:].clone()
    response_mask[PADDING_ROW] = 0
    # Id 0 is the padding token; it is a token like others where the attention mask says so.
    input_ids = torch.randint(0, 99, (NUM_ROWS, width), generator=generator) * attention_mask
    return DataProto.from_dict(
        {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "advantages": torch.randn(NUM_ROWS, RESPONSE_WIDTH, generator=generator) * response_mask,
            "returns": torch.randn(NUM_ROWS, RESPONSE_WIDTH, generator=generator) * response_mask,
            "targets": torch.randn(NUM_ROWS, generator=generator),
        }
    )


def policy_loss(output: dict[str, Tensor], micro_batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy gradient with an entropy bonus, divided by the number of response tokens of the whole mini-batch."""
    mask = micro_batch["response_mask"]
    gain = micro_batch["advantages"] * output["log_probs"] + 0.1 * output["entropy"]
    return -(gain * mask).sum() / num_tokens(), {"tokens": mask.sum(), "entropy": output["entropy"].sum()}


def value_loss(output: dict[str, Tensor], micro_batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    mask = micro_batch["response_mask"]
    return ((output["values"] - micro_batch["returns"]) ** 2 * mask).sum() / num_tokens(), {"tokens": mask.sum()}


def score_loss(output: dict[str, Tensor], micro_batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    return ((output["scores"] - micro_batch["targets"]) ** 2).sum() / NUM_ROWS, {}


def num_tokens() -> int:
    return sum(num_response for row, (_, num_response) in enumerate(LENGTHS) if row != PADDING_ROW)


LOSSES: dict[ModelKind, LossFn] = {"causal_lm": policy_loss, "value": value_loss, "sequence_classification": score_loss}

OPTIM = OptimConfig(lr=1e-3, lr_scheduler_type="linear", lr_warmup_steps=2, min_lr_ratio=0.1)


@dataclass(frozen=True)
class Variant:
    """A way to make the same update: settings of the model, micro-batches, and how it is computed."""

    sizes: dict[str, int]
    model: ModelConfig = field(default_factory=ModelConfig)
    num_logits: int = logprobs.CHUNK_ELEMENTS
    """Logits that exist at a time."""
    by_onednn: bool = False
    """All linear layers, however small; where torch has none of it, as without."""

    @contextmanager
    def computing(self) -> Iterator[None]:
        with ExitStack() as changes:
            changes.enter_context(patch.object(logprobs, "CHUNK_ELEMENTS", self.num_logits))
            if self.by_onednn:
                changes.enter_context(patch.object(fast_linear, "SMALLEST_PRODUCT", 1))
                changes.enter_context(
                    patch.object(fast_linear, "mkl_keeps_to_avx2", torch.backends.mkldnn.is_available)
                )
            yield


PACKED = TrainedModelConfig(use_remove_padding=True)
RECOMPUTED = replace(PACKED, enable_gradient_checkpointing=True)
VARIANTS = {
    "rows of 1": Variant({"micro_batch_size": 1}),
    "all rows": Variant({"micro_batch_size": NUM_ROWS}),
    "tokens": Variant({"max_tokens": 22}),
    "packed": Variant({"micro_batch_size": 2}, PACKED),
    # With 2 ranks, the rows of the first would make one micro-batch less than those of the second.
    "packed tokens": Variant({"max_tokens": 10}, PACKED),
    "packed and recomputed": Variant({"max_tokens": 16}, RECOMPUTED),
    "logits in chunks": Variant({"micro_batch_size": NUM_ROWS}, num_logits=300),
    "packed logits in chunks": Variant({"micro_batch_size": NUM_ROWS}, PACKED, num_logits=300),
    "by oneDNN": Variant({"micro_batch_size": 2}, by_onednn=True),
    "packed and recomputed by oneDNN": Variant({"max_tokens": 16}, RECOMPUTED, num_logits=300, by_onednn=True),
}

LORA = LoraSpec(rank=3, alpha=6)

# The gradient itself is looked at, so it is not clipped.
SPEC = EngineSpec(
    model=ModelConfig(), kind="causal_lm", optim=OPTIM, grad_clip=1e6, total_optimizer_steps=STEPS, device=DEVICE
)


class Rank:
    """One rank of a backend under test: its rows, its engines, what it has seen."""

    def __init__(self, backend: Backend, models: Models, rank: int) -> None:
        self.backend = backend
        self.models = models
        self.rank = rank
        self.seen: dict[str, Any] = {}

    def engine(self, spec: EngineSpec = SPEC, folder: Path | None = None) -> Engine:
        # Another seed on each rank: a new head must be rank 0's all the same.
        torch.manual_seed(HEAD_SEED + self.rank)
        model = replace(spec.model, path=str(folder or self.models.tied))
        spec = replace(
            spec,
            model=model,
            tensor_model_parallel_size=self.backend.tensor_parallel,
            pipeline_model_parallel_size=self.backend.stages,
            ulysses_sequence_parallel_size=self.backend.ulysses,
        )
        engine = get_engine(self.backend.strategy)(spec)
        engine.initialize()
        return engine

    def shard(self, data: DataProto, sizes: list[int] | None = None) -> DataProto:
        sizes = sizes or even_sizes(len(data), self.backend.num_ranks)
        start = sum(sizes[: self.rank])
        return data[start : start + sizes[self.rank]]

    def train(self, engine: Engine, *, steps: int = STEPS, first: int = 0, **sizes: int) -> list[dict]:
        loss_fn = LOSSES[engine.spec.kind]
        sizes = sizes or {"micro_batch_size": 2}
        return [
            engine.train_batch(self.shard(make_mini_batch(seed)), loss_fn, temperature=TEMPERATURE, **sizes)
            for seed in range(first, first + steps)
        ]


def full_weights(engine: Engine) -> dict[str, Tensor]:
    return in_main_memory(engine.named_full_weights(), keep=True)


def record_gradients(engine: Engine) -> list[dict[str, Tensor]]:
    """A list that gets the whole gradients of each optimizer step from now on."""
    gradients: list[dict[str, Tensor]] = []

    def record(*_: Any) -> None:
        if isinstance(engine, OwnModelEngine):
            gradients.append(in_main_memory(engine.named_full(lambda parameter: parameter.grad), keep=True))
            return
        # FSDP1 holds pieces of gradients; `whole` gathers them, and without FSDP1 does nothing.
        is_fsdp1 = isinstance(engine.root, FullyShardedDataParallel)
        whole = FullyShardedDataParallel.summon_full_params(engine.root, with_grads=True) if is_fsdp1 else nullcontext()
        with whole:
            found = (
                (name.replace("_fsdp_wrapped_module.", ""), full_tensor(parameter.grad))
                for name, parameter in engine.model.named_parameters()
                if parameter.requires_grad
            )
            gradients.append(in_main_memory(found, keep=True))

    engine.optimizer.register_step_pre_hook(record)
    return gradients


def infer(rank: Rank) -> None:
    """Every kind of model, at two micro-batch sizes; inputs and random state must stay as they are."""
    data = rank.shard(make_mini_batch())
    before = {name: column.clone() for name, column in data.batch.items()}
    folders = {
        "causal_lm": rank.models.tied,
        "value": rank.models.tied,
        "sequence_classification": rank.models.classifier,
    }
    for kind, folder in folders.items():
        engine = rank.engine(replace(SPEC, kind=kind, optim=None), folder)
        state = random_state()
        for size in (1, NUM_ROWS):
            rank.seen[f"infer/{kind}/{size}"] = engine.infer_batch(data, micro_batch_size=size, temperature=TEMPERATURE)
        if kind == "causal_lm":
            asked = {"sum_pi_squared": True, "temperature": TEMPERATURE}
            rank.seen["infer/sum_pi_squared"] = engine.infer_batch(data, micro_batch_size=2, **asked)
        rank.seen["device"] = next(engine.model.parameters()).device.type
        rank.seen[f"infer/{kind}/random_state_kept"] = torch.equal(state, random_state())
    rank.seen["infer/sum_over_ranks"] = engine.sum_over_ranks(rank.rank + 0.5)
    rank.seen["infer/inputs_kept"] = all(torch.equal(before[name], data.batch[name]) for name in before)


def weights_out(rank: Rank) -> None:
    for name in ("tied", "untied"):
        engine = rank.engine(folder=getattr(rank.models, name))
        # What a forward pass gathered must be given back, or weights and steps would see it.
        engine.infer_batch(rank.shard(make_mini_batch()), micro_batch_size=2)
        rank.seen[f"weights/{name}"] = full_weights(engine)
        rank.train(engine, steps=1)
        rank.seen[f"weights/{name}/trained"] = full_weights(engine)


def train(rank: Rank) -> None:
    """Five steps of each kind: metrics, the gradients of the steps, the weights."""
    folders = {
        "causal_lm": rank.models.tied,
        "value": rank.models.untied,
        "sequence_classification": rank.models.classifier,
    }
    for kind, folder in folders.items():
        engine = rank.engine(replace(SPEC, kind=kind), folder)
        rank.seen[f"train/{kind}/infer"] = engine.infer_batch(rank.shard(make_mini_batch()), micro_batch_size=2)
        gradients = record_gradients(engine)
        state = random_state()
        rank.seen[f"train/{kind}/metrics"] = rank.train(engine)
        rank.seen[f"train/{kind}/random_state_kept"] = torch.equal(state, random_state())
        rank.seen[f"train/{kind}/gradients"] = gradients[0]
        rank.seen[f"train/{kind}/weights"] = full_weights(engine)


def train_in_other_ways(rank: Rank) -> None:
    for name, variant in VARIANTS.items():
        if variant.model.use_remove_padding and not rank.backend.packs:
            continue
        with variant.computing():
            engine = rank.engine(replace(SPEC, model=variant.model))
            data = rank.shard(make_mini_batch())
            rank.seen[f"variant/{name}/infer"] = engine.infer_batch(data, temperature=TEMPERATURE, **variant.sizes)
            gradients = record_gradients(engine)
            rank.seen[f"variant/{name}/metrics"] = rank.train(engine, steps=2, **variant.sizes)
            rank.seen[f"variant/{name}/gradients"] = gradients[0]


def pack_other_models(rank: Rank) -> None:
    if not rank.backend.packs:
        rank.seen["packed/refused"] = failure(ConfigError, lambda: rank.engine(replace(SPEC, model=PACKED)))
        return
    for kind, folder in {"value": rank.models.untied, "sequence_classification": rank.models.classifier}.items():
        engine = rank.engine(replace(SPEC, kind=kind, model=PACKED), folder)
        gradients = record_gradients(engine)
        rank.seen[f"packed/{kind}/infer"] = engine.infer_batch(rank.shard(make_mini_batch()), max_tokens=12)
        rank.train(engine, steps=1, max_tokens=12)
        rank.seen[f"packed/{kind}/gradients"] = gradients[0]


def train_with_uneven_shards(rank: Rank) -> None:
    """The first rank has all rows but one for each other rank, so the others run out of micro-batches."""
    others = rank.backend.num_ranks - 1
    sizes = [NUM_ROWS - others] + [1] * others
    data = rank.shard(make_mini_batch(), sizes)
    for name, model, limit in (("padded", ModelConfig(), "micro_batch_size"), ("packed", PACKED, "max_tokens")):
        if model.use_remove_padding and not rank.backend.packs:
            continue
        engine = rank.engine(replace(SPEC, model=model))
        gradients = record_gradients(engine)
        metrics = engine.train_batch(data, policy_loss, temperature=TEMPERATURE, **{limit: 1})
        rank.seen[f"uneven/{name}/metrics"] = metrics
        rank.seen[f"uneven/{name}/gradients"] = gradients[0]
        rank.seen[f"uneven/{name}/infer"] = engine.infer_batch(data, **{limit: 1})["log_probs"].shape


def train_with_gradient_checkpointing(rank: Rank) -> None:
    spec = replace(SPEC, model=TrainedModelConfig(enable_gradient_checkpointing=True))
    engine = rank.engine(spec)
    rank.seen["checkpointing/active"] = engine.model.is_gradient_checkpointing
    gradients = record_gradients(engine)
    rank.train(engine, steps=1)
    rank.seen["checkpointing/gradients"] = gradients[0]


def clip(rank: Rank) -> None:
    engine = rank.engine(replace(SPEC, grad_clip=MAX_GRAD_NORM))
    gradients = record_gradients(engine)
    rank.seen["clip/metrics"] = rank.train(engine, steps=1)[0]
    rank.seen["clip/gradients"] = gradients[0]


def stop_before_non_finite_steps(rank: Rank) -> None:
    """A NaN on the last rank only must stop every rank, and leave an engine that trains on as if nothing had been."""
    last = rank.rank == rank.backend.num_ranks - 1
    data = rank.shard(make_mini_batch())

    def nan_loss(output: dict[str, Tensor], micro_batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        return output["log_probs"].sum() * (float("nan") if last else 1.0), {}

    def nan_gradient(output: dict[str, Tensor], micro_batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        # The square root of 0 is 0, with an infinite slope.
        return (0.0 * output["log_probs"].sum()).sqrt() if last else output["log_probs"].sum(), {}

    engine = rank.engine()
    before = full_weights(engine)
    for name, loss_fn in {"loss": nan_loss, "gradient": nan_gradient}.items():
        rank.seen[f"nonfinite/{name}"] = failure(
            NonFiniteError, lambda loss_fn=loss_fn: engine.train_batch(data, loss_fn, micro_batch_size=2)
        )
    rank.seen["nonfinite/weights_kept"] = equal(before, full_weights(engine))
    rank.seen["nonfinite/metrics"] = rank.train(engine)


def save_and_load(rank: Rank, folder: Path, reference: Path) -> None:
    """Interrupted training must equal uninterrupted training bit for bit; another backend's state must load too."""
    engine = rank.engine()
    engine.save(folder / "fresh")
    rank.train(engine, steps=STEPS_BEFORE_SAVE)
    engine.save(folder / "saved")
    snapshot = engine.snapshot()
    rank.seen["saved/at_save"] = full_weights(engine)
    with ThreadPoolExecutor(max_workers=1) as thread:
        writing = thread.submit(engine.write, snapshot, folder / "written_beside_training")
        rank.train(engine, steps=STEPS - STEPS_BEFORE_SAVE, first=STEPS_BEFORE_SAVE)
        writing.result()
    engine.write(snapshot, folder / "written_after_training")
    rank.seen["saved/uninterrupted"] = full_weights(engine)

    def resume(source: Path, first: int) -> dict[str, Tensor]:
        other = rank.engine()
        rank.train(other, steps=1, first=9)  # Leaves nothing of its own behind.
        other.load(source)
        rank.train(other, steps=STEPS - first, first=first)
        return full_weights(other)

    rank.seen["saved/resumed"] = resume(folder / "saved", STEPS_BEFORE_SAVE)
    rank.seen["saved/resumed_from_fresh"] = resume(folder / "fresh", 0)
    rank.seen["saved/resumed_from_reference"] = resume(reference / "saved", STEPS_BEFORE_SAVE)
    state = random_state()
    # What the forward pass gathered must not shadow what is loaded.
    engine.infer_batch(rank.shard(make_mini_batch()), micro_batch_size=2)
    engine.load(folder / "saved")
    rank.seen["saved/random_state_kept"] = torch.equal(state, random_state())
    rank.seen["saved/loaded"] = full_weights(engine)
    rank.seen["saved/missing"] = failure(CheckpointError, lambda: engine.load(folder / "nowhere"))


def train_adapters(rank: Rank, folder: Path, reference: Path) -> None:
    """Only the adapters train; with them off the model is the base; a checkpoint holds them alone."""
    spec = replace(SPEC, lora=LORA)
    strategy = get_engine(rank.backend.strategy)
    rank.seen["lora/supported"] = strategy.takes_lora
    if not strategy.takes_lora:
        rank.seen["lora/refused"] = failure(ConfigError, lambda: rank.engine(spec))
        return
    data = rank.shard(make_mini_batch())
    engine = rank.engine(spec)
    rank.seen["lora/start"] = full_weights(engine)
    gradients = record_gradients(engine)
    metrics = rank.train(engine, steps=STEPS_BEFORE_SAVE)
    engine.save(folder / "lora")
    rank.seen["lora/at_save"] = full_weights(engine)
    metrics += rank.train(engine, steps=STEPS - STEPS_BEFORE_SAVE, first=STEPS_BEFORE_SAVE)
    rank.seen["lora/metrics"], rank.seen["lora/gradients"] = metrics, gradients[1]
    rank.seen["lora/weights"] = full_weights(engine)
    rank.seen["lora/infer"] = engine.infer_batch(data, micro_batch_size=2, temperature=TEMPERATURE)
    with engine.without_adapter():
        rank.seen["lora/reference"] = engine.infer_batch(data, micro_batch_size=2, temperature=TEMPERATURE)
    recomputed = replace(spec, model=replace(PACKED, enable_gradient_checkpointing=True))
    rank.seen["lora/recomputed"] = rank.train(rank.engine(recomputed), steps=2, max_tokens=16)
    for name, source in {"resumed": folder / "lora", "resumed_from_reference": reference / "lora"}.items():
        other = rank.engine(spec)
        rank.train(other, steps=1, first=9)  # Leaves nothing of its own behind.
        other.load(source)
        rank.seen[f"lora/{name}/loaded"] = full_weights(other)
        rank.train(other, steps=STEPS - STEPS_BEFORE_SAVE, first=STEPS_BEFORE_SAVE)
        rank.seen[f"lora/{name}"] = full_weights(other)


def train_in_bfloat16(rank: Rank) -> None:
    """Passes in bfloat16, weights, gradients and moments in float32."""
    models = {
        "padded": TrainedModelConfig(compute_dtype="bfloat16"),
        "packed and recomputed": replace(PACKED, compute_dtype="bfloat16", enable_gradient_checkpointing=True),
    }
    if not get_engine(rank.backend.strategy).takes_bfloat16:
        spec = replace(SPEC, model=models["padded"])
        rank.seen["bfloat16/refused"] = failure(ConfigError, lambda: rank.engine(spec))
        return
    for name, model in models.items():
        engine = rank.engine(replace(SPEC, model=model))
        rank.seen[f"bfloat16/{name}/infer"] = engine.infer_batch(
            rank.shard(make_mini_batch()), micro_batch_size=2, temperature=TEMPERATURE
        )
        gradients = record_gradients(engine)
        rank.seen[f"bfloat16/{name}/metrics"] = rank.train(engine, steps=2)
        rank.seen[f"bfloat16/{name}/gradients"] = gradients[0]
        moments = [value for state in engine.optimizer.state.values() for value in state.values()]
        rank.seen[f"bfloat16/{name}/dtypes"] = {tensor.dtype for tensor in (*engine.model.parameters(), *moments)}
    slow = rank.engine(replace(SPEC, model=models["padded"], optim=OptimConfig(lr=1e-6)))
    rank.seen["bfloat16/before"] = full_weights(slow)
    rank.train(slow, steps=2)
    rank.seen["bfloat16/after"] = full_weights(slow)
    value = replace(SPEC, kind="value", model=models["padded"])
    rank.seen["bfloat16/value/metrics"] = rank.train(rank.engine(value, rank.models.untied), steps=2)


def offload(rank: Rank, folder: Path) -> None:
    """Training, saving and loading while nothing is on the device between calls."""
    spec = replace(SPEC, param_offload=True, optimizer_offload=True)
    if not get_engine(rank.backend.strategy).takes_offload:
        rank.seen["offloaded/refused"] = failure(ConfigError, lambda: rank.engine(spec))
        return
    before = memory_on_device()
    engine = rank.engine(spec)
    rank.train(engine, steps=STEPS_BEFORE_SAVE)
    rank.seen["offloaded/bytes_left"] = memory_on_device() - before
    rank.seen["offloaded/bytes_of_weights"] = sum(weight.nbytes for weight in full_weights(engine).values())
    engine.save(folder / "offloaded")
    other = rank.engine(spec)
    other.load(folder / "offloaded")
    rank.train(other, steps=STEPS - STEPS_BEFORE_SAVE, first=STEPS_BEFORE_SAVE)
    rank.seen["offloaded/weights"] = full_weights(other)


def move(rank: Rank) -> None:
    """To main memory and back; without an accelerator both are one place."""
    engine = rank.engine()
    rank.train(engine, steps=1)
    engine.to("cpu")
    engine.to(DEVICE)
    rank.train(engine, steps=STEPS - 1, first=1)
    rank.seen["moved/weights"] = full_weights(engine)
    rank.seen["moved/module_is_shared"] = engine.module is not None


def failure(expected: type[Exception], call: Callable[[], Any]) -> str:
    """The message of the exception that `call` raises; empty if it raises none."""
    try:
        call()
    except expected as error:
        return str(error)
    return ""


def memory_on_device() -> int:
    """Bytes of this process's tensors on its accelerator; 0 without one."""
    gc.collect()
    return 0 if DEVICE == "cpu" else torch.accelerator.memory_allocated()


def random_state() -> Tensor:
    """Of the CPU and, behind it, of the device."""
    states = [torch.get_rng_state()]
    if DEVICE != "cpu":
        states.append(torch.get_device_module(DEVICE).get_rng_state())
    return torch.cat(states)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def run_scenarios(backend: Backend, models: Models, folder: Path, reference: Path, rank: int) -> dict[str, Any]:
    this = Rank(backend, models, rank)
    infer(this)
    weights_out(this)
    train(this)
    train_in_other_ways(this)
    pack_other_models(this)
    train_with_uneven_shards(this)
    train_with_gradient_checkpointing(this)
    clip(this)
    stop_before_non_finite_steps(this)
    save_and_load(this, folder, reference)
    train_adapters(this, folder, reference)
    train_in_bfloat16(this)
    offload(this, folder)
    move(this)
    return this.seen


def run_backend(backend: Backend, models: Models, folder: Path, reference: Path) -> list[dict[str, Any]]:
    """What each rank saw. A single rank runs in this process."""
    folder.mkdir()
    if backend.num_ranks == 1:
        try:
            return [run_scenarios(backend, models, folder, reference, 0)]
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_run_rank, (backend, models, folder, reference, port), nprocs=backend.num_ranks)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(backend.num_ranks)]


def _run_rank(rank: int, backend: Backend, models: Models, folder: Path, reference: Path, port: int) -> None:
    torch.set_num_threads(1)
    environment = {"RANK": rank, "WORLD_SIZE": backend.num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment["LOCAL_RANK"] = rank
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.save(run_scenarios(backend, models, folder, reference, rank), folder / f"rank{rank}.pt")
    dist.destroy_process_group()
