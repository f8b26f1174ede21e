"""Whatever a configuration or a data file holds: a plan or a message of ours, never a traceback, never a hang."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from types import FrameType
from typing import Any, Literal, Union, get_args, get_origin

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.config.checks import unused_settings
from paceline.config.keys import known_keys
from paceline.config.overrides import check_overrides
from paceline.errors import PacelineError
from paceline.trainer.main_ppo import TaskRunner, complete_config, look_ahead
from paceline.trainer.plan import dry_run_text
from tests.runs import as_overrides, base_config, make_material

SECONDS = 60
"""A case that takes longer hangs; the usual one takes some hundredths."""

LEAVES = [name for name, key in known_keys().items() if not key.is_section]
SECTIONS = [name for name, key in known_keys().items() if key.is_section]

TEXTS = [
    *("", " ", "x", "x.py", "a/b", "a/b/c", "/", "/proc/x", "/dev/null", "/dev/null/x", "~", "~nobody/x", ".", ".."),
    *("*", "[", "**/*", "a\0b", "\ud800", "\n", "\u00e4", "n" * 300, "n/" * 3000, "${trainer.seed}", "${oops}", "${"),
    *("${oc.env:NOTHING}", "???", "null", "True", "1", "1e400", "-0", "nan", "http://user:pw@host", "s3://bucket/x"),
    *("{train}", "{model}", "{text}", "{folder}"),
]
NUMBERS = [0, -1, 1, 2, 3, 7, 8, 64, 2**31, 10**12, 10**30, -(10**12), 0.0, -0.0, 0.5, 1.0, 1e-45, 1e-300, 1e39, 1e308]
NUMBERS += [float("inf"), float("-inf"), float("nan")]
NAMES = ["a", "runtime_env", "env_vars", "address"]
PLAIN = st.one_of(st.sampled_from(TEXTS), st.sampled_from(NUMBERS), st.booleans(), st.none())
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=2)),
    max_leaves=4,
)
KEYS = st.one_of(
    st.sampled_from(LEAVES), st.sampled_from(LEAVES), st.sampled_from(SECTIONS), st.sampled_from(["x", "trainer.x"])
)


def _of_its_type(hint: Any) -> st.SearchStrategy[Any]:
    """Odd values that pass the check of types, so that the others see them."""
    origin, members = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(_of_its_type, members))
    if origin is Literal:
        return st.sampled_from(members)
    if origin in (list, tuple):
        return st.lists(_of_its_type(members[0]), max_size=2)
    kinds: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.sampled_from([number for number in NUMBERS if isinstance(number, int)]),
        float: st.sampled_from(NUMBERS),
        str: st.sampled_from([*TEXTS, "grpo", "vllm", "wandb", "fsdp2", "hf", "gspo"]),
        type(None): st.none(),
    }
    return kinds.get(origin or hint, VALUES)


TYPED = st.sampled_from(LEAVES).flatmap(lambda name: st.tuples(st.just(name), _of_its_type(known_keys()[name].hint)))
CHANGES = st.one_of(
    st.lists(TYPED, min_size=1, max_size=3).map(dict), st.dictionaries(KEYS, VALUES, min_size=1, max_size=4)
)

CHAT = [{"role": "user", "content": "1+1="}]
CELLS = st.sampled_from(
    [
        *("1+1=", "", "9" * 99, "\n", "[{", "null", "openai/gsm8k", "x", None, 1, -1.5, True, b"\xff", float("nan")),
        *(CHAT, [], [{"role": "user"}], [{"role": 1, "content": "a"}], [None], [["a"]], {}, {"ground_truth": "2"}),
        *({"ground_truth": None}, {"ground_truth": 1, "style": "model"}, {"style": ["x"]}),
    ]
)
COLUMNS = ("prompt", "data_source", "reward_model", "extra_info", "ability", "index", "responses", "uid", "a.b")
GOOD = {"prompt": CHAT, "data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "2"}}
ROWS = st.lists(
    st.dictionaries(st.sampled_from(COLUMNS), CELLS, max_size=3).map(lambda odd: {**GOOD, **odd}),
    min_size=0,
    max_size=4,
)


@st.composite
def data_files(draw: st.DrawFn) -> tuple[str, bytes]:
    """The end of a name, and bytes: a table with odd cells, perhaps cut, or with some bytes changed."""
    suffix = draw(st.sampled_from([".parquet", ".parquet", ".jsonl", ".json", ".csv", ".txt", ""]))
    rows = draw(ROWS)
    if suffix == ".parquet":
        columns = {
            name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)
        }
        arrays = {}
        for name, cells in columns.items():
            try:
                arrays[name] = pa.array(cells)
            except pa.ArrowException:  # of several types: take the first cell's
                arrays[name] = pa.array(cells[:1] * len(cells))
        names = list(arrays)
        if names and draw(st.integers(0, 9)) == 0:
            names[-1] = names[0]  # twice
        sink = io.BytesIO()
        with contextlib.suppress(pa.ArrowException):  # such as a column of empty objects
            pq.write_table(pa.Table.from_arrays(list(arrays.values()), names), sink)
        content = sink.getvalue()
    elif suffix == ".csv":
        names = draw(st.lists(st.sampled_from([*COLUMNS, "reward_model.ground_truth", ""]), max_size=4))
        lines = [",".join(names), *(",".join(json.dumps(str(row.get(name))) for name in names) for row in rows)]
        content = "\n".join(lines).encode("utf-8", "replace")
    else:
        lines = [json.dumps(row, default=str) for row in rows]
        content = (f"[{','.join(lines)}]" if suffix == ".json" else "\n".join(lines)).encode()
    damage = draw(st.sampled_from(["none", "none", "none", "cut", "change", "nothing left"]))
    if damage == "cut":
        content = content[: draw(st.integers(0, len(content)))]
    elif damage == "change" and content:
        place = draw(st.integers(0, len(content) - 1))
        content = content[:place] + bytes([draw(st.integers(0, 255))]) + content[place + 1 :]
    elif damage == "nothing left":
        content = b""
    return suffix, content


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    import huggingface_hub.constants

    folder = make_material(tmp_path_factory.mktemp("fuzz"))
    (folder / "text.txt").write_text("x")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:1")  # nobody is there
        (folder / "here").mkdir()
        patch.chdir(folder / "here")
        yield folder


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def plan(config: dict[str, Any]) -> str:
    """What a dry run shows, or the message with which it ends."""
    try:
        with time_limit(SECONDS):
            cfg = complete_config(config)
            look_ahead(cfg, TaskRunner)
            unused_settings(cfg)
            return dry_run_text(cfg)
    except PacelineError as error:
        return str(error)


def base(material: Path) -> dict[str, Any]:
    config = base_config(material, material / "run", trainer__device="cpu")
    del config["custom_reward_function.path"]
    return config


def with_files(value: Any, material: Path) -> Any:
    names = {"{train}": "train.parquet", "{model}": "model", "{text}": "text.txt", "{folder}": "here"}
    if isinstance(value, list):
        return [with_files(item, material) for item in value]
    if isinstance(value, dict):
        return {key: with_files(item, material) for key, item in value.items()}
    return str(material / names[value]) if isinstance(value, str) and value in names else value


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Keys with dots as sections; an odd value in the place of a section stays."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, field = key.split(".")
        place = tree
        for section in sections:
            if not isinstance(place.get(section), dict):
                place[section] = {}
            place = place[section]
        place[field] = value
    return tree


def check_config(material: Path, changes: dict[str, Any]) -> None:
    config = base(material) | {key: with_files(value, material) for key, value in changes.items()}
    assert plan(nested(config | {"trainer.dry_run": True}))
    assert sorted(path.name for path in material.iterdir() if path.name not in ("run", "here")) == [
        "model", "reward.py", "test.parquet", "text.txt", "train.parquet",
    ]  # fmt: skip
    assert list((material / "here").iterdir()) == []


def check_file(material: Path, file: tuple[str, bytes], as_validation: bool) -> None:
    suffix, content = file
    path = material / f"odd{suffix}"
    path.write_bytes(content)
    try:
        key = "data.val_files" if as_validation else "data.train_files"
        assert plan(nested({**base(material), key: str(path)}))
    finally:
        path.unlink()


def fuzz(num_cases: int) -> Any:
    return settings(
        max_examples=num_cases, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


@fuzz(100)
@given(changes=CHANGES)
def test_any_configuration_ends_in_a_plan_or_a_message(material: Path, changes: dict[str, Any]) -> None:
    check_config(material, changes)


@fuzz(100)
@given(file=data_files(), as_validation=st.booleans())
def test_any_data_file_ends_in_a_plan_or_a_message(
    material: Path, file: tuple[str, bytes], as_validation: bool
) -> None:
    check_file(material, file, as_validation)


@pytest.mark.slow
@fuzz(2500)
@given(changes=CHANGES)
def test_many_configurations_end_in_a_plan_or_a_message(material: Path, changes: dict[str, Any]) -> None:
    check_config(material, changes)


@pytest.mark.slow
@fuzz(2500)
@given(file=data_files(), as_validation=st.booleans())
def test_many_data_files_end_in_a_plan_or_a_message(
    material: Path, file: tuple[str, bytes], as_validation: bool
) -> None:
    check_file(material, file, as_validation)


@fuzz(100)
@given(
    st.lists(st.one_of(st.text(max_size=20), st.builds(lambda key, value: f"{key}={value}", KEYS, PLAIN)), max_size=4)
)
def test_any_command_line_is_overrides_or_a_message(arguments: list[str]) -> None:
    try:
        ready = check_overrides(arguments)
    except PacelineError as error:
        ready = str(error).splitlines()[1:]
    assert ready or not arguments


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.train_files=/dev/null", "trainer.nnodes=1000000000000"],
        ["trainer.default_local_dir=/proc/x", "ray_kwargs.ray_init=[1]"],
        ["data.train_batch_size=1000000000000", "ray_kwargs.ray_init.runtime_env=x"],
    ],
)
def test_the_command_itself_ends_in_words(
    train_command: Callable[..., CompletedProcess[str]], material: Path, tmp_path: Path, overrides: list[str]
) -> None:
    done = train_command(*as_overrides(base(material)), "trainer.dry_run=True", *overrides, cwd=tmp_path)
    assert done.returncode in (0, 1, 2), done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert (done.stdout if done.returncode == 0 else done.stderr).strip()
    assert not any(tmp_path.iterdir())
