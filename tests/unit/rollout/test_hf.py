"""What the engine on `transformers.generate` does beyond the contract, and how a worker makes an engine."""

from __future__ import annotations

import pytest
from transformers import GenerationConfig, PreTrainedModel

from paceline.config import PolicyModelConfig, RolloutConfig
from paceline.rollout.rollout_interface import DTYPES, RolloutSpec, SamplingParams, get_rollout
from tests.tiny import build_tiny_model


def make_model() -> PreTrainedModel:
    return build_tiny_model(initializer_range=0.2)


def make_engine(name: str, model: PreTrainedModel, **config):
    spec = RolloutSpec(
        model=PolicyModelConfig(),
        module=lambda: model,
        config=RolloutConfig(name=name, **config),
        max_prompt_length=8,
        max_response_length=8,
        eos_token_ids=frozenset({1}),
        pad_token_id=0,
        device="cpu",
        dtype=DTYPES[config.get("dtype", "float32")],
    )
    return get_rollout(name).from_spec(spec)


@pytest.mark.parametrize("name", ["native", "hf"])
@pytest.mark.parametrize(("configured", "expected"), [(None, [1]), (7, [1, 7]), ([7, 8], [1, 7, 8])])
def test_a_worker_gives_its_module_and_the_model_adds_tokens_that_end_a_turn(name, configured, expected) -> None:
    model = make_model()
    model.generation_config = GenerationConfig(eos_token_id=configured)
    engine = make_engine(name, model, max_num_seqs=3)
    assert engine.model is model
    assert not engine.keeps_own_weights
    assert engine.eos_token_ids == expected
    assert engine.max_num_seqs == 3


@pytest.mark.parametrize("name", ["native", "hf"])
def test_bfloat16_is_another_rounding_of_the_same_model(name: str) -> None:
    model, greedy = make_model(), SamplingParams(1, do_sample=False)
    [exact] = make_engine(name, model).generate([[5, 6, 7]], greedy, [0])
    [found] = make_engine(name, model, dtype="bfloat16").generate([[5, 6, 7]], greedy, [0])
    assert found.log_probs != exact.log_probs
    assert found.log_probs == pytest.approx(exact.log_probs, abs=0.05)


def test_generation_defaults_of_the_model_have_no_part_and_are_kept() -> None:
    model = make_model().train()
    model.gradient_checkpointing_enable()
    model.model.norm.eval()
    modes = [module.training for module in model.modules()]
    greedy = SamplingParams(8, do_sample=False)
    before = make_engine("hf", model).generate([[5, 6, 7]], greedy, [0])
    defaults = GenerationConfig(repetition_penalty=9.0, max_new_tokens=2, do_sample=True, eos_token_id=1)
    model.generation_config = defaults
    assert make_engine("hf", model).generate([[5, 6, 7]], greedy, [0]) == before
    assert model.generation_config is defaults
    assert [module.training for module in model.modules()] == modes
