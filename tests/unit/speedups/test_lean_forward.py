"""The lean forward pass gives what the models' own does."""

from __future__ import annotations

import weakref

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from paceline.rollout import native
from paceline.rollout.rollout_interface import SamplingParams
from paceline.speedups import fast_linear
from paceline.speedups.lean_forward import LeanForward, grouped_sdpa, is_plain
from tests.unit.rollout.test_native import ARCHITECTURES, make_model

PLAIN = ["qwen2", "qwen3", "llama", "mistral", "llama with everything"]


def own_logits(model: PreTrainedModel, ids: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """After the last position, without a cache."""
    positions = (visible.cumsum(dim=1) - 1).clamp(min=0)
    return model(input_ids=ids, attention_mask=visible, position_ids=positions, use_cache=False).logits[:, -1]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", [*PLAIN, "qwen2 and an adapter"])
@torch.no_grad()
def test_prefill_and_steps_equal_the_models_own_pass(name: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_linear, "PACKED_ELEMENTS", 1 if packed else 1 << 60)
    torch.manual_seed(0)
    model = make_model(name.removesuffix(" and an adapter"))
    for parameter in model.parameters():  # biases are 0 and norms are 1 at first
        parameter += 0.05 * torch.randn_like(parameter)
    if "adapter" in name:
        lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = inject_adapter_in_model(lora, model)
    assert is_plain(model)
    forward, cache = LeanForward(model), DynamicCache()
    ids, left = torch.randint(2, 64, (3, 12)), torch.tensor([[0], [4], [7]])
    columns = torch.arange(12)
    visible = columns >= left
    done = 0
    for new in (9, 1, 1, 1):
        end = done + new
        given = (ids[:, done:end], (columns[done:end] - left).clamp(min=0), visible[:, :end], cache)
        wanted = own_logits(model, ids[:, :end], visible[:, :end])
        torch.testing.assert_close(forward(*given), wanted, rtol=1e-5, atol=1e-5)
        done = end


@torch.no_grad()
def test_nothing_hidden_needs_no_mask() -> None:
    model, ids = make_model(), torch.randint(2, 64, (2, 6), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(6).expand(2, 6)
    found = LeanForward(model)(ids, positions, None, DynamicCache())
    torch.testing.assert_close(found, own_logits(model, ids, torch.ones_like(ids)), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_under_autocast_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_linear, "PACKED_ELEMENTS", 1)
    model, ids = make_model(), torch.randint(2, 64, (2, 6), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(6).expand(2, 6)
    with torch.autocast("cpu", torch.bfloat16):
        found = LeanForward(model)(ids, positions, None, DynamicCache())
        wanted = own_logits(model, ids, torch.ones_like(ids))
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
    assert found.dtype == torch.bfloat16


def test_each_generation_packs_the_weights_of_its_moment_and_keeps_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_linear, "PACKED_ELEMENTS", 1)
    made: list[weakref.ref[LeanForward]] = []

    def noting(model: PreTrainedModel) -> LeanForward:
        forward = LeanForward(model)
        made.append(weakref.ref(forward))
        return forward

    monkeypatch.setattr(native, "LeanForward", noting)
    model, prompts = make_model(), [[5, 6, 7], [8, 9]]
    rollout = native.NativeRollout(model, {1}, 0)
    greedy = SamplingParams(4, do_sample=False)
    before = rollout.generate(prompts, greedy, [0, 0])
    with torch.no_grad():
        model.lm_head.weight.neg_()  # what was least likely is most likely now
    after = rollout.generate(prompts, greedy, [0, 0])
    assert [completion.token_ids[0] for completion in before] != [completion.token_ids[0] for completion in after]
    assert [forward() for forward in made] == [None, None]


@pytest.mark.parametrize("name", sorted({*ARCHITECTURES} - {*PLAIN}))
def test_what_is_not_plain_is_left_to_the_model(name: str) -> None:
    assert not is_plain(make_model(name))


def test_other_architectures_are_not_plain() -> None:
    assert not is_plain(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16)))


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("key_heads", [1, 2, 6])
@pytest.mark.parametrize("masked", [True, False])
def test_grouped_attention_equals_attention_with_repeated_heads(positions: int, key_heads: int, masked: bool) -> None:
    dice = torch.Generator().manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups = 6 // key_heads
    query = torch.randn(5, 6, positions, 8, generator=dice)
    key, value = torch.randn(2, 5, key_heads, 7, 8, generator=dice)
    mask = torch.arange(7) >= torch.arange(5)[:, None] if masked else torch.ones(5, 7, dtype=torch.bool)
    mask = mask[:, None, None, :].expand(-1, -1, positions, -1) if masked or positions > 1 else None
    found, _ = grouped_sdpa(module, query, key, value, mask, scaling=0.3, dropout=0.0)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    torch.testing.assert_close(found, expected)
