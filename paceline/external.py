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
            if importlib.util.find_spec("cloudpickle") is not None:
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


def imported_modules() -> tuple[str, ...]:
    """What `import_external` imported in this process: for a process that it starts."""
    return tuple(_imported)


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
