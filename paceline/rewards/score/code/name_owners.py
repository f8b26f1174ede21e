"""Whose the names are that test code of a ground truth uses and does not define: the program's or the library's.

A `DataError` refuses code where that is not clear, and code that could run an answer of the program, or lets one
function of the program judge another.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import symtable
import sys
from collections.abc import Iterable, Iterator
from functools import cache

from paceline.errors import DataError

LIBRARY_NAMES = {
    "Counter": "collections", "defaultdict": "collections", "OrderedDict": "collections", "deque": "collections",
    "namedtuple": "collections", "Decimal": "decimal", "Fraction": "fractions", "isclose": "math",
    "List": "typing", "Dict": "typing", "Set": "typing", "Tuple": "typing", "Optional": "typing", "Any": "typing",
}  # fmt: skip
"""Names that a test means the library's by, also without an import, unless there is no other to be the program's."""
COMMON_MODULES = (
    "math", "cmath", "itertools", "functools", "operator", "statistics", "string", "re", "copy", "random", "heapq",
    "bisect", "collections", "typing", "fractions", "decimal", "datetime", "time", "json",
)  # fmt: skip
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}
RUNS_DATA = {"pickle", "marshal", "shelve", "runpy", "code", "subprocess", "ctypes"}
"""What would run a program's answer as code."""


def name_owners(code: str, tree: ast.Module, fn_names: list[str]) -> tuple[list[str], dict[str, str]]:
    """Names that test code, parsed as `tree`, uses and does not define: the program's; the library's with modules."""
    _refuse_running(tree)
    free = _free_names(code, tree)
    bases = {
        node.value.id for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    library = {name: name for name in free & bases if name in sys.stdlib_module_names and name not in fn_names}
    rest = free - set(library)
    if fn_names:
        program = rest & {*fn_names, "Solution"}
        library.update({name: LIBRARY_NAMES[name] for name in rest - program if name in LIBRARY_NAMES})
        strange = rest - program - set(library)
    else:
        program = rest if len(rest) == 1 else rest - set(LIBRARY_NAMES)
        library.update({name: LIBRARY_NAMES[name] for name in rest - program})
        strange = {name for name in program & bases if not name[:1].isupper()}
        if len(program) > 1:
            strange |= {name for name in program if name in _common_names()}
    if strange:
        raise DataError(
            f"The tests in a ground truth of code use {_listed(strange)}, which they neither define nor import: "
            f"{code[:200]!r}. Define it in the tests, or, if it is the program's, name it in `fn_name`."
        )
    if not program:
        raise DataError(
            f"The tests in a ground truth of code use no name of the program (fn_name: {_listed(fn_names) or 'none'}): "
            f"{code[:200]!r}."
        )
    caught = [node.type for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) and node.type is not None]
    if own := {node.id for kind in caught for node in ast.walk(kind) if isinstance(node, ast.Name)} & program:
        raise DataError(
            f"The tests in a ground truth of code catch {_listed(own)}, a class of the program; exceptions arrive as "
            "built-in ones. Catch the built-in class that it inherits from."
        )
    if not fn_names:
        _refuse_helpers(tree, {name for name in program if not name[:1].isupper()})
    return sorted(program), library


def _refuse_running(tree: ast.AST) -> None:
    """Raise if test code could run what a program answers."""
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & (RUNS_TEXT | RUNS_DATA)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            found |= {module for module in modules if module.partition(".")[0] in RUNS_DATA}
    if found:
        raise DataError(
            f"The tests in a ground truth of code use {_listed(found)}, which could run an answer of the program as "
            "code beside the verdict. Compare the answers themselves."
        )


def _free_names(code: str, tree: ast.AST) -> set[str]:
    top = symtable.symtable(code, "test", "exec")
    own = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            if node.module not in COMMON_MODULES:
                raise DataError(
                    f"The tests in a ground truth of code import * from {node.module}. Name what they need."
                )
            own |= set(_public(node.module))
    return {
        symbol.get_name()
        for table in _tables(top)
        for symbol in table.get_symbols()
        if symbol.is_referenced() and (symbol.is_global() or table is top)
    } - own - set(vars(builtins))  # fmt: skip


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def _public(module: str) -> list[str]:
    found = importlib.import_module(module)
    return list(getattr(found, "__all__", None) or [name for name in dir(found) if not name.startswith("_")])


@cache
def _common_names() -> frozenset[str]:
    return frozenset(name for module in COMMON_MODULES for name in _public(module))


def _refuse_helpers(tree: ast.Module, functions: set[str]) -> None:
    """Raise if one function of the program judges another: what it is given, or compared with, is the other's."""
    if len(functions) < 2:
        return
    defined = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    parameters = {argument.arg for function in defined for argument in function.args.args}
    held: dict[str, set[str]] = {}

    def results(node: ast.AST) -> set[str]:
        """The functions whose results take part in a value."""
        found = set()
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name):
                found |= {inner.func.id} & (functions | parameters)
            elif isinstance(inner, ast.Name):
                found |= held.get(inner.id, set())
        return found

    for _ in range(3):  # a value may go through several variables
        for target, value in _assignments(tree):
            for node in ast.walk(target):
                if isinstance(node, ast.Name):
                    held.setdefault(node.id, set()).update(results(value))
    for node in ast.walk(tree):
        pair: set[str] = set()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
            given = set[str]().union(*map(results, [*node.args, *(keyword.value for keyword in node.keywords)]))
            pair = {node.func.id, *given} if given - {node.func.id} else set()
        elif isinstance(node, ast.Compare):
            sides = [found for side in (node.left, *node.comparators) if (found := results(side))]
            pair = set[str]().union(*sides) if any(side != sides[0] for side in sides) else set()
        if pair:
            raise DataError(
                f"A test in a ground truth of code lets functions judge each other, {_listed(pair)}, and does not "
                f"define them: {ast.unparse(node)[:200]!r}. Define or import the helper in the tests, or, if the "
                "program has to define them all, list them in `fn_name`."
            )


def _assignments(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.AST]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from ((target, node.value) for target in node.targets)
        elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
            yield node.target, node.value
        elif isinstance(node, ast.For | ast.comprehension):
            yield node.target, node.iter


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
