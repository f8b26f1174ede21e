"""Every example in a docstring of the package gives what it says."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent
MODULES = sorted(
    ".".join(("paceline", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if re.search(r"^ *>>> .*(?<!# doctest: \+SKIP)$", path.read_text(), re.MULTILINE)
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted > 0
    assert result.failed == 0
