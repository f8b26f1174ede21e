"""The scripts of docs/cluster.md are parsed by what would read them, and run dry: no Slurm, no Kubernetes, no Ray."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from ray.dashboard.modules.job.cli import submit
from ray.scripts.scripts import start

from tests.runs import make_material

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "cluster.md").read_text()
NODES = ["gpu-7", "gpu-8", "gpu-9"]
SLURM = {"SLURM_JOB_NODELIST": "gpu-[7-9]", "SLURM_NNODES": str(len(NODES)), "SLURM_JOB_ID": "42"}
PROGRAM = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
if os.path.basename(sys.argv[0]) == "scontrol":
    print("gpu-7\\ngpu-8\\ngpu-9")
"""
"""Takes the place of Slurm's programs: notes what it is asked, and names the nodes."""


def block(language: str) -> str:
    [found] = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return found


def overrides_of(words: list[str]) -> list[str]:
    """What a command sets, without the dots that stand for more."""
    assert words[:3] == ["python", "-m", "paceline.trainer.main_ppo"] or words[:2] == ["paceline", "train"]
    return [word for word in words if "=" in word]


def dry_run(train_command: Any, folder: Path, overrides: list[str]) -> str:
    """What the command says of a run with these settings on other paths; only the cluster's own settings are kept."""
    make_material(folder)
    paths = [
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"data.train_files={folder / 'train.parquet'}",
        f"trainer.default_local_dir={folder / 'run'}",
        "data.max_prompt_length=64",
        "data.max_response_length=64",
    ]
    ours = [text for text in overrides if text.partition("=")[0] not in [path.partition("=")[0] for path in paths]]
    done = train_command(*ours, *paths, "trainer.device=cuda", "trainer.dry_run=True", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


@pytest.fixture(scope="module")
def slurm_calls(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What the batch script asks of Slurm, in its order."""
    folder = tmp_path_factory.mktemp("slurm")
    script, calls = folder / "job.sh", folder / "calls.jsonl"
    script.write_text(block("bash"))
    for name in ("scontrol", "srun", "sleep", "scancel", "paceline", "ray"):
        (folder / name).write_text(PROGRAM)
        (folder / name).chmod(0o755)
    environment = {**os.environ, **SLURM, "CALLS": str(calls), "PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-n", str(script)], check=True)
    subprocess.run(["bash", "-u", str(script)], check=True, env=environment, timeout=60)
    return sorted(map(json.loads, calls.read_text().splitlines()))


def test_the_slurm_script_starts_ray_on_every_node_and_the_command_on_the_first(slurm_calls: list[list[str]]) -> None:
    steps = [call for call in slurm_calls if call[0] == "srun"]
    heads = [call for call in steps if "--head" in call]
    joining = [call for call in steps if "ray" in call and "--head" not in call]
    training = [call for call in steps if "paceline" in call]
    assert [len(heads), len(joining), len(training)] == [1, 1, 1]
    assert len(steps) == 3
    assert ["scontrol", "show", "hostnames", "gpu-[7-9]"] in slurm_calls
    for [call] in (heads, training):
        assert {"--nodes=1", "--ntasks=1"} <= set(call)
        assert call[call.index("-w") + 1] == NODES[0]
    assert {"--nodes=2", "--ntasks=2", "--exclude=gpu-7", "--address=gpu-7:6379"} <= set(joining[0])
    assert "--overlap" in training[0]  # or it would wait for the node that Ray's own step has
    for call in (*heads, *joining):
        start.make_context("start", call[call.index("start") + 1 :])
        assert "--block" in call


def test_the_slurm_scripts_command_is_one_that_paceline_takes(
    slurm_calls: list[list[str]], train_command: Any, tmp_path: Path
) -> None:
    [call] = [call for call in slurm_calls if "paceline" in call]
    said = dry_run(train_command, tmp_path, overrides_of(call[call.index("paceline") :]))
    assert "colocated, 3 x 8 devices" in said


def test_the_slurm_scripts_nodes_have_the_devices_that_the_command_wants() -> None:
    header = {
        name: value
        for line in re.findall(r"^#SBATCH (.*)$", block("bash"), re.MULTILINE)
        for name, _, value in (option.partition("=") for option in line.split())
    }
    assert header["--gpus-per-node"] == re.search(r"trainer\.n_gpus_per_node=(\d+)", block("bash"))[1]
    assert header["--ntasks-per-node"] == "1"
    assert header["--signal"].startswith("B:TERM@")  # B: the shell has the trap, not the steps


def test_the_manifest_has_the_nodes_devices_and_folders_that_its_command_wants(
    train_command: Any, tmp_path: Path
) -> None:
    job = yaml.safe_load(block("yaml"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    overrides = overrides_of(shlex.split(spec["entrypoint"]))
    asked = dict(text.split("=", 1) for text in overrides)
    cluster = spec["rayClusterSpec"]
    assert cluster["rayVersion"] == version("ray")
    [workers] = cluster["workerGroupSpecs"]
    assert workers["replicas"] == int(asked["trainer.nnodes"])
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
        paths = [value for value in asked.values() if value.startswith("/")]
        assert len(paths) == 3
        assert all(path.startswith(f"{mounts['shared']}/") for path in paths)
        start.make_context("start", [f"--{name}={value}" for name, value in group["rayStartParams"].items()])
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == asked["trainer.n_gpus_per_node"]
    assert "colocated, 2 x 8 devices" in dry_run(train_command, tmp_path, overrides)


def test_the_commands_by_hand_are_ones_that_ray_takes() -> None:
    page = PAGE.replace("\\\n", " ")
    starts = re.findall(r"^ {4}ray start (.*)$", page, re.MULTILINE)
    assert len(starts) == 2
    for options in starts:
        start.make_context("start", shlex.split(options.replace("<first node>", "10.0.0.1")))
    [options] = re.findall(r"^ {4}ray job submit (.*)$", page, re.MULTILINE)
    context = submit.make_context("submit", shlex.split(options))
    assert isinstance(context, click.Context)
    assert overrides_of(list(context.params["entrypoint"])) == [
        "ray_kwargs.ray_init.address=auto",
        "trainer.nnodes=2",
    ]
