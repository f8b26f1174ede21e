from __future__ import annotations

import ast
from pathlib import Path

import paceline
from paceline.config.keys import walk_keys


def test_every_key_is_read_by_code_that_acts_on_it():
    """Code reads `section.key` as an attribute, passes a key's name, or takes a section whole as keyword arguments.

    Declaring, checking and describing a key is not reading it; dividing devices into pools is.
    """
    package = Path(paceline.__file__).parent
    read: set[str] = set()
    for file in package.rglob("*.py"):
        if package / "config" in file.parents and file.name != "pools.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute):
                read.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                read.add(node.value)
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("asdict"):
                section = ast.unparse(node.args[0])
                read |= {key.field for key in walk_keys() if key.name.rpartition(".")[0].endswith(section)}
    unread = [key.name for key in walk_keys() if not key.is_section and key.field not in read]
    assert not unread
