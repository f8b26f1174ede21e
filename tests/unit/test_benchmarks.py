import importlib
import subprocess
import sys

import pytest

import benchmarks.__main__ as bench
from benchmarks import transport


def answer_with(monkeypatch, returncode):
    """Benchmarks end with this at once; other commands, such as git, run as ever."""
    real = subprocess.run

    def run(command, **options):
        if "-m" in command:
            return subprocess.CompletedProcess(command, returncode)
        return real(command, **options)

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.parametrize("name", [*bench.BENCHMARKS, "placements", "pictures", "scale", "__main__"])
def test_every_benchmark_tells_what_it_does(name, monkeypatch, capsys):
    module = importlib.import_module(f"benchmarks.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    assert module.__doc__.splitlines()[0] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["--output", "docs/measured.md"], "`make bench`"),
        (["startup"], "`python -m benchmarks startup`"),
        ([], "`python -m benchmarks`"),
    ],
)
def test_the_page_names_the_command_that_wrote_it(arguments, command, tmp_path, monkeypatch, capsys):
    answer_with(monkeypatch, 0)
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    assert bench.main() == 0
    out = capsys.readouterr().out
    assert f"{command} wrote this page" in out
    assert ("- Not run: agent_waits, controller, data," in out) == (arguments == ["startup"])


@pytest.mark.parametrize(("returncode", "left"), [(1, True), (0, False)])
def test_a_failed_part_leaves_an_existing_page_alone(returncode, left, tmp_path, monkeypatch, capsys):
    answer_with(monkeypatch, returncode)
    output = tmp_path / "measured.md"
    output.write_text("a whole page")
    monkeypatch.setattr(sys, "argv", ["benchmarks", "startup", "--output", str(output)])
    assert bench.main() == returncode
    assert (output.read_text() == "a whole page") == left
    printed = capsys.readouterr()
    assert "# Measured" in printed.out
    assert (f"These benchmarks failed: startup. Nothing was written to {output}." in printed.err) == left


def test_the_page_has_the_versions_of_the_peers_that_are_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    monkeypatch.setattr(bench, "PEERS", {"pytest": ("ppo_step",), "missing": ("transport",)})
    python = tmp_path / ".peers" / "pytest" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # Not a link: this interpreter finds its packages by the place that it is started from.
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (line,) = bench.peer_versions(bench.BENCHMARKS)
    assert line.startswith(f"In an environment of its own: pytest {pytest.__version__}, torch ")
    assert list(bench.peer_versions(["startup"])) == []


def test_packages_take_turns_through_ray_and_numpy_is_the_one_beside_paceline(tmp_path, monkeypatch, capsys):
    order = []

    def measured(package, sizes, repeats):
        order.append(package)
        values = [2.0, 2.0] if package == "paceline" else [5.0, 5.0]
        own = [value * len(package) for value in values]
        return {"16 MB through Ray, send": {"numpy": values, "tensors": values, f"{package}'s DataProto": own}}

    monkeypatch.setattr(transport, "measured_apart", measured)
    monkeypatch.setattr(transport, "VERL_PYTHON", tmp_path)
    monkeypatch.setattr(sys, "argv", ["transport", "--rounds", "2"])
    transport.main()
    assert order == ["verl", "paceline", "paceline", "verl"]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [(line[0], line[-1]) for line in lines[:2]] == [("numpy", "8.00"), ("tensors", "8.00")]
    assert lines[3] == ["verl's", "DataProto", "20", "20", "..", "20", "0.80"]
    assert "took 4.00 times as long as numpy" in " ".join(lines[4])
