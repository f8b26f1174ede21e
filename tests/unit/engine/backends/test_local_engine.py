"""What all engines share, on the simplest of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from paceline.config import ModelConfig, OptimConfig
from paceline.engine import Engine, EngineSpec, get_engine, register_engine
from paceline.engine.backends.local_engine import LocalEngine
from paceline.errors import CheckpointError, ConfigError
from paceline.protocol import DataProto
from tests.tiny import make_tiny_model

PROMPT_WIDTH = 4
RESPONSE_WIDTH = 4


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), hidden=16, layers=1, initializer_range=0.2)
    return EngineSpec(ModelConfig(path=str(folder)), "causal_lm", OptimConfig(lr=1e-3))


def make_engine(spec: EngineSpec) -> Engine:
    engine = LocalEngine(spec)
    engine.initialize()
    return engine


def make_batch(lengths: list[tuple[int, int]], *, spare: int = 0, seed: int = 0) -> DataProto:
    """Rows of (prompt, response) lengths, with `spare` columns of padding more than needed on either side.

    What a valid position holds depends on the seed and on nothing else.
    """
    prompt_width = PROMPT_WIDTH + spare
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 99, (len(lengths), PROMPT_WIDTH + RESPONSE_WIDTH), generator=generator)
    tokens = torch.nn.functional.pad(tokens, (spare, spare))
    attention_mask = torch.zeros_like(tokens)
    for row, (num_prompt, num_response) in enumerate(lengths):
        attention_mask[row, prompt_width - num_prompt : prompt_width + num_response] = 1
    response_mask = attention_mask[:, prompt_width:]
    advantages = torch.randn(len(lengths), RESPONSE_WIDTH, generator=generator)
    return DataProto.from_dict(
        {
            "input_ids": tokens * attention_mask,
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "advantages": torch.nn.functional.pad(advantages, (0, spare)) * response_mask,
        }
    )


def loss_fn(output: dict[str, Tensor], micro_batch: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    # A fixed denominator, as the caller's: it does not depend on what is in this micro-batch.
    loss = -(output["log_probs"] * micro_batch["advantages"]).sum() / 10.0
    return loss, {"entropy": output["entropy"].sum()}


def step(engine: Engine, data: DataProto, micro_batch_size: int) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and gradients of one step; the engine is not changed."""
    gradients: dict[str, Tensor] = {}

    def record(*_: object) -> None:
        gradients.update({name: p.grad.clone() for name, p in engine.model.named_parameters()})

    weights = {name: weight.clone() for name, weight in engine.model.state_dict().items()}
    handle = engine.optimizer.register_step_pre_hook(record)
    metrics = engine.train_batch(data, loss_fn, micro_batch_size=micro_batch_size)
    handle.remove()
    engine.model.load_state_dict(weights)
    return metrics, gradients


def assert_same_step(one: tuple[dict, dict], other: tuple[dict, dict]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-4, abs=1e-6)
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, other[1][name], atol=1e-6, rtol=1e-4)


@pytest.fixture(scope="module")
def shared_engine(spec: EngineSpec) -> Engine:
    """Not clipped, so that gradients can be compared; tests must leave its weights as they were."""
    return make_engine(replace(spec, grad_clip=1e6))


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    lengths=st.lists(st.tuples(st.integers(1, PROMPT_WIDTH), st.integers(0, RESPONSE_WIDTH)), min_size=1, max_size=5),
    micro_batch_size=st.integers(1, 6),
    spare=st.integers(0, 3),
)
def test_neither_micro_batches_nor_padding_change_a_step(
    shared_engine: Engine, lengths: list[tuple[int, int]], micro_batch_size: int, spare: int
) -> None:
    plain = step(shared_engine, make_batch(lengths), micro_batch_size=len(lengths))
    assert_same_step(step(shared_engine, make_batch(lengths, spare=spare), micro_batch_size), plain)


def test_rows_without_response_tokens_weigh_nothing(shared_engine: Engine) -> None:
    data = make_batch([(2, 3), (4, 4)])
    padding = data[[0, 1, 0]]
    padding.batch["response_mask"] = padding.batch["response_mask"] * torch.tensor([[1], [1], [0]])
    # Nothing is left to the loss's own mask: advantages of the padding row stay.
    assert_same_step(step(shared_engine, padding, 2), step(shared_engine, data, 2))


