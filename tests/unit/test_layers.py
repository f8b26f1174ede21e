from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import paceline

PACKAGE = Path(paceline.__file__).parent

# Small modules that every layer may use. They know one another, and neither torch nor Ray.
GROUND = (
    "catalog",
    "command_line",
    "errors",
    "external",
    "files",
    "log_file",
    "machine",
    "redaction",
    "run_folder",
    "schema",
    "text",
)
# Imports point to a smaller number. Layers with the same number don't know each other, but for the ground floor.
LEVELS = {
    **dict.fromkeys(GROUND, 0),
    "protocol": 1,
    "config": 1,
    "private_apis": 1,
    "algorithms": 2,
    "speedups": 2,
    "engine": 3,
    "rollout": 3,
    "single_controller": 3,
    "data": 3,
    "rewards": 3,
    "report": 3,
    "agents": 3,
    "workers": 4,
    "trainer": 5,
    "front": 6,
    "cli": 7,
}
# Packages that a layer must do without, also inside functions.
FORBIDDEN = {
    **{name: {"ray", "torch", "transformers"} for name in GROUND},
    "config": {"ray", "torch", "transformers"},
    "algorithms": {"ray", "transformers"},
    "protocol": {"transformers"},
    "single_controller": {"transformers", "paceline.config", "paceline.algorithms"},
    "rewards": {"ray"},
    "report": {"ray"},
    "data": {"ray"},
    "engine": {"ray"},
    "agents": {"ray", "torch"},
    "rollout": {"ray"},
    "speedups": {"ray", "paceline.config", "paceline.algorithms"},
    "private_apis": {"paceline"},
}


def modules() -> Iterator[tuple[str, Path]]:
    """(layer, file) of every module below the package; the package's own __init__ belongs to no layer."""
    for file in sorted(PACKAGE.rglob("*.py")):
        layer = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if layer != "__init__":
            yield layer, file


@cache
def imports(file: Path, only_at_the_top: bool = False) -> list[str]:
    """Full names of everything that a file imports, anywhere in it or when it is loaded."""
    package = ".".join(["paceline", *file.relative_to(PACKAGE).parent.parts])
    names: list[str] = []
    tree = ast.parse(file.read_text())
    for node in tree.body if only_at_the_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    [*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])]
                )
            names += [f"{base}.{alias.name}" for alias in node.names]
    return names


def layer_of(name: str) -> str | None:
    """The layer of an imported name; None for other people's packages and for names of the package itself."""
    parts = name.split(".")
    return parts[1] if parts[0] == "paceline" and len(parts) > 1 and parts[1] in LEVELS else None


def test_every_module_belongs_to_a_layer():
    assert {layer for layer, _ in modules()} <= set(LEVELS)


def test_imports_point_down():
    upward = [
        f"{file.relative_to(PACKAGE)} imports {name}"
        for layer, file in modules()
        for name in imports(file)
        if (other := layer_of(name)) is not None
        and other != layer
        and not (LEVELS[other] < LEVELS[layer] or LEVELS[other] == 0 == LEVELS[layer])
    ]
    assert upward == []


def test_layers_do_without_the_packages_that_are_not_theirs():
    found = [
        f"{file.relative_to(PACKAGE)} imports {name}"
        for layer, file in modules()
        for name in imports(file)
        for forbidden in FORBIDDEN.get(layer, ())
        if name == forbidden or name.startswith(forbidden + ".")
    ]
    assert found == []


def test_only_layers_that_know_ray_use_its_private_names():
    users = {layer for layer, file in modules() for name in imports(file) if "ray_private" in name}
    assert users <= {"single_controller", "trainer", "cli"}


def test_only_the_task_runner_names_worker_classes():
    """The trainer gets its worker classes as data, so that users can bring their own."""
    named = [
        f"{file.relative_to(PACKAGE)} imports {name}"
        for layer, file in modules()
        for name in imports(file)
        if layer == "trainer" and file.name != "main_ppo.py"
        if name.rpartition(".")[2] in ("ActorRolloutRefWorker", "TrainingWorker")
    ]
    assert named == []


STRICT_LAYERS = ("agents.*", "algorithms.*", "config.*", "front", "rewards.*")


def test_mypy_is_strict_on_the_ground_floor_and_on_these_layers():
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["mypy"]
    [strict] = [part for part in settings["overrides"] if part.get("warn_return_any")]
    assert set(strict["module"]) == {f"paceline.{name}" for name in (*GROUND, *STRICT_LAYERS)}


HEAVY = ("ray", "torch", "transformers")
LIGHT = {
    "paceline": "import paceline, paceline.errors, paceline.config",
    "the ground floor": f"import {', '.join(f'paceline.{name}' for name in GROUND)}",
    "config": "import paceline.config.checks, paceline.config.describe, paceline.config.overrides",
    "the entry": "import paceline.trainer.main_ppo",
    "a worker's process before its worker": "import paceline.single_controller.ray.shell",  # the last: it has Ray
}
"""What is quick, because it loads no heavy package."""


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """For each of LIGHT the heavy packages that a fresh Python has loaded after it and those before it."""
    look = f"\nimport sys; print(*[name for name in {HEAVY} if name in sys.modules])\n"
    program = look.join([*LIGHT.values(), ""])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return dict(zip(LIGHT, map(str.split, done.stdout.split("\n")), strict=False))


@pytest.mark.parametrize("what", LIGHT)
def test_what_answers_at_once_loads_nothing_heavy(loaded: dict[str, list[str]], what: str):
    assert loaded[what] == (["ray"] if what.startswith("a worker's process") else [])


def test_neither_the_controllers_base_nor_the_protocol_loads_ray_or_transformers():
    files = {".".join(["paceline", *file.relative_to(PACKAGE).with_suffix("").parts]): file for _, file in modules()}
    files = {name.removesuffix(".__init__"): file for name, file in files.items()}
    todo, seen = {"paceline.protocol.batch", "paceline.protocol.future", "paceline.single_controller.base"}, set()
    while todo:
        name = todo.pop()
        seen.add(name)
        if name in files:
            todo |= {*imports(files[name], only_at_the_top=True), name.rpartition(".")[0]}
        elif name.startswith("paceline."):  # a name in a module
            todo.add(name.rpartition(".")[0])
        todo -= seen
    assert {"paceline.protocol.batch", "paceline.single_controller.base.worker_group", "torch"} <= seen
    assert {name for name in seen if name.partition(".")[0] in ("ray", "transformers")} == set()


def test_speedups_are_reached_by_their_seam_alone():
    past_it = [
        f"{file.relative_to(PACKAGE)} imports {name}"
        for layer, file in modules()
        for name in imports(file)
        if layer != "speedups" and name.startswith("paceline.speedups.") and name.count(".") > 2
    ]
    assert past_it == []


# How private names of Ray, torch, transformers, peft and vLLM look in code.
PRIVATE_NAMES = re.compile(
    r"\b(ray|torch|transformers|peft|vllm)(\.\w+)*\._[a-z]\w*"  # torch.ops.mkldnn._linear_pointwise
    r"|internal_kv|__ray_metadata__"
    r"|\._(actor_id|attn_implementation|no_split_modules|handle|local_shard|disable_adapters)\b"
    r"|\btopk_topp_sampler\b|_(fsdp|checkpoint)_wrapped_module"
)


def test_private_names_of_other_libraries_are_in_one_module_each():
    found = [
        f"{file.relative_to(PACKAGE)}: {match.group()}"
        for layer, file in modules()
        if layer != "private_apis"
        for match in PRIVATE_NAMES.finditer(file.read_text())
    ]
    assert found == []
