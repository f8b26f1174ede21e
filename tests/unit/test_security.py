"""What docs/security.md promises."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from paceline.config.keys import known_keys
from paceline.config.load import load_config
from paceline.data.tokenizer import load_tokenizer
from paceline.trainer import ray_session

PACKAGE = Path(paceline.__file__).parent
# To read with them is to run code that the file brings.
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve"}
PRIVATE_PIPES = {"rewards/killable.py", "rewards/killable_side.py"}
"""They unpickle what comes from a process that they started themselves, by its own pipe, and no file."""
RAYS_MESSAGES = {"single_controller/ray/shell.py", "single_controller/ray/watch.py"}
"""They unpickle calls and their records, which travel within Ray as bytes, as it does itself with all others."""
UNSAFE_CALLS = {"yaml.load", "yaml.unsafe_load", "pd.read_pickle", "pandas.read_pickle"}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call with its name in dots, such as torch.load."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def unsafe_reads(source: str) -> list[str]:
    """What in a module reads files in a way that may run code of theirs."""
    tree = ast.parse(source)
    found = []
    for name, call in calls(tree):
        options = {option.arg: ast.unparse(option.value) for option in call.keywords}
        module, _, function = name.rpartition(".")
        if name in ("torch.load", "torch.serialization.load") and options.get("weights_only") != "True":
            found.append(f"{ast.unparse(call)} without weights_only=True")
        elif module in ("np", "numpy") and function == "load" and options.get("allow_pickle") != "False":
            found.append(f"{ast.unparse(call)} without allow_pickle=False")
        elif name in UNSAFE_CALLS or (module in UNSAFE_MODULES and function in ("load", "loads", "Unpickler", "open")):
            found.append(ast.unparse(call))
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in UNSAFE_MODULES
        for alias in node.names
    }
    return found + sorted(imported & {"load", "loads", "Unpickler"})


def test_no_file_of_the_package_reads_in_a_way_that_runs_code() -> None:
    found = {
        str(file.relative_to(PACKAGE)): unsafe
        for file in sorted(PACKAGE.rglob("*.py"))
        if (unsafe := unsafe_reads(file.read_text()))
    }
    assert set(found) == PRIVATE_PIPES | RAYS_MESSAGES


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "pickle.load(stream)",
        "pickle.loads(path.read_bytes())",
        "from pickle import loads",
        "yaml.load(text)",
    ],
)
def test_that_look_sees_what_it_looks_for(source: str) -> None:
    assert len(unsafe_reads(source)) == 1


def test_code_of_a_model_runs_only_if_asked_for() -> None:
    switches = [key for name, key in known_keys().items() if name.endswith(".trust_remote_code")]
    assert len(switches) >= 3
    assert all(key.default is False for key in switches)
    assert inspect.signature(load_tokenizer).parameters["trust_remote_code"].default is False


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ({}, (False, None)),
        ({"include_dashboard": True}, (True, None)),
        ({"dashboard_host": "0.0.0.0"}, (False, "0.0.0.0")),
    ],
)
def test_the_dashboard_of_ray_is_off_and_stays_on_this_machine_unless_asked(
    asked: dict[str, object], shown: tuple[bool, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    given: dict[str, object] = {}
    # Ray's own default is this machine alone.
    assert inspect.signature(ray.init).parameters["dashboard_host"].default == "127.0.0.1"
    with monkeypatch.context() as patch:
        real = inspect.signature(ray.init)
        init = lambda **kwargs: given.update(kwargs)  # noqa: E731
        init.__signature__ = real  # type: ignore[attr-defined]
        patch.setattr(ray, "init", init)
        ray_session.start_ray(load_config({"ray_kwargs": {"ray_init": asked}}))
    assert (given["include_dashboard"], given.get("dashboard_host")) == shown
