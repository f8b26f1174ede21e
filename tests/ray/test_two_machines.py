"""A cluster as docs/cluster.md starts it by hand, with a token, on two machines that each have an address."""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.in_process import train_in_process
from tests.namespaces import PORT, RAY, Machine, can_make_namespaces, two_machines
from tests.runs import as_overrides, base_config, make_material, results

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_make_namespaces(), reason="makes network namespaces, which takes root and iproute2"),
]
PATIENCE_SECONDS = 300
STEPS = {"trainer__total_training_steps": 6, "trainer__save_freq": 1}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two machines with one home folder, on which there is a token, and Ray on both."""
    variables = {"HOME": str(tmp_path / "home"), "RAY_AUTH_MODE": "token"}
    # Ray's folder has sockets in it, whose paths must be short.
    with tempfile.TemporaryDirectory() as folder, two_machines(**variables) as (first, second):
        (tmp_path / "home").mkdir()
        output = tmp_path / "ray.txt"
        assert first.run([*RAY, "get-auth-token", "--generate"], output) == 0
        head = ["start", "--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}"]
        assert first.run([*RAY, *head, *node_arguments(first)], output) == 0, output.read_text()
        join(second, first, output)
        yield first, second


def node_arguments(machine: Machine) -> list[str]:
    return [f"--node-ip-address={machine.address}", "--num-cpus=1", "--disable-usage-stats"]


def join(machine: Machine, first: Machine, output: Path) -> None:
    arguments = ["start", f"--address={first.address}:{PORT}", *node_arguments(machine)]
    assert machine.run([*RAY, *arguments], output) == 0, output.read_text()


def command(first: Machine, material: Path, run_dir: Path, **changes: object) -> list[str]:
    split = {"trainer__placement__name": "split", "trainer__nnodes": 2, "trainer__n_gpus_per_node": 1}
    config = base_config(material, run_dir, **STEPS, **split, **changes)
    address = f"+ray_kwargs.ray_init.address={first.address}:{PORT}"
    return [sys.executable, "-m", "paceline.trainer.main_ppo", *as_overrides(config), address]


def test_a_cluster_asks_for_its_token_and_the_message_says_how_to_give_it(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    first, second = machines
    output = tmp_path / "refused.txt"
    words = command(first, make_material(tmp_path / "material"), tmp_path / "run")
    assert second.run(words, output, RAY_AUTH_MODE="disabled") == 2, output.read_text()
    text = output.read_text()
    assert "Traceback" not in text
    assert re.search(r"refuses this command: .*[Tt]oken", text)
    assert "RAY_AUTH_MODE=token" in text
    assert "~/.ray/auth_token" in text


def test_a_run_survives_a_cut_link_and_a_lost_machine_and_its_driver_is_where_it_was_typed(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    first, second = machines
    material, run_dir, output = make_material(tmp_path / "material"), tmp_path / "run", tmp_path / "run.txt"
    restarts = {"trainer__max_restarts": 2, "trainer__heartbeat_timeout_seconds": 20}
    process = first.start(command(first, material, run_dir, **restarts), output)
    train_in_process(base_config(material, tmp_path / "alone", **STEPS))

    def wait_for(condition) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)

    wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(results(run_dir)) > 2)
    titles = {pid: Path(f"/proc/{pid}/cmdline").read_text(errors="replace") for pid in first.pids()}
    assert any(title.startswith("ray::TaskRunner") for title in titles.values()), titles
    second.cut()
    wait_for(lambda: "starting again from the last checkpoint" in output.read_text())
    second.kill()
    second.mend()
    join(second, first, tmp_path / "ray.txt")
    assert process.wait(timeout=PATIENCE_SECONDS) == 0, output.read_text()
    assert results(run_dir) == results(tmp_path / "alone")
