"""Every key is read by code that acts on it, from the section that it stands in.

The package is read as text, and each expression is followed as far as names and annotations tell which section it is:
`config.actor_rollout_ref.rollout`, a local name for that, an attribute that was set to it, a parameter that was given
it, a parameter or a result annotated with the section's dataclass. Declaring, checking, describing and completing a
key is not reading it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, make_dataclass
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest

import paceline
from paceline.config import ROOTS, AnyRunConfig, DataConfig, PPOConfig
from paceline.config.keys import Key, walk_keys

PACKAGE = Path(paceline.__file__).parent
SAME_SECTION = ("replace",)
"""Functions whose result is the section that they are given first."""
WHOLE_SECTION = ("asdict", "vars")
"""Functions that take every key of a section."""
OF_CONTAINERS = ("get", "items", "values", "pop")

Value: TypeAlias = "Section | Instance | Text"
Values: TypeAlias = frozenset[Value]
NOTHING: Values = frozenset()


@dataclass(frozen=True)
class Section:
    """An expression that is a section of the configuration, by its name with dots; the whole has an empty name."""

    name: str


@dataclass(frozen=True)
class Instance:
    """An expression that is an object of a class of the package."""

    of: str


@dataclass(frozen=True)
class Text:
    """A text that stands in the code: `getattr(rollout, name)` reads the names that `name` can be."""

    text: str


@dataclass
class Program:
    """What is known of all modules together, by names: no class name occurs twice in the package."""

    root: object
    """The default configuration."""
    modules: list[ast.Module]
    """All of the package's."""
    acting: list[ast.Module]
    """Those that may read a key."""
    read: set[str] = field(default_factory=set)
    """Keys and sections that some code reads."""
    attributes: dict[tuple[str, str], Values] = field(default_factory=lambda: defaultdict(frozenset))
    """(class, attribute) to what it was set to."""
    passed: dict[ast.arg, Values] = field(default_factory=lambda: defaultdict(frozenset))
    """What the parameters without a telling annotation were given."""

    def __post_init__(self) -> None:
        self.keys: dict[str, Key] = {key.name: key for key in walk_keys(self.root)}
        self.sections = {"": type(self.root)} | {name: key.hint for name, key in self.keys.items() if key.is_section}
        self.sections_of: dict[str, set[Value]] = defaultdict(set)
        """Name of a dataclass, or of a base of one, to the sections that it is."""
        for name, kind in self.sections.items():
            for base in kind.__mro__:
                self.sections_of[base.__name__].add(Section(name))
        nodes = [node for module in self.modules for node in module.body]
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        self.classes = {node.name: node for node in classes if node.name not in self.sections_of}
        self.methods = {
            name: {one.name: one for one in node.body if is_function(one)} for name, node in self.classes.items()
        }
        self.functions = {node.name: node for node in nodes if is_function(node)}
        self.known_annotations: dict[ast.expr, Values] = {}
        self.aliases = {
            node.targets[0].id: {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
            for node in nodes
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and stands_for_types(node.value)
        }
        """Unions and type variables, with the names that they stand for."""

    def annotated(self, annotation: ast.expr | None) -> Values:
        """The sections and objects that a parameter, attribute or result of this type can be."""
        if annotation is None:
            return NOTHING
        if annotation not in self.known_annotations:
            names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
            while more := union(frozenset(self.aliases.get(name, ())) for name in names) - names:
                names |= more
            sections = union(frozenset(self.sections_of[name]) for name in names - {"object"})
            self.known_annotations[annotation] = sections | {Instance(name) for name in names & self.classes.keys()}
        return self.known_annotations[annotation]

    def attribute(self, value: Value, name: str) -> Values:
        """`value.name`; what is a key, or a section, is read by this."""
        if isinstance(value, Section):
            full = f"{value.name}.{name}".lstrip(".")
            if full not in self.keys:
                return NOTHING
            self.read.add(full)
            return frozenset({Section(full)}) if full in self.sections else NOTHING
        if not isinstance(value, Instance):
            return NOTHING
        if method := self.method(value, name):
            return self.annotated(method.returns)
        fields = [
            node.annotation
            for owner in self.with_bases(value.of)
            for node in owner.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name
        ]
        was_set = [self.attributes[owner.name, name] for owner in self.with_bases(value.of)]
        return union([*map(self.annotated, fields), *was_set])

    def method(self, value: Value, name: str) -> ast.FunctionDef | None:
        owners = self.with_bases(value.of) if isinstance(value, Instance) else ()
        found = (self.methods[owner.name].get(name) for owner in owners)
        return next((method for method in found if method is not None), None)

    def with_bases(self, name: str) -> Iterator[ast.ClassDef]:
        if name in self.classes:
            yield self.classes[name]
            for base in self.classes[name].bases:
                named = base.value if isinstance(base, ast.Subscript) else base  # Base[Argument]
                yield from self.with_bases(getattr(named, "id", ""))

    def follow(self) -> set[str]:
        """All keys that are read: attributes are followed until nothing new is found."""
        known = -1
        while known != (known := sum(map(len, [*self.attributes.values(), *self.passed.values()]))):
            for module in self.acting:
                Reader(self, {}).visit(module)
        return {name for name in self.read if name not in self.sections and self._parents_are_read(name)}

    def _parents_are_read(self, name: str) -> bool:
        """A function of an OptimConfig reads the critic's only if someone takes `optim` out of the critic's section."""
        parent = name.rpartition(".")[0]
        return not parent or (parent in self.read and self._parents_are_read(parent))


class Reader(ast.NodeVisitor):
    """Goes through one scope, with what its local names stand for."""

    def __init__(self, program: Program, names: dict[str, Values], owner: str | None = None) -> None:
        self.program, self.names, self.owner = program, dict(names), owner

    def generic_visit(self, node: ast.AST) -> None:
        for child in parts(node):
            self.visit(child)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            Reader(self.program, self.names, node.name).visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        inner = Reader(self.program, self.names)
        parameters = [*node.args.args, *node.args.kwonlyargs]
        for parameter in parameters:
            annotated = self.program.annotated(parameter.annotation)
            inner.names[parameter.arg] = annotated | self.program.passed[parameter]
        if self.owner is not None and parameters:
            inner.names[parameters[0].arg] = frozenset({Instance(self.owner)})
        for statement in node.body:
            inner.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.bind(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        self.bind_values(node.target, self.program.annotated(node.annotation) | self.values(node.value))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.bind(node.target, node.value)

    def visit_For(self, node: ast.For) -> None:
        self.bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp | ast.DictComp) -> None:
        for generator in node.generators:
            self.bind(generator.target, generator.iter)
        self.generic_visit(node)

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp  # noqa: N815
    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.values(node)
        inside: ast.expr = node
        while isinstance(inside, ast.Attribute):  # each of `a.b.c` was read by that
            inside = inside.value
        if not isinstance(inside, ast.Name):
            self.visit(inside)

    def visit_Call(self, node: ast.Call) -> None:
        if called(node) in WHOLE_SECTION and node.args:
            sections = [value.name for value in self.values(node.args[0]) if isinstance(value, Section)]
            self.program.read |= {key for key in self.program.keys for name in sections if key.startswith(f"{name}.")}
        for function, is_method in self.definitions(node):
            parameters = function.args.args[is_method:]
            by_name = {parameter.arg: parameter for parameter in [*parameters, *function.args.kwonlyargs]}
            for parameter, argument in zip(parameters, node.args, strict=False):
                self.program.passed[parameter] |= self.values(argument)
            for keyword in node.keywords:
                if keyword.arg in by_name:
                    self.program.passed[by_name[keyword.arg]] |= self.values(keyword.value)
        self.values(node)
        self.generic_visit(node)

    def bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, its_value in zip(target.elts, value.elts, strict=True):
                self.bind(one, its_value)
        else:
            self.bind_values(target, self.values(value))

    def bind_values(self, target: ast.expr, values: Values) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = values
        elif isinstance(target, ast.Tuple):
            for one in target.elts:
                self.bind_values(one, values)
        elif isinstance(target, ast.Attribute):
            for value in self.values(target.value):
                if isinstance(value, Instance):
                    self.program.attributes[value.of, target.attr] |= values

    def values(self, node: ast.expr | None) -> Values:
        """What an expression stands for; of a container, what its items stand for."""
        match node:
            case ast.Name():
                is_class = node.id in self.program.classes and node.id not in self.names
                return frozenset({Instance(node.id)}) if is_class else self.names.get(node.id, NOTHING)
            case ast.Attribute():
                return union(self.program.attribute(value, node.attr) for value in self.values(node.value))
            case ast.Call():
                return self.result(node)
            case ast.IfExp():
                return self.values(node.body) | self.values(node.orelse)
            case ast.BoolOp() | ast.Dict():
                return union(map(self.values, node.values))
            case ast.Tuple() | ast.List():
                return union(map(self.values, node.elts))
            case ast.ListComp() | ast.GeneratorExp():
                return self.values(node.elt)
            case ast.Constant(value=str(text)):
                return frozenset({Text(text)})
            case ast.Subscript() | ast.NamedExpr() | ast.Starred():
                return self.values(node.value)
        return NOTHING

    def result(self, call: ast.Call) -> Values:
        name = called(call)
        if name in SAME_SECTION:
            return self.values(call.args[0])
        if name == "cast":
            return self.program.annotated(call.args[0])
        if name == "getattr":
            names = [value.text for value in self.values(call.args[1]) if isinstance(value, Text)]
            return union(self.program.attribute(value, name) for value in self.values(call.args[0]) for name in names)
        if name in OF_CONTAINERS and isinstance(call.func, ast.Attribute):
            return self.values(call.func.value)
        if name in self.program.classes:
            return frozenset({Instance(name)})
        return union(self.program.annotated(function.returns) for function, _ in self.definitions(call))

    def definitions(self, call: ast.Call) -> Iterator[tuple[ast.FunctionDef, bool]]:
        """The functions that a call can mean, and whether each is a method."""
        name = called(call)
        if isinstance(call.func, ast.Attribute):
            methods = [self.program.method(value, name) for value in self.values(call.func.value)]
            yield from ((method, True) for method in methods if method is not None)
            if any(methods):
                return
        if name in self.program.classes and (method := self.program.method(Instance(name), "__init__")):
            yield method, True
        elif name in self.program.functions:
            yield self.program.functions[name], False


@cache
def parts(node: ast.AST) -> list[ast.AST]:
    """What a node is made of and may read a key; each is gone through several times."""
    nothing = ast.Name | ast.Constant | ast.expr_context | ast.operator | ast.cmpop
    return [child for child in ast.iter_child_nodes(node) if not isinstance(child, nothing)]


def called(call: ast.Call) -> str:
    """The last name of what is called."""
    return getattr(call.func, "attr", None) or getattr(call.func, "id", "")


def stands_for_types(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) or (isinstance(node, ast.Call) and called(node) == "TypeVar")


def union(values: Iterable[Values]) -> Values:
    return frozenset().union(*values)


def is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


@cache
def modules() -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}


