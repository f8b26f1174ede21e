"""`paceline report`: where the page goes, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from paceline import cli
from paceline.errors import DataError
from paceline.report.page.build import page_data
from paceline.report.page.read import Limits, read_run
from tests.pages import data_in


def test_the_command_writes_the_page_into_the_runs_folder(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run", ignore=shutil.ignore_patterns("*.pt", "*.safetensors"))
    assert cli.main(["report", str(run)]) == 0
    assert f"{run / 'report.html'} (" in capsys.readouterr().out
    assert cli.main(["report", str(run), "--output", str(tmp_path / "new/page.html")]) == 0
    page = (tmp_path / "new/page.html").read_text()
    shown = data_in(page)["runs"][0]
    assert ["state", "finished"] in shown["summary"]
    assert [checkpoint["step"] for checkpoint in shown["checkpoints"]] == [2, 4]
    assert "http:" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in page


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", str(tmp_path)])
    assert stop.value.code == 1
    assert (
        "is not a folder of a run: it has neither metrics.jsonl nor config.yaml, but notes.txt"
        in capsys.readouterr().err
    )
    (tmp_path / "empty").mkdir()
    for name, found in (("notes.txt", "it is a file"), ("empty", "it is empty"), ("none", "it does not exist")):
        with pytest.raises(DataError, match=f"is not a folder of a run: {found}"):
            read_run(tmp_path / name, "run", Limits())
    with pytest.raises(DataError, match="named twice"):
        page_data([tmp_path, tmp_path])


def test_a_page_that_can_not_be_written_is_told_in_words(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for output, words in ((tmp_path, "is a folder. Give a file in it"), (tmp_path / "file/x.html", "can't be made")):
        with pytest.raises(SystemExit):
            cli.main(["report", str(finished_run), "--output", str(output)])
        assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_live_page_is_served_until_ctrl_c(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.report.page.page_server import PageServer

    served: list[PageServer] = []

    def press_ctrl_c(server: PageServer) -> None:
        served.append(server)
        with pytest.raises(SystemExit):
            cli.main(["report", str(finished_run), "--serve", "--port", str(server.server_port)])
        raise KeyboardInterrupt

    monkeypatch.setattr(PageServer, "serve_forever", press_ctrl_c)
    assert cli.main(["report", str(finished_run), "--serve"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == served[0].address
    assert f"--port {served[0].server_port} can't be served on" in printed.err
    assert served[0].is_closing.is_set()
    with pytest.raises(SystemExit):
        cli.main(["report", str(finished_run / "checkpoints"), "--serve"])
    assert "has neither metrics.jsonl nor config.yaml" in capsys.readouterr().err
