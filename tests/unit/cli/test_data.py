"""`paceline data` and the scripts that call it."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from paceline import cli
from paceline.cli.data import DATASETS
from paceline.data.sources import SOURCES

ROOT = Path(__file__).resolve().parents[3]
RECORDS = {
    "gsm8k": {"question": "1+1?", "answer": "#### 2"},
    "math": {"problem": "1+1?", "solution": r"\boxed{2}"},
    "hellaswag": {"ctx": "He", "endings": ["sits.", "runs.", "sees.", "is."], "label": 0},
    "full_hh_rlhf": {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"},
}
SCRIPTS = {"gsm8k": "gsm8k", "math": "math_dataset", "hellaswag": "hellaswag", "full_hh_rlhf": "full_hh_rlhf"}


def write(folder: Path, name: str, *more: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in (RECORDS[name], *more)))
    return path


def test_every_preparation_is_a_command():
    assert set(DATASETS) == set(SOURCES) == set(SCRIPTS)


@pytest.mark.parametrize("name", SOURCES)
def test_the_command_prepares_and_says_what_it_kept(tmp_path, capsys, name):
    write(tmp_path / "in", name)
    assert cli.main(["data", name, "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]) == 0
    header, counts, seconds = capsys.readouterr().out.splitlines()
    assert header.startswith(f"{name}: split")
    assert counts.split() == ["train", "1", "1", "0", str(tmp_path / "out" / "train.parquet")]
    assert seconds.endswith(" s")
    assert pq.read_table(tmp_path / "out" / "train.parquet").num_rows == 1


@pytest.mark.parametrize("name", SOURCES)
def test_the_script_does_the_same(tmp_path, monkeypatch, name):
    path = write(tmp_path / "in", name)
    script = ROOT / "examples" / "data_preprocess" / f"{SCRIPTS[name]}.py"
    monkeypatch.setattr(sys, "argv", [script.name, "--input", str(path), "--output", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(script), run_name="__main__")
    assert stop.value.code == 0
    [row] = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert row["data_source"] in SOURCES[name]["rl"].data_sources


@pytest.mark.parametrize("flag", ["--local_save_dir", "--local_dir"])
def test_names_of_options_that_people_know_are_taken(tmp_path, monkeypatch, flag):
    path, output = write(tmp_path / "in", "gsm8k"), tmp_path / "out"
    assert cli.main(["data", "gsm8k", "--local_dataset_path", str(path), flag, str(output)]) == 0
    asked = []
    monkeypatch.setattr("paceline.data.sources.download", lambda *arguments: asked.append(arguments) or path)
    assert cli.main(["data", "gsm8k", flag, str(output)]) == 0  # from the hub, as there
    assert len(asked) == 1
    with pytest.raises(SystemExit):
        cli.main(["data", "gsm8k", "--output", str(output)])


@pytest.mark.parametrize(("purpose", "columns"), [("sft", ["response"]), ("rm", ["chosen", "rejected"])])
def test_dialogues_for_other_training(tmp_path, purpose, columns):
    path = write(tmp_path / "in", "full_hh_rlhf")
    output = str(tmp_path / "out")
    assert cli.main(["data", "full_hh_rlhf", "--for", purpose, "--input", str(path), "--output", output]) == 0
    table = pq.read_table(tmp_path / "out" / "train.parquet")
    assert table.column_names == ["data_source", "prompt", *columns, "extra_info"]


def test_options_reach_the_preparation(tmp_path, capsys):
    path = write(tmp_path / "in", "math", {"problem": "?"})
    options = ["--split", "test", "--on-error", "skip", "--data-source", "lighteval/MATH"]
    assert cli.main(["data", "math", "--input", str(path), "--output", str(tmp_path / "out"), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:4] == ["test", "2", "1", "1"]
    assert lines[2].strip() == "dropped 1: no field 'solution'"
    [row] = pq.read_table(tmp_path / "out" / "test.parquet").to_pylist()
    assert row["data_source"] == "lighteval/MATH"


def test_a_malformed_row_ends_with_its_place_and_exit_code_1(tmp_path, capsys):
    path = write(tmp_path / "in", "gsm8k", {"question": "?"})
    with pytest.raises(SystemExit) as stop:
        cli.main(["data", "gsm8k", "--input", str(path), "--output", str(tmp_path / "out")])
    assert stop.value.code == 1
    assert f"{path}:2: no field 'answer'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["gsm9k"],
        ["gsm8k", "--output", "out"],
        ["gsm8k", "--input", "in"],
        ["gsm8k", "--input", "in", "--hub", "--output", "out"],
        ["gsm8k", "--input", "in", "--output", "out", "--for", "rm"],
        ["gsm8k", "--input", "in", "--output", "out", "--revision", "main"],
    ],
)
def test_bad_arguments_end_with_exit_code_2(arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main(["data", *arguments])
    assert stop.value.code == 2


def test_help_imports_nothing_heavy():
    code = """
import sys
from paceline.cli import main
try:
    main(["data", "gsm8k", "--help"])
except SystemExit:
    pass
print(sorted({"torch", "ray", "transformers", "hydra", "numpy", "pyarrow"} & set(sys.modules)), file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.startswith("usage: paceline data gsm8k")
    assert result.stderr == "[]\n"
