"""`make test-gpu`: what it runs, and what it says where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import gpu

ROOT = Path(__file__).parents[2]


def test_it_runs_every_file_that_is_marked_for_devices() -> None:
    marked = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests").rglob("test_*.py")
        if "mark.device" in file.read_text() and file != Path(__file__)
    }
    assert set(gpu.SUITES) == marked
    makefile = (ROOT / "Makefile").read_text()
    assert [suite for suite in gpu.SUITES if suite not in makefile and "vllm" not in suite] == []


def test_every_part_is_a_command_that_exists(tmp_path: Path) -> None:
    parts = gpu.parts(tmp_path, num_gpus=2)
    assert {"quickstart", "quickstart_split", "ppo_step", "test_vllm_sleep"} <= parts.keys()
    assert "quickstart_split" not in gpu.parts(tmp_path, num_gpus=1)


def test_a_part_that_fails_is_a_line_of_the_summary_and_its_output_is_kept(tmp_path: Path) -> None:
    assert gpu.run("words", ["sh", "-c", "echo hello; exit 3"], tmp_path).startswith("FAILED words")
    assert (tmp_path / "words.txt").read_text() == "hello\n"
    assert gpu.run("missing", ["no-such-program"], tmp_path).startswith("FAILED missing")
    assert gpu.run("fine", ["true"], tmp_path).startswith("ok     fine")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--output", str(tmp_path / "report")]) == 1
    assert capsys.readouterr().out == (
        f"make test-gpu: torch {torch.__version__} sees no GPU on this machine; nothing was run.\n"
    )
    assert not (tmp_path / "report").exists()
