"""Linear layers by oneDNN: the same numbers but for rounding, and only where it pays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from paceline.config import OptimConfig, TrainedModelConfig
from paceline.engine import EngineSpec
from paceline.engine.backends.local_engine import LocalEngine
from paceline.speedups import fast_linear
from paceline.speedups.fast_linear import OneDnnLinear, faster_linear, mkl_keeps_to_avx2
from tests.tiny import make_tiny_model
from tests.unit.engine.test_packed_attention import loss_fn, make_batch

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All products go to oneDNN, and how many each has."""
    products: list[int] = []
    monkeypatch.setattr(fast_linear, "SMALLEST_PRODUCT", 1)
    product = fast_linear.onednn_linear

    def counting(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        products.append(states.numel() * len(weight))
        return product(states, weight, bias)

    monkeypatch.setattr(fast_linear, "onednn_linear", counting)
    return products


def gradients(states: Tensor, weight: Tensor, bias: Tensor | None, direction: Tensor) -> list[Tensor]:
    """The output, and the gradients of what it is made of."""
    leaves = [leaf.clone().requires_grad_() for leaf in (states, weight, bias) if leaf is not None]
    output = linear(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, direction)]


@needs_onednn
@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=2),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_outputs_and_gradients_are_those_of_linear(
    shape: list[int], sizes: tuple[int, int], with_bias: bool, seed: int
) -> None:
    dice = torch.Generator().manual_seed(seed)
    states, weight = torch.randn(*shape, sizes[0], generator=dice), torch.randn(sizes[1], sizes[0], generator=dice)
    bias = torch.randn(sizes[1], generator=dice) if with_bias else None
    direction = torch.randn(*shape, sizes[1], generator=dice).transpose(0, -1).contiguous().transpose(0, -1)
    expected = gradients(states, weight, bias, direction)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_linear, "SMALLEST_PRODUCT", 1)
        with OneDnnLinear():
            found = gradients(states, weight, bias, direction)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-5)
        assert one.is_contiguous() == other.is_contiguous()


@needs_onednn
def test_nothing_is_computed_for_what_needs_no_gradient(counted: list[int]) -> None:
    states, weight = torch.randn(4, 6), torch.randn(7, 6)
    with OneDnnLinear():
        linear(states, weight.requires_grad_()).sum().backward()
        assert len(counted) == 2
        linear(states.requires_grad_(), weight.detach()).sum().backward()
        assert len(counted) == 4
        with torch.no_grad():
            linear(states, weight)
        assert len(counted) == 5


@pytest.mark.parametrize(
    ("states", "weight"),
    [
        (torch.zeros(64, 64), torch.zeros(64, 64)),
        (torch.zeros(256, 512, dtype=torch.bfloat16), torch.zeros(512, 512, dtype=torch.bfloat16)),
        (torch.zeros(256, 512, device="meta"), torch.zeros(512, 512, device="meta")),
    ],
    ids=["small", "bfloat16", "meta"],
)
def test_other_products_stay_where_they_were(states: Tensor, weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_linear, "onednn_linear", lambda *_: pytest.fail("it went to oneDNN"))
    with OneDnnLinear():
        assert linear(states, weight).shape == (len(states), len(weight))
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(torch.zeros(256, 512), torch.zeros(512, 512)).dtype == torch.bfloat16


@needs_onednn
@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_engine_trains_as_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: list[int], checkpointing: bool
) -> None:
    folder = make_tiny_model(tmp_path / "model", layers=2, initializer_range=0.2)
    results: list[tuple[dict[str, Tensor], dict[str, float]]] = []
    for is_used in (False, True):
        monkeypatch.setattr(fast_linear, "mkl_keeps_to_avx2", lambda is_used=is_used: is_used)
        model = TrainedModelConfig(
            path=str(folder), use_remove_padding=True, enable_gradient_checkpointing=checkpointing
        )
        engine = LocalEngine(EngineSpec(model, "causal_lm", OptimConfig(lr=1e-3)))
        engine.initialize()
        assert bool(counted) == is_used
        data = make_batch([(3, 5, 0b10), (6, 1, 0), (1, 4, 0)])
        metrics = [engine.train_batch(data, loss_fn, micro_batch_size=2) for _ in range(2)][-1]
        results.append((engine.infer_batch(data, micro_batch_size=3), metrics))
    (plain, expected), (found, metrics) = results
    assert metrics == pytest.approx(expected, rel=1e-4)
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("vendor", "capability", "held_back"),
    [("AuthenticAMD", "AVX512", True), ("AuthenticAMD", "AVX2", False), ("GenuineIntel", "AVX512", False)],
)
def test_only_processors_that_mkl_holds_back_go_another_way(
    monkeypatch: pytest.MonkeyPatch, vendor: str, capability: str, held_back: bool
) -> None:
    def read_text(path: Path, *_: Any) -> str:
        assert str(path) == "/proc/cpuinfo"
        return f"processor\t: 0\nvendor_id\t: {vendor}\n"

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    for library in (torch.backends.mkl, torch.backends.mkldnn):
        monkeypatch.setattr(library, "is_available", lambda: True)
    mkl_keeps_to_avx2.cache_clear()
    try:
        assert mkl_keeps_to_avx2() is held_back
        assert isinstance(faster_linear("cpu"), OneDnnLinear) is held_back
        assert not isinstance(faster_linear("cuda"), OneDnnLinear)
    finally:
        mkl_keeps_to_avx2.cache_clear()