def acting_modules() -> list[ast.Module]:
    """All but those of the configuration; of these, the functions that divide devices by it."""
    derived = modules()[PACKAGE / "config" / "derived.py"]
    dividing = [node for node in derived.body if is_function(node) and not completes_a_section(node)]
    outside = [module for file, module in modules().items() if PACKAGE / "config" not in file.parents]
    return [*outside, ast.Module(dividing, [])]


def completes_a_section(function: ast.FunctionDef) -> bool:
    return function.returns is not None and ast.unparse(function.returns).endswith("Config")


@cache
def unread_with_one_more() -> list[str]:
    """The keys that nothing reads, if `data` had a `temperature` as `actor_rollout_ref.rollout` has."""
    data = make_dataclass("DataConfig", [("temperature", float, 1.0)], bases=(DataConfig,), frozen=True)
    root = make_dataclass("PPOConfig", [("data", data, field(default_factory=data))], bases=(PPOConfig,), frozen=True)
    program = Program(root(), list(modules().values()), acting_modules())
    read = program.follow()
    return [name for name in program.keys if name not in program.sections and name not in read]


def test_every_key_is_read_from_its_own_section() -> None:
    assert set(unread_with_one_more()) <= {"data.temperature"}


@pytest.mark.parametrize("root", ROOTS[1:], ids=lambda root: root.__name__)
def test_every_key_of_training_on_texts_is_read(root: type[AnyRunConfig]) -> None:
    program = Program(root(), list(modules().values()), acting_modules())
    read = program.follow()
    assert [name for name in program.keys if name not in program.sections and name not in read] == []


def test_a_key_that_is_read_from_another_section_only_is_found() -> None:
    assert "data.temperature" in unread_with_one_more()
