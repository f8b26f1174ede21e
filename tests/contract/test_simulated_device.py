"""The simulated device held to torch on the CPU, operator by operator, before anything of ours is tried on it.

`pytest --device simulated tests/contract/test_simulated_device.py`. It computes with the CPU's kernels, so everything
is equal bit for bit; what can be wrong is how tensors, views, writes, gradients and random numbers get there and back.
"""

from __future__ import annotations

import copy
import sys
import unittest
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from tests.device import DEVICE, ON_CPU
from tests.tiny import build_tiny_model

pytestmark = pytest.mark.simulated

NAMES = """
    add addmm all any arange argmax argsort baddbmm bmm cat chunk clamp clone contiguous copysign cos cumsum diff
    einsum eq exp expand fill floor gather ge gt index_add index_copy index_put index_select isfinite isnan le
    linalg.vector_norm log log_softmax logical_and logical_not logsumexp lt masked_fill masked_scatter masked_select
    matmul mean mm mul multinomial narrow ne neg new_full nn.functional.dropout nn.functional.embedding
    nn.functional.gelu nn.functional.linear nn.functional.logsigmoid nn.functional.rms_norm
    nn.functional.scaled_dot_product_attention nn.functional.silu nn.functional.softplus nonzero ones_like pow rand_like
    randint_like randn repeat repeat_interleave reshape resize_ rsqrt rsub scatter scatter_add sigmoid sin slice softmax
    sort split sqrt squeeze stack sub sum t tanh to topk transpose tril triu unbind unfold unsqueeze view view_as var
    where zero_ zeros_like
"""
CORE = frozenset(NAMES.split())
"""What a language model, its loss, its optimizer and a sampler call."""


def operators() -> list[Any]:
    """torch's own list of operators, with arguments to try each with."""
    if ON_CPU:
        return []
    # torch's test tools want the base class of torch's tests.
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    from torch.testing._internal.common_methods_invocations import op_db

    found = [op for op in op_db if op.name in CORE and torch.float32 in op.dtypes and not op.variant_test_name]
    assert {op.name for op in found} == CORE
    return [pytest.param(op, id=op.full_name) for op in found]


def on_device(value: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x.detach().to(DEVICE).requires_grad_(x.requires_grad), value)


def run(op: Any, sample: Any, device: str) -> tuple[Any, list[Tensor | None]]:
    """The result and the gradients of what asks for them."""
    arguments = (sample.input, sample.args, sample.kwargs)
    if device != "cpu":
        arguments = on_device(arguments)
        if "device" in arguments[2]:
            arguments[2]["device"] = device
    leaves: list[Tensor] = []
    tree_map_only(Tensor, lambda x: leaves.append(x) if x.requires_grad and x.is_leaf else None, arguments)
    for leaf in leaves:
        leaf.grad = None
    torch.manual_seed(0)
    output = op(arguments[0], *arguments[1], **arguments[2])
    differentiable: list[Tensor] = []
    tree_map_only(
        Tensor, lambda x: differentiable.append(x) if x.requires_grad and x.is_floating_point() else None, output
    )
    if differentiable and op.supports_autograd:
        torch.stack([x.cos().sum() for x in differentiable]).sum().backward()
    return output, [leaf.grad for leaf in leaves]


def check_equal(one: Any, other: Any) -> None:
    """Bit for bit, and each on its own device."""
    torch.testing.assert_close(
        one, tree_map_only(Tensor, lambda x: x.cpu(), other), rtol=0, atol=0, equal_nan=True, check_stride=False
    )


@pytest.mark.parametrize("op", operators())
def test_an_operator_gives_the_values_and_gradients_of_the_cpu(op: Any) -> None:
    torch.manual_seed(1)
    samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd))[:6]
    assert samples
    for sample in samples:
        expected = run(op, sample, "cpu")
        found = run(op, sample, DEVICE)
        tree_map_only(Tensor, lambda x: pytest.fail("a result on the CPU") if x.is_cpu else x, found[1])
        check_equal(expected, found)


