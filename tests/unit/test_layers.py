from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import paceline

PACKAGE = Path(paceline.__file__).parent

# Small modules that every layer may use. They know one another, and neither torch nor Ray.
GROUND = (
    "catalog",
    "errors",
    "external",
    "files",
    "log_file",
    "machine",
    "redaction",
    "registry",
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
    "workers": 4,
    "trainer": 5,
    "cli": 6,
}
# Packages that a layer must do without, also inside functions.
FORBIDDEN = {
    **{name: {"ray", "torch", "transformers"} for name in GROUND},
    "catalog": {"ray", "torch", "transformers", "paceline"},
    "config": {"ray", "torch", "transformers"},
    "algorithms": {"ray", "transformers"},
    "protocol": {"transformers"},
    "single_controller": {"transformers", "paceline.config", "paceline.algorithms"},
    "rewards": {"ray"},
    "report": {"ray"},
    "data": {"ray"},
    "engine": {"ray"},
    "rollout": {"ray"},
    "speedups": {"ray", "paceline.config", "paceline.algorithms"},
    "private_apis": {"ray", "paceline"},
}


def modules() -> Iterator[tuple[str, Path]]:
    """(layer, file) of every module below the package; the package's own __init__ belongs to no layer."""
    for file in sorted(PACKAGE.rglob("*.py")):
        layer = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if layer != "__init__":
            yield layer, file


def imports(file: Path) -> Iterator[str]:
    """Full names of everything that a file imports, anywhere in it."""
    package = ".".join(["paceline", *file.relative_to(PACKAGE).parent.parts])
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    [*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])]
                )
            yield from (f"{base}.{alias.name}" for alias in node.names)


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


def loaded_after(code: str) -> set[str]:
    """Which of the heavy packages a fresh Python has loaded after `code`."""
    program = f"import sys\n{code}\nprint(*sorted({{'ray', 'torch', 'transformers'}} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(output.stdout.split())


def test_import_paceline_loads_nothing_heavy():
    assert loaded_after("import paceline, paceline.errors, paceline.config") == set()


def test_the_ground_floor_loads_nothing_heavy():
    assert loaded_after(f"import {', '.join(f'paceline.{name}' for name in GROUND)}") == set()


def test_the_entry_loads_nothing_heavy_until_it_runs():
    assert loaded_after("import paceline.trainer.main_ppo") == set()


def test_speedups_are_reached_by_their_seam_alone():
    past_it = [
        f"{file.relative_to(PACKAGE)} imports {name}"
        for layer, file in modules()
        for name in imports(file)
        if layer != "speedups" and name.startswith("paceline.speedups.") and name.count(".") > 2
    ]
    assert past_it == []


# How private names of torch, transformers, peft and vLLM look in code.
PRIVATE_NAMES = re.compile(
    r"\b(torch|transformers|peft|vllm)(\.\w+)*\._[a-z]\w*"  # torch.ops.mkldnn._linear_pointwise
    r"|\._(attn_implementation|no_split_modules|handle|local_shard|disable_adapters)\b"
    r"|\btopk_topp_sampler\b|_(fsdp|checkpoint)_wrapped_module"
)


def test_private_names_of_other_libraries_are_in_one_module_each():
    found = [
        f"{file.relative_to(PACKAGE)}: {match.group()}"
        for layer, file in modules()
        if layer in ("algorithms", "engine", "rollout", "speedups", "workers")
        for match in PRIVATE_NAMES.finditer(file.read_text())
    ]
    assert found == []
