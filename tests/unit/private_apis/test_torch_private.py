"""The private names of torch that we use: they are there, and do what we take them to do."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._runtime_utils import _reshard

from paceline.private_apis import torch_private

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def test_they_were_tried_with_this_version() -> None:
    assert version("torch").partition("+")[0] == torch_private.TRIED_WITH


@needs_onednn
@pytest.mark.parametrize("with_bias", [False, True])
def test_onednn_multiplies_plain_and_packed_weights(with_bias: bool) -> None:
    dice = torch.Generator().manual_seed(0)
    states, weight = torch.randn(3, 5, 16, generator=dice), torch.randn(8, 16, generator=dice)
    bias = torch.randn(8, generator=dice) if with_bias else None
    expected = nn.functional.linear(states, weight, bias)
    packed = torch_private.pack_linear_weight(weight, 64)
    for form in (weight, packed):
        torch.testing.assert_close(torch_private.onednn_linear(states, form, bias), expected)


@pytest.fixture
def sharded() -> Iterator[FullyShardedDataParallel]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield FullyShardedDataParallel(nn.Linear(4, 2), device_id=torch.device("cpu"), use_orig_params=True)
    finally:
        dist.destroy_process_group()


def test_shards_of_fsdp1_move_with_their_handles(sharded: FullyShardedDataParallel) -> None:
    assert torch_private.FSDP1_PREFIX + "weight" in dict(nn.Module.named_parameters(sharded))
    before = sharded(torch.ones(1, 4))
    torch_private.move_fsdp1(sharded, "cpu")
    assert torch.equal(sharded(torch.ones(1, 4)), before)
    handle = sharded._handle
    assert handle is not None
    assert handle.flat_param._local_shard.data_ptr() == handle.flat_param.data.data_ptr()


def test_gradients_that_the_optimizer_dropped_are_let_go_by_fsdp1(sharded: FullyShardedDataParallel) -> None:
    optimizer = torch.optim.SGD(sharded.parameters())
    sharded(torch.ones(1, 4)).sum().backward()
    optimizer.zero_grad(set_to_none=True)
    handle = sharded._handle
    assert handle is not None
    assert handle.flat_param.grad is not None
    torch_private.free_gradients_fsdp1(sharded)
    assert handle.flat_param.grad is None
    sharded(torch.ones(1, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in sharded.parameters())


def test_fsdp1_frees_whole_parameters_by_a_function_of_three_arguments() -> None:
    assert list(inspect.signature(_reshard).parameters) == ["state", "handle", "free_unsharded_flat_param"]
    assert list(inspect.signature(FlatParamHandle.flat_param_to).parameters) == ["self", "args", "kwargs"]


def test_layers_that_compute_activations_again_are_known() -> None:
    plain = nn.Sequential(nn.Linear(2, 2))
    assert not torch_private.recomputes_activations(plain)
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)))
    assert torch_private.recomputes_activations(wrapped)
    names = [name for name, _ in nn.Module.named_parameters(wrapped)]
    assert names == [f"0.{torch_private.CHECKPOINT_PREFIX}{name}" for name in ("weight", "bias")]


def test_advice_on_meshes_comes_from_the_logger_that_is_silenced() -> None:
    logger = import_module("torch.distributed.tensor._redistribute").logger
    before = logger.level
    try:
        torch_private.silence_mesh_advice()
        assert logger.level == logging.ERROR
    finally:
        logger.setLevel(before)
