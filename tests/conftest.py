"""One compute thread per test process: tiny tensors gain nothing from more, and processes fight over the cores."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
gc.disable()  # until the imports of all test files are done, which leave next to no garbage


def pytest_addoption(parser: pytest.Parser) -> None:
    choices = ["cpu", "simulated", "cuda"]
    parser.addoption("--device", choices=choices, default="cpu", help="run the suites marked `device` there")


def pytest_configure(config: pytest.Config) -> None:
    """Make the device ready, and tell its name to the test files and to all processes that they start."""
    name = config.getoption("--device")
    if name == "simulated":
        from tests import simulated

        simulated.give_to_this_process_and_its_children()
        name = simulated.NAME
    elif name != "cpu":
        import torch

        if not getattr(torch, name).is_available():
            raise pytest.UsageError(f"--device {name}: there is none on this machine.")
    os.environ["PACELINE_TEST_DEVICE"] = name


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On an accelerator, what is marked for it alone; elsewhere all but the tests of the simulated device."""
    option = config.getoption("--device")

    def belongs(item: pytest.Item) -> bool:
        if item.get_closest_marker("simulated"):
            return option == "simulated"
        return option == "cpu" or item.get_closest_marker("device") is not None

    left_out = [item for item in items if not belongs(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if belongs(item)]


def pytest_collection_finish() -> None:
    """The garbage collector never again looks at what the imports left: a million objects."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def cache_outside_the_home_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For this process and all that it starts, Ray workers included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a small run reads, where a file has no other of its own."""
    from tests.runs import make_material

    return make_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="session")
def isolation() -> None:
    """Skips a test on a machine where programs can't be isolated."""
    from paceline.errors import SandboxUnavailableError
    from paceline.rewards.sandbox import LocalSandbox

    try:
        LocalSandbox().check()
    except SandboxUnavailableError as error:
        pytest.skip(f"no isolation to be had here: {error}")


@pytest.fixture(scope="module", autouse=True)
def process_groups_end_with_their_file() -> Iterator[None]:
    """Files share a process, in an order of their own. vLLM keeps its groups in module variables; left to the garbage
    collector, it would end those of a later file, or that file theirs."""
    yield
    dist, vllm = (sys.modules.get(name) for name in ("torch.distributed", "vllm.distributed.parallel_state"))
    if vllm is not None and vllm._WORLD is not None:  # collecting takes seconds once vLLM is loaded
        gc.collect()
        vllm.cleanup_dist_env_and_memory()
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()