def test_two_gradients_of_one_weight_add_up() -> None:
    """Tied embeddings: the weight is looked up in, and multiplied by."""
    embed, head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
    head.weight = embed.weight
    ours = copy.deepcopy(nn.Sequential(embed, head)).to(DEVICE)
    assert ours[0].weight is ours[1].weight
    tokens = torch.tensor([[1, 2, 3, 1], [5, 2, 2, 0]])
    head(embed(tokens)).logsumexp(-1).sum().backward()
    for _ in range(2):
        ours[1](ours[0](tokens.to(DEVICE))).logsumexp(-1).sum().backward()
    assert torch.equal(2 * embed.weight.grad, ours[0].weight.grad.cpu())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_language_model_trains_as_on_the_cpu(tied: bool, dtype: torch.dtype) -> None:
    seen = {}
    for device in ("cpu", DEVICE):
        model = build_tiny_model(tie_word_embeddings=tied, initializer_range=0.2).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = torch.arange(40, device=device).view(2, 20)
        losses = []
        for _ in range(3):
            with torch.autocast(device, dtype, enabled=dtype != torch.float32):
                logits = model(tokens).logits
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        seen[device] = losses
    # AdamW's first steps are as large as the learning rate, whatever the gradient: they make more of its last bits.
    assert seen["cpu"] == pytest.approx(seen[DEVICE], rel=1e-4 if dtype == torch.float32 else 2e-2)
    assert seen["cpu"][-1] < seen["cpu"][0]


def test_views_share_memory_and_writes_through_them_have_gradients() -> None:
    def compute(device: str) -> tuple[Tensor, Tensor]:
        start = torch.arange(12.0, device=device).view(3, 4).requires_grad_()
        copied = start * 2
        copied[1:, ::2] += start[0, :2]
        copied.t()[3].mul_(copied[:, 0].clone())
        copied.sum().backward()
        return copied.detach().cpu(), start.grad.cpu()

    check_equal(compute("cpu"), compute(DEVICE))
    base = torch.zeros(4, device=DEVICE)
    base.view(2, 2)[1].fill_(3.0)
    assert base.tolist() == [0, 0, 3, 3]
    storage = base.untyped_storage()
    storage.resize_(0)
    assert storage.nbytes() == 0
    storage.resize_(16)
    assert base.fill_(1).sum().item() == 4


def test_devices_do_not_mix() -> None:
    here, there = torch.ones(3, device=DEVICE), torch.ones(3)
    wrong = "Expected all tensors to be on the same device|can't write"
    for call in (
        lambda: here + there,
        lambda: torch.cat([here, there]),
        lambda: F.embedding(torch.tensor([0, 1]), here.view(3, 1)),
        lambda: here.view(1, 3) @ there.view(3, 1),
        lambda: there.add_(here),
        lambda: here.gather(0, torch.tensor([1, 2])),
        lambda: here + torch.ones(3, device=f"{DEVICE}:1"),
        lambda: torch.where(here > 0, here, there),
    ):
        with pytest.raises(RuntimeError, match=wrong):
            call()
    with pytest.raises(TypeError, match="convert"):
        here.numpy()
    # As on CUDA: numbers may come from the CPU, and indices too.
    assert (here + torch.tensor(2.0)).tolist() == [3, 3, 3]
    assert here[torch.tensor([0, 2])].tolist() == [1, 1]
    assert here.to("cpu").device.type == "cpu"
    assert here.to(f"{DEVICE}:1").device.index == 1


def test_memory_is_counted_and_given_back() -> None:
    before = torch.accelerator.memory_allocated()
    kept = torch.zeros(1000, device=DEVICE)
    made = kept + 1
    assert torch.accelerator.memory_allocated() - before == 8000
    del made, kept
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_allocated() == before


def test_random_numbers_are_the_devices_own() -> None:
    torch.manual_seed(3)
    expected, cpu = torch.rand(4, device=DEVICE), torch.get_rng_state()
    state = torch.npu.get_rng_state()
    after = torch.rand(4, device=DEVICE)
    assert torch.equal(cpu, torch.get_rng_state())
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.rand(4, device=DEVICE), after)
    generator = torch.Generator(DEVICE).manual_seed(3)
    assert torch.equal(torch.rand(4, device=DEVICE, generator=generator), expected)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(4, device=DEVICE, generator=torch.Generator())


def test_paceline_finds_the_device_and_its_memory() -> None:
    from paceline.cli.doctor import check_devices
    from paceline.trainer.device import detect_device
    from paceline.trainer.ppo.memory import available_memory

    assert detect_device() == DEVICE
    assert available_memory(DEVICE) == torch.npu.get_device_properties(0).total_memory
    (finding,) = check_devices()
    assert finding.state == "ok"
    assert finding.found.startswith("2 x simulated with ")
