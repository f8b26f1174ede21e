"""The columns of a batch, against the code: who writes and reads them exists, and their names are those that travel."""

from __future__ import annotations

import ast
from pathlib import Path

import paceline
from paceline.schema import COLUMNS, MODEL_INPUTS, REQUEST_COLUMNS


def test_everybody_who_writes_or_reads_a_column_is_a_function_or_class_of_the_package():
    defined = {
        node.name
        for file in Path(paceline.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    named = {name for column in COLUMNS.values() for name in (column.producer, *column.consumers)}
    assert named - defined == set()


def test_shapes_and_types_are_those_that_the_page_explains():
    assert {axis for column in COLUMNS.values() for axis in column.shape} == {"B", "P", "R", "P+R", "K"}
    assert all(column.shape[0] == "B" for column in COLUMNS.values())
    assert {column.dtype for column in COLUMNS.values()} == {"int64", "int32", "float32", "bool", "object"}


def test_what_a_model_and_a_rollout_are_given_are_columns():
    assert set(MODEL_INPUTS) | set(REQUEST_COLUMNS) <= COLUMNS.keys()
    assert {COLUMNS[name].producer for name in MODEL_INPUTS} == {"generate_sequences"}
