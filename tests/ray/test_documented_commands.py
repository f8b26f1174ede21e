"""Every command on a page is run: here as it stands, by a test that is named, or not at all, and then it says why.

Commands are what stands indented; the scripts for Slurm and KubeRay in docs/cluster.md are not looked at.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import make_material

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("README.md"))]
PROGRAMS = r"(?:\.backends/megatron/bin/)?(?:python|paceline|make|pip|ray|touch|git|source|examples/\S+\.sh)"
COMMAND = re.compile(rf"    (?:\.venv/bin/)?({PROGRAMS} .+)$")

SMOLLM2 = "test_a_prepared_model_answers_and_takes_a_step_of_grpo_and_ppo_in_both_placements"
ELSEWHERE = {
    "make test": ".ci/run",
    "make backend-": "Makefile",  # test-backends makes them all
    "python examples/reward_model/demo.py": "test_the_reward_model_example_teaches_a_policy",
    "python examples/split_placement/main_ppo_split.py": "test_the_split_example_trains_on_two_pools",
    "python examples/smollm2_gsm8k/prepare.py": SMOLLM2,
    "examples/smollm2_gsm8k/run_grpo.sh ~/smollm2": SMOLLM2,
    "examples/smollm2_gsm8k/run_ppo.sh ~/smollm2": SMOLLM2,
    "paceline rollout --model ~/smollm2": SMOLLM2,
    "paceline report ~/smollm2/grpo": SMOLLM2,
    "paceline train ray_kwargs.ray_init.address=auto": (
        "test_a_split_run_over_two_nodes_survives_the_loss_of_one_and_equals_a_run_in_one_process"
    ),
    "python -m paceline.trainer.main_ppo trainer.n_gpus_per_node=1": (
        "test_the_documented_command_needs_no_other_overrides"
    ),
    ".backends/megatron/bin/paceline train": "test_a_run_trains_as_with_fsdp2_in_every_placement",
    "touch runs/paceline/ppo/stop": "test_a_run_that_was_asked_to_end_saves_and_goes_on_later",
}
"""What a command begins with, and who runs it, the longer ones with fewer steps."""
NOT_RUN = {
    "examples/smollm2_gsm8k/run_ppo.sh ~/smollm2 data.train_files": "minutes a step; docs/smollm2.md has runs by hand",
    "paceline COMMAND": "a pattern",
    "python -m paceline.trainer.main_ppo key=value": "a pattern",
    "git clone <this repository>": "needs to know where",
    "source .venv/bin/activate": "the tests have their environment",
    "pip install": "needs a package registry",
    "paceline data gsm8k --hub": "needs the hub",
    "ray start": "takes the machine's ports, and only `ray stop` ends it: with every other Ray there",
    "ray job": "needs the Ray of `ray start`",
    "python -m paceline.trainer.main_ppo ray_kwargs.ray_init.address=auto": "needs KubeRay",
}
SMALL = (
    "actor_rollout_ref.model.path=model data.train_files=train.parquet data.train_batch_size=4 "
    "actor_rollout_ref.actor.ppo_mini_batch_size=4 "
    "data.max_prompt_length=64 data.max_response_length=8 trainer.total_training_steps=1 "
    "trainer.default_local_dir=$(mktemp -d)"
)
"""For the dots at the end of a command. What stands before them wins: it is put behind."""
SHORTER = {
    'make quickstart ARGS="': "trainer.total_training_steps=2 trainer.save_freq=2 trainer.default_local_dir=quick",
    "paceline quickstart --placement": "trainer.total_training_steps=2",
    "paceline quickstart algorithm": "trainer.total_training_steps=2",
}
STANDS_FOR = {
    r"\$\(cat my_overrides\.txt\)": SMALL,
    r"^make quickstart$": "paceline quickstart",
    r'^make quickstart ARGS="(.*)"': r"paceline quickstart \1",
    r"\bDIR_OR_FILE\b|\bGSM8K_DIR\b": "gsm8k_original",
    r"\bHH_DIR\b": "hh_original",
    r"--output DIR\b": "--output prepared",
    r"\bBASE\b": "model",
    r"<run>": "runs/paceline/ppo",
    r"<folder>": "quick",
    r"^(python -m paceline\.trainer\.main_ppo|paceline train) (.*) \.\.\.$": rf"\1 {SMALL} \2",
}


def documented_commands() -> list[str]:
    """In the order of the pages. An explanation stands after two spaces, a comment after `#`."""
    found: dict[str, None] = {}
    for page in PAGES:
        text = re.sub(r" \\\n +", " ", page.read_text())
        for line in text.splitlines():
            if match := COMMAND.match(re.split(r"(?<=\S)  | #", line)[0]):
                found.setdefault(match[1].strip())
    return list(found)


def _entry(command: str, table: dict[str, str]) -> str | None:
    return next((value for start, value in table.items() if command.startswith(start)), None)


def commands_to_run() -> list[str]:
    return [command for command in documented_commands() if not _entry(command, NOT_RUN | ELSEWHERE)]


def test_the_pages_have_commands_and_the_tables_have_no_others():
    commands = documented_commands()
    assert len(commands_to_run()) > 20
    for start in [*ELSEWHERE, *NOT_RUN, *SHORTER]:
        assert any(command.startswith(start) for command in commands), f"{start} stands on no page"


def test_the_tests_that_run_other_commands_exist():
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    for name in ELSEWHERE.values():
        assert f"def {name}(" in tests if name.startswith("test_") else (ROOT / name).is_file()


def make_place(folder: Path) -> None:
    """A folder with all that the pages' commands suppose."""
    make_material(folder, hidden=128)  # heads of 32: vLLM has no smaller ones
    shutil.copytree(folder / "model", folder / "models" / "qwen")
    (folder / "examples").symlink_to(ROOT / "examples")
    dialogue = "\n\nHuman: Say {0}.\n\nAssistant: {1}"
    rows = {
        "gsm8k_original": [{"question": f"{i}+1=?", "answer": f"That is {i + 1}.\n#### {i + 1}"} for i in range(8)],
        "hh_original": [
            {"chosen": dialogue.format(i, f"yes {i}"), "rejected": dialogue.format(i, f"NO {i}")} for i in range(16)
        ],
    }
    for name, table in rows.items():
        (folder / name).mkdir()
        for split in ("train", "test"):
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))


def run(command: str, folder: Path) -> str:
    """As a user types it in that folder, which is also the home."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "HOME": str(folder), "RAY_ADDRESS": "local"}
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    make_place(folder)
    steps = "trainer.total_training_steps=40 trainer.save_freq=20"
    run(
        f"paceline train {SMALL} data.val_files=test.parquet {steps} trainer.default_local_dir=runs/paceline/ppo",
        folder,
    )
    for name in ("a", "b"):
        shutil.copytree(folder / "runs" / "paceline" / "ppo", folder / "runs" / name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", commands_to_run())
def test_a_command_runs_as_it_stands(command: str, place: Path) -> None:
    """In the order of the pages: some need what those before them have made."""
    spelled = command
    for pattern, replacement in STANDS_FOR.items():
        spelled = re.sub(pattern, replacement, spelled)
    output = run(f"{spelled} {_entry(command, SHORTER) or ''}", place)
    if command == "make quickstart":
        assert float(re.search(r"accuracy \S+ -> (\S+) in 50 steps", output)[1]) >= 0.9
