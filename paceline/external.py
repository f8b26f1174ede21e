"""A module of the user's that registers estimators, losses, scorers or engines, imported in every process of a run.

The driver knows which modules it imported; the worker processes that it starts import the same before anything else.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.errors import ConfigError

KEY = "actor_rollout_ref.model.external_lib"
_imported: dict[str, None] = {}


def import_external(library: str | None) -> None:
    """Import a module, by its name or as a .py file, once in this process; None imports nothing."""
    if library is None or library in _imported:
        return
    try:
        if library.endswith(".py"):
            module = import_file(Path(library), "paceline_external")
            if is_installed("cloudpickle"):
                import cloudpickle

                # Graders that run in a process of their own, which has not imported this, take their functions along.
                cloudpickle.register_pickle_by_value(module)
        else:
            importlib.import_module(library)
    except Exception as error:  # it is the user's code
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{KEY}={library} can't be imported: {reason}. Set it to a .py file or to a module that Python finds here."
        ) from error
    _imported[library] = None


def is_installed(package: str) -> bool:
    """Whether Python finds a package or module; it is not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a package above it is not there
        return False


def imported_modules() -> tuple[str, ...]:
    """What `import_external` imported in this process: for a process that it starts."""
    return tuple(_imported)


def import_named(path: str) -> Any:
    """A class or function of a user's: `package.module.Name`, or `folder/file.py:Name`.

    >>> import_named("pathlib.PurePath").__name__
    'PurePath'
    """
    file, colon, name = path.rpartition(":")
    if colon:
        module = import_file(Path(file).expanduser().resolve(), "paceline_named")
    else:
        place, _, name = path.rpartition(".")
        if not place:
            raise ImportError(f"{path!r} is neither a name with dots nor file.py:Name")
        module = importlib.import_module(place)
    if not hasattr(module, name):
        raise ImportError(f"{module.__name__} has no {name!r}")
    return getattr(module, name)


def import_file(file: Path, prefix: str) -> ModuleType:
    """The module of a user's .py file, called `prefix_stem`.

    It is imported once per process: what it holds at module level, such as a client, is held once. A file that has
    changed since is another one.
    """
    return _import_version(file, prefix, file.stat().st_mtime_ns)


@cache
def _import_version(file: Path, prefix: str, modified_ns: int) -> ModuleType:
    name = f"{prefix}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError("it is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
