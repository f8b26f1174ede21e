"""The estimate of memory, against the bytes of real engines."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from omegaconf import OmegaConf

from paceline.config import ModelConfig, OptimConfig, PPOConfig
from paceline.config.load import load_config
from paceline.engine.backends.local_engine import LocalEngine
from paceline.engine.engine_interface import EngineSpec
from paceline.engine.hf_models import ModelKind
from paceline.engine.logprobs import CHUNK_ELEMENTS
from paceline.engine.lora import LoraSpec
from paceline.protocol import DataProto
from paceline.speedups import fast_linear, lean_forward
from paceline.speedups.lean_forward import LeanForward
from paceline.trainer.plan import dry_run_text
from paceline.trainer.ppo import model_size
from paceline.trainer.ppo.memory import GIB, RoleMemory, memory_warning, plan_memory
from paceline.trainer.ppo.model_size import CHUNK_LOGITS, Head, ModelSize, available_memory, read_model_size
from tests.tiny import make_tiny_model

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, hidden=64, layers=3, tie_word_embeddings=request.param)
    return ModelConfig(path=str(folder))


def plan_of(model: ModelConfig, *overrides: str) -> PPOConfig:
    settings = [f"actor_rollout_ref.model.path={model.path}", "trainer.device=cpu", *overrides]
    return load_config(OmegaConf.from_dotlist(settings))


def trained_engine(model: ModelConfig, kind: ModelKind) -> tuple[LocalEngine, int]:
    """An engine after one step, and the bytes that its forward pass kept for the backward pass."""
    engine = LocalEngine(EngineSpec(model=model, kind=kind, optim=OptimConfig()))
    engine.initialize()
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def loss(output: dict[str, torch.Tensor], batch: object) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return sum(value.sum() for value in output.values()), {}  # type: ignore[return-value]

    ids = torch.randint(3, 90, (4, 64))
    data = DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(64).expand(4, 64),
            "responses": ids[:, 32:],
            "response_mask": torch.ones_like(ids[:, 32:]),
        }
    )
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.train_batch(data, loss, micro_batch_size=4)
    weights = {parameter.untyped_storage().data_ptr() for parameter in engine.model.parameters()}
    return engine, sum(size for pointer, size in kept.items() if pointer not in weights)


def test_weights_and_moments_are_those_of_real_engines(model: ModelConfig) -> None:
    roles = {role.role: role for role in plan_memory(plan_of(model, "critic.strategy=local")).roles}
    for role, kind, head in (("actor", "causal_lm", "language"), ("critic", "value", "value")):
        engine, kept = trained_engine(model, kind)  # type: ignore[arg-type]
        weights = sum(parameter.nbytes for parameter in engine.model.parameters())
        moments = sum(
            state[name].nbytes for state in engine.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")
        )
        assert roles[role].stays == {"weights": weights, "AdamW": moments}
        assert roles[role].while_working["gradients"] == weights
        size = read_model_size(model)
        assert size is not None
        estimate = size.with_head(head).activation_bytes(4 * 64, checkpointing=False, head="value")  # type: ignore[arg-type]
        assert kept / 1.5 < estimate < 1.5 * kept


@pytest.mark.parametrize(("kind", "head"), [("value", "value"), ("sequence_classification", "score")])
def test_heads_are_counted(model: ModelConfig, kind: ModelKind, head: Head) -> None:
    engine = LocalEngine(EngineSpec(model=model, kind=kind, optim=OptimConfig()))
    engine.initialize()
    size = read_model_size(model)
    assert size is not None
    assert size.with_head(head).parameters() == sum(parameter.numel() for parameter in engine.model.parameters())


def test_shards_get_whole_rows_and_the_first_the_most() -> None:
    size = ModelSize({"a.0.weight": (5, 7), "a.1.weight": (2, 7), "norm": (3,)}, {})
    assert size.parameters() == 35 + 14 + 3
    assert size.parameters(shards=2) == 21 + 7 + 2
    assert size.gathered() == 3 + 2 * 35


def test_sharded_actors_have_a_copy_to_sample_from_and_local_ones_have_not(model: ModelConfig) -> None:
    local = plan_memory(plan_of(model, "actor_rollout_ref.actor.strategy=local"))
    sharded = plan_memory(plan_of(model, "trainer.n_gpus_per_node=2"))
    whole = next(role for role in local.roles if role.role == "actor").stays["weights"]
    assert next(role for role in local.roles if role.role == "rollout").stays == {}
    assert next(role for role in sharded.roles if role.role == "rollout").stays == {"weights": whole}
    assert next(role for role in sharded.roles if role.role == "actor").stays["weights"] < 0.6 * whole


def test_tensor_parallelism_divides_weights_and_data_parallel_ranks_of_megatron_hold_copies(model: ModelConfig) -> None:
    def actor(strategy: str, *settings: str) -> RoleMemory:
        overrides = [f"actor_rollout_ref.actor.strategy={strategy}", "trainer.n_gpus_per_node=4", *settings]
        return next(role for role in plan_memory(plan_of(model, *overrides)).roles if role.role == "actor")

    two = "actor_rollout_ref.actor.{}.tensor_model_parallel_size=2"
    megatron, titan = (actor(name, two.format(name)) for name in ("megatron", "torchtitan"))
    sharded, size = actor("fsdp2"), read_model_size(model)
    assert size is not None
    assert megatron.stays["weights"] == 4 * size.parameters(shards=2)
    assert titan.stays == sharded.stays
    assert "gathered layers" not in megatron.while_working
    assert titan.while_working["gathered layers"] == sharded.while_working["gathered layers"] // 2


def test_the_cache_holds_full_length_responses_of_as_many_as_are_decoded_together(model: ModelConfig) -> None:
    lengths = ["data.max_prompt_length=10", "data.max_response_length=20", "data.train_batch_size=8"]
    plan = plan_memory(plan_of(model, *lengths, f"{ROLLOUT}.max_num_seqs=4"))
    cache = next(role for role in plan.roles if role.role == "rollout").while_working["keys and values"]
    # keys and values, 4 responses of 30 tokens, 3 layers, 2 heads of 16, 4 bytes
    assert cache == 2 * 4 * 30 * 3 * 2 * 16 * 4


def test_on_a_cpu_the_native_rollout_packs_large_layers(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many numbers as it really packs."""
    monkeypatch.setattr(model_size, "PACKED_ELEMENTS", 64 * 64)
    monkeypatch.setattr(fast_linear, "PACKED_ELEMENTS", 64 * 64)
    engine, _ = trained_engine(model, "causal_lm")
    with mock.patch.object(torch.ops.mkldnn, "_reorder_linear_weight", wraps=lambda weight, rows: weight) as packing:
        LeanForward(engine.module)
    packed = sum(4 * call.args[0].numel() for call in packing.call_args_list)

    def working(*settings: str) -> dict[str, int]:
        return next(
            role for role in plan_memory(plan_of(model, *settings)).roles if role.role == "rollout"
        ).while_working

    assert working()["packed weights"] == packed > 0
    lora = (
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.model.target_modules=[gate_proj,up_proj,down_proj]",
    )
    shared = working(*lora, "actor_rollout_ref.actor.strategy=local")["packed weights"]
    copied = working(*lora, "trainer.n_gpus_per_node=2")["packed weights"]
    assert 0 < shared < copied == packed
    size = read_model_size(model)
    assert size is not None
    windows = {"sliding_window": 8, "use_sliding_window": True}
    assert ModelSize(size.shapes, {**size.config, **windows}).packed_bytes([]) == 0
    assert ModelSize(size.shapes, {}).packed_bytes([]) == 0
    for other in ("trainer.device=cuda", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.dtype=bfloat16"):
        assert "packed weights" not in working(other)


def test_all_devices_of_a_cpu_node_share_its_memory_and_gpus_do_not(model: ModelConfig) -> None:
    overrides = ["trainer.n_gpus_per_node=4", "trainer.placement.name=split", "reward_model.enable=True"]
    overrides += ["trainer.save_freq=-1"]  # a checkpoint is copied to main memory, which only a CPU device has
    overrides += [f"reward_model.model.path={model.path}", "actor_rollout_ref.actor.use_kl_loss=True"]
    cpu = plan_memory(plan_of(model, *overrides))
    per_device = [cpu.per_device(pool) for pool in ("actor_rollout_ref_pool", "critic_pool")]
    assert cpu.largest() == 2 * sum(per_device)
    assert plan_memory(plan_of(model, *overrides, "trainer.device=cuda")).largest() == max(per_device)
    nodes = plan_memory(plan_of(model, *overrides, "trainer.nnodes=2", "trainer.n_gpus_per_node=1"))
    assert nodes.largest() == max(nodes.per_device(pool) for pool in ("actor_rollout_ref_pool", "critic_pool"))
    assert {role.role for role in cpu.roles} == {"actor", "rollout", "reference", "critic", "reward model"}


def test_a_warning_says_what_is_needed_what_is_there_and_what_to_set(model: ModelConfig) -> None:
    plan = plan_memory(plan_of(model, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=256"))
    assert memory_warning(plan, None) is None
    assert memory_warning(plan, plan.largest()) is None
    warning = memory_warning(plan, GIB // 2)
    assert warning is not None
    assert "there are 0.50 GiB. Lower ppo_micro_batch_size_per_gpu" in warning


def test_a_dry_run_shows_the_estimate_and_what_is_not_known(model: ModelConfig) -> None:
    text = dry_run_text(plan_of(model, "critic.model.path=org/name"))
    assert "actor                   weights 0.00" in text
    assert "not known: critic (org/name) has no safetensors here" in text
    assert "memory of this machine" in text


def test_this_machine_has_memory_and_no_device_that_it_has_not() -> None:
    assert (available_memory("cpu") or 0) > GIB // 4
    if not torch.cuda.is_available():
        assert available_memory("cuda") is None


def test_the_sizes_are_those_of_the_engines() -> None:
    assert CHUNK_LOGITS == CHUNK_ELEMENTS
    assert model_size.PACKED_ELEMENTS == fast_linear.PACKED_ELEMENTS
    assert {f"{name}forcausallm" for name in model_size.PACKED_MODELS} == {name.lower() for name in lean_forward.PLAIN}


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_adapters_alone_have_gradients_and_moments(model: ModelConfig, targets: str | list[str]) -> None:
    lora = LoraSpec(4, 16, targets)
    engine = LocalEngine(EngineSpec(model=model, kind="causal_lm", optim=OptimConfig(), lora=lora))
    engine.initialize()
    trained = sum(group.numel() for group in engine.model.parameters() if group.requires_grad)
    names = targets if isinstance(targets, str) else f"[{','.join(targets)}]"
    keys = ("actor_rollout_ref.model.lora_rank=4", f"actor_rollout_ref.model.target_modules={names}")
    plan = plan_memory(plan_of(model, *keys, "actor_rollout_ref.actor.strategy=local"))
    actor = next(role for role in plan.roles if role.role == "actor")
    assert actor.stays["AdamW"] == 2 * 4 * trained
    assert actor.while_working["gradients"] == 4 * trained


def test_a_rollout_on_another_pool_has_its_weights_there(model: ModelConfig) -> None:
    apart = ("trainer.n_gpus_per_node=2", "trainer.placement.rollout_devices=1")
    plan = plan_memory(plan_of(model, *apart, "actor_rollout_ref.actor.strategy=local"))
    rollout = next(role for role in plan.roles if role.role == "rollout")
    assert rollout.pool == "rollout_pool"
    assert rollout.stays["weights"] == read_model_size(model).parameters() * 4


def test_a_model_whose_path_no_file_can_have_has_no_size() -> None:
    assert read_model_size(ModelConfig(path="x" * 5000)) is None
