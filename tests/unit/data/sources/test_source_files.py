"""Which files a dataset consists of, where they come from, and how they are read."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.data.sources import find_files
from paceline.errors import DataError
from tests.unit.data.sources.records import (
    GSM8K,
    MATH,
    run,
    write_lines,
)


def test_a_gzip_file_that_is_cut_off_is_reported_with_the_line(tmp_path):
    records = [{**GSM8K, "question": f"{os.urandom(2000).hex()}?"} for _ in range(50)]
    path = write_lines(tmp_path / "train.jsonl.gz", records)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=r"train\.jsonl\.gz:\d+: bad gzip") as error:
        run("gsm8k", path, tmp_path / "out")
    line = int(str(error.value).split(".gz:")[1].split(":")[0])
    assert 1 < line < 50
    report = run("gsm8k", path, tmp_path / "out", on_error="skip")["train"]
    assert report.kept == line - 1 == pq.read_metadata(report.path).num_rows
    assert dict(report.dropped) == {"bad gzip": 1}


@pytest.mark.parametrize("name", ["train.jsonl.gz", "train.parquet"])
def test_a_file_that_is_not_what_its_name_says_is_reported(tmp_path, name):
    (tmp_path / name).write_bytes(b'{"question": "a"}\n' * 10)
    with pytest.raises(DataError, match=r"train\.(jsonl\.gz:1|parquet, row 1): bad (gzip|parquet)"):
        run("gsm8k", tmp_path / name, tmp_path / "out")


def test_parquet_in_and_a_bad_row_named_by_its_number(tmp_path):
    path = tmp_path / "in" / "data" / "train-00000-of-00001.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist([GSM8K, {"question": "Why?", "answer": "Because."}]), path)
    with pytest.raises(DataError, match=r"train-00000-of-00001\.parquet, row 2: no '####'"):
        run("gsm8k", tmp_path / "in", tmp_path / "out")
    assert run("gsm8k", tmp_path / "in", tmp_path / "out", on_error="skip")["train"].kept == 1


def test_files_of_a_folder_are_joined_by_split_in_the_order_of_their_names(tmp_path):
    for number, name in enumerate(
        ["a/train.jsonl.gz", "b/train.jsonl", "b/test.jsonl", "c_valid.jsonl", "d/dev/x.jsonl"]
    ):
        write_lines(tmp_path / "in" / name, [{**GSM8K, "question": str(number)}])
    reports = run("gsm8k", tmp_path / "in", tmp_path / "out")
    assert {split: (report.kept, report.path.name) for split, report in reports.items()} == {
        "train": (2, "train.parquet"),
        "validation": (2, "validation.parquet"),
        "test": (1, "test.parquet"),
    }
    rows = pq.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert [(row["extra_info"]["question"], row["extra_info"]["index"]) for row in rows] == [("0", 0), ("1", 1)]


def test_files_that_hold_the_same_rows_again_or_no_split_are_left_out(tmp_path, caplog):
    folder = tmp_path / "in"
    for name in ("train.jsonl", "train_socratic.jsonl", "example_model_solutions.jsonl", ".cache/train.jsonl"):
        write_lines(folder / name, [GSM8K])
    with caplog.at_level(logging.INFO):
        assert run("gsm8k", folder, tmp_path / "out")["train"].read == 1
    assert "left out train_socratic.jsonl" in caplog.text
    assert "left out example_model_solutions.jsonl, which have no split in their names" in caplog.text

    for name in ("data/train-00000-of-00001.jsonl", "algebra/train-00000-of-00001.jsonl"):
        write_lines(tmp_path / "math" / name, [MATH])
    assert run("math", tmp_path / "math", tmp_path / "out")["train"].read == 1


def test_the_same_name_in_two_formats_is_refused(tmp_path):
    for name in ("train.jsonl", "train.jsonl.gz"):
        write_lines(tmp_path / "in" / name, [GSM8K])
    with pytest.raises(DataError, match="same rows in two formats"):
        run("gsm8k", tmp_path / "in", tmp_path / "out")


def test_a_name_without_a_split_takes_one_from_the_user(tmp_path):
    path = write_lines(tmp_path / "in" / "data.jsonl", [GSM8K])
    for given in (path, path.parent):
        with pytest.raises(DataError, match=r"data\.jsonl.* no split .*Set --split"):
            run("gsm8k", given, tmp_path / "out")
        assert list(run("gsm8k", given, tmp_path / "out", split="test")) == ["test"]


def test_a_name_with_two_splits_is_refused(tmp_path):
    with pytest.raises(DataError, match="more than one split: test, train"):
        run("gsm8k", write_lines(tmp_path / "train_test.jsonl", [GSM8K]), tmp_path / "out")


def test_a_missing_path_an_empty_folder_and_another_suffix_are_errors(tmp_path):
    with pytest.raises(DataError, match=r"no file or folder .*--hub"):
        find_files(tmp_path / "nothing")
    (tmp_path / "readme.txt").write_text("")
    with pytest.raises(DataError, match=r"it holds readme\.txt"):
        find_files(tmp_path)
    with pytest.raises(DataError, match=r"readme\.txt is no \.jsonl"):
        find_files(tmp_path / "readme.txt")


class Hub(BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as serves one dataset."""

    COMMIT = "a" * 40
    FILES: dict[str, bytes] = {}  # noqa: RUF012 - filled once
    requested: list[str] = []  # noqa: RUF012

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        api, files = "/api/datasets/openai/gsm8k", f"/datasets/openai/gsm8k/resolve/{self.COMMIT}/"
        if path.startswith(f"{api}/revision/"):
            siblings = [{"rfilename": name} for name in self.FILES]
            answer = json.dumps({"_id": "1", "id": "openai/gsm8k", "sha": self.COMMIT, "siblings": siblings}).encode()
        elif path.startswith(f"{api}/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": "b" * 40} for name, data in self.FILES.items()
            ]
            answer = json.dumps(entries).encode()
        elif path.startswith(files) and path.removeprefix(files) in self.FILES:
            self.requested.append(path.removeprefix(files))
            answer = self.FILES[path.removeprefix(files)]
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.send_header("ETag", '"0123456789"')
        self.send_header("X-Repo-Commit", self.COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """The address of a hub that has openai/gsm8k."""
    pq.write_table(pa.Table.from_pylist([GSM8K]), tmp_path / "served.parquet")
    data = (tmp_path / "served.parquet").read_bytes()
    Hub.FILES = {
        f"{folder}/{split}-00000-of-00001.parquet": data
        for folder in ("main", "socratic")
        for split in ("train", "test")
    }
    Hub.FILES["README.md"] = b"# GSM8K"
    Hub.requested = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def run_with_hub(tmp_path: Path, endpoint: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: the hub's address is read once, at import."""
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))},
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    command = ["data", "gsm8k", *arguments, "--output", str(tmp_path / "out")]
    code = f"import sys; from paceline.cli import main; sys.exit(main({command!r}))"
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_dataset_comes_from_the_hub_by_name(tmp_path, hub):
    done = run_with_hub(tmp_path, hub, "--hub")
    assert done.returncode == 0, done.stderr
    assert sorted(set(Hub.requested)) == ["main/test-00000-of-00001.parquet", "main/train-00000-of-00001.parquet"]
    for split in ("train", "test"):
        assert pq.read_table(tmp_path / "out" / f"{split}.parquet").num_rows == 1

    unknown = run_with_hub(tmp_path, hub, "--hub", "nobody/nothing")
    assert unknown.returncode == 1
    assert "has no public dataset 'nobody/nothing'" in unknown.stderr


def test_without_a_network_the_error_says_what_to_do(tmp_path):
    done = run_with_hub(tmp_path, "http://127.0.0.1:9", "--hub")  # nothing listens there
    assert done.returncode == 1
    assert "openai/gsm8k can't be downloaded" in done.stderr
    assert "--input" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