def test_outputs_have_the_full_width_and_are_zero_outside_the_response(shared_engine: Engine) -> None:
    data = make_batch([(2, 1), (3, 0)], spare=2)
    output = shared_engine.infer_batch(data, micro_batch_size=2)
    for column in output.values():
        assert column.shape == (2, RESPONSE_WIDTH + 2)
        assert torch.equal(column != 0, data.batch["response_mask"] == 1)


def test_padding_does_not_shift_absolute_positions(spec: EngineSpec, tmp_path: Path) -> None:
    """Rotary embeddings, which see distances alone, could not tell."""
    config = GPT2Config(vocab_size=99, n_positions=32, n_embd=16, n_layer=1, n_head=2, initializer_range=0.5)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    engine = make_engine(replace(spec, model=ModelConfig(path=str(tmp_path)), optim=None))
    data = make_batch([(1, 3), (4, 3)], spare=2)
    together = engine.infer_batch(data, micro_batch_size=2)["log_probs"]
    alone = engine.infer_batch(data, micro_batch_size=1)["log_probs"]
    torch.testing.assert_close(together, alone)


def test_a_model_is_shared_with_the_rollout_in_eval_mode_without_gradients(spec: EngineSpec) -> None:
    engine = make_engine(spec)
    engine.train_batch(make_batch([(2, 3)]), loss_fn, micro_batch_size=1)
    assert engine.module is engine.model
    assert not engine.module.training
    assert all(parameter.grad is None for parameter in engine.module.parameters())


def test_an_engine_without_optimizer_does_not_train(spec: EngineSpec) -> None:
    engine = make_engine(replace(spec, optim=None))
    with pytest.raises(RuntimeError, match="no optimizer"):
        engine.train_batch(make_batch([(2, 3)]), loss_fn, micro_batch_size=1)


def test_training_on_several_ranks_is_refused_but_not_inference(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="set strategy=fsdp2"):
        make_engine(spec)
    make_engine(replace(spec, optim=None))


def test_a_schedule_without_length_fails_before_the_model_is_read(spec: EngineSpec) -> None:
    optim = OptimConfig(lr_scheduler_type="cosine")
    with pytest.raises(ConfigError, match="total_training_steps"):
        make_engine(replace(spec, optim=optim, model=ModelConfig(path="/nowhere")))


def test_a_resumed_run_takes_its_hyperparameters_from_its_own_configuration(spec: EngineSpec, tmp_path: Path) -> None:
    data = make_batch([(2, 3)])
    engine = make_engine(spec)
    engine.train_batch(data, loss_fn, micro_batch_size=1)
    engine.save(tmp_path)
    other = make_engine(replace(spec, optim=OptimConfig(lr=5e-4, weight_decay=0.3)))
    other.load(tmp_path)
    assert other.train_batch(data, loss_fn, micro_batch_size=1)["lr"] == 5e-4
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.3
    assert other.optimizer.state[next(other.model.parameters())]["step"] == 2


def test_an_engine_that_does_not_train_loads_weights_alone(spec: EngineSpec, tmp_path: Path) -> None:
    engine = make_engine(spec)
    engine.train_batch(make_batch([(2, 3)]), loss_fn, micro_batch_size=1)
    engine.save(tmp_path)
    other = make_engine(replace(spec, optim=None))
    other.load(tmp_path)
    weights = dict(engine.named_full_weights())
    assert all(torch.equal(weight, weights[name]) for name, weight in other.named_full_weights())


def test_weights_without_optimizer_are_no_checkpoint_to_train_on(spec: EngineSpec, tmp_path: Path) -> None:
    make_engine(replace(spec, optim=None)).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"no optimizer.pt"):
        make_engine(spec).load(tmp_path)


def test_another_models_optimizer_is_refused(spec: EngineSpec, tmp_path: Path) -> None:
    engine = make_engine(spec)
    engine.train_batch(make_batch([(2, 3)]), loss_fn, micro_batch_size=1)
    engine.save(tmp_path)
    state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    del state["moments"]["model.norm.weight"]
    torch.save(state, tmp_path / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"another model .*model.norm.weight"):
        make_engine(spec).load(tmp_path)


def test_a_checkpoint_without_a_head_is_refused_by_a_value_engine(spec: EngineSpec) -> None:
    engine = make_engine(replace(spec, kind="value"))
    with pytest.raises(CheckpointError, match=r"lack score.bias, score.weight"):
        engine.load(spec.model.path)


def test_an_unknown_engine_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"(?i)did you mean .?fsdp2"):
        get_engine("fdsp2")


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ConfigError, match="already"):

        @register_engine("local")
        class Other(LocalEngine):
            pass
