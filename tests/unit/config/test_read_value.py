from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from paceline.config.field_rules import Names
from paceline.config.read_value import (
    MismatchError,
    NoPathError,
    UnknownChoiceError,
    how_to_quote,
    read_value,
    shown_text,
    wanted_text,
    with_local_paths,
)

Mode = Literal["sync", "streaming"]


@pytest.mark.parametrize(
    ("given", "hint", "read"),
    [
        ("1e-6", float, 1e-6),
        ("3", int, 3),
        (2, float, 2.0),
        (None, int | None, None),
        ("a", list[str], ["a"]),
        ([1, "2"], list[int], [1, 2]),
        ([0.9, 0.99], tuple[float, float], (0.9, 0.99)),
        ("never", str | list[int], "never"),
        ([1, 2], str | list[int], [1, 2]),
        ({"a": [1]}, dict[str, object], {"a": [1]}),
        ("sync", Mode, "sync"),
    ],
)
def test_a_value_is_read_as_the_type_of_its_key(given: object, hint: object, read: object) -> None:
    found = read_value(given, hint)
    assert (found, type(found)) == (read, type(read))


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (True, int),
        (1.5, int),
        (float("nan"), float),
        (2**70, int),
        ("x", float),
        (None, int),
        (3, str),
        ([1], tuple[int, int]),
        ({}, list[str]),
        (3, Mode),
    ],
)
def test_a_value_of_another_type_is_refused(given: object, hint: object) -> None:
    with pytest.raises(MismatchError):
        read_value(given, hint)


def test_a_text_that_is_none_of_the_choices_is_told_apart() -> None:
    with pytest.raises(UnknownChoiceError):
        read_value("asynchronous", Mode)


def test_paths_are_made_absolute_and_names_of_hubs_and_modules_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    here = str(tmp_path)
    assert with_local_paths(["a.parquet", "s3://bucket/b"], Names.PATH) == [f"{here}/a.parquet", "s3://bucket/b"]
    assert with_local_paths("org/model", Names.MODEL) == "org/model"
    assert with_local_paths("./model", Names.MODEL) == f"{here}/model"
    assert with_local_paths("mine", Names.MODULE) == f"{here}/mine.py"
    assert with_local_paths("package.module", Names.MODULE) == "package.module"
    assert with_local_paths("as it is", None) == "as it is"
    for impossible in ("x" * 5000, "a\0b"):
        with pytest.raises(NoPathError):
            with_local_paths(impossible, Names.PATH)


def test_messages_name_types_and_values_in_words() -> None:
    assert wanted_text(list[int] | None) == "a list, each item a whole number or null"
    assert wanted_text(Mode) == "one of sync, streaming"
    assert [shown_text(value) for value in (None, "3", 2**70)] == ["null", "'3' (str)", "1.18e+21, which is too large"]
    assert how_to_quote("trainer.project_name", 3, str) == (
        """ On the command line, quote it twice: "trainer.project_name='3'"."""
    )
    assert how_to_quote("trainer.nnodes", "3", int) == ""
