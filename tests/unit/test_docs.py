"""What the documentation quotes is what the code says. `tests/contract/test_site.py` builds it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.config import ROOTS
from paceline.config.describe import render_verl_keys
from paceline.config.keys import known_keys

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
KEYS = {name for root in ROOTS for name in known_keys(root)}


def test_the_readme_is_short_and_says_early_what_was_never_run():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    (said,) = [number for number, line in enumerate(lines) if "Never run on a GPU" in line]
    assert said < 10


def test_messages_of_troubleshooting_are_those_of_the_code():
    page = (DOCS / "troubleshooting.md").read_text()
    messages = re.findall(r"\*\*`([^`]+)`\*\*", page)
    assert len(messages) > 25
    said = "\n".join(_texts_of_the_code())
    assert [message for message in messages if message not in said] == []


def _texts_of_the_code() -> list[str]:
    """Every string of the package but docstrings; of an f-string the literal parts, with {} for the others."""
    texts = []
    for file in (ROOT / "paceline").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}  # a string that nothing is done with
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
                texts.append("".join(map(str, parts)))
    return texts


def test_keys_that_are_said_to_be_those_of_verl_exist():
    page = (DOCS / "coming_from_verl.md").read_text()
    table = page.split("## The same keys")[1].split("## Other defaults")[0]
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:3]] for line in table.splitlines() if line.startswith("| `")
    ]
    named = [f"{section}.{key.strip(' `')}" for section, keys in rows for key in keys.split(",")]
    assert len(named) > 120
    assert [key for key in named if key not in KEYS] == []


def test_the_page_of_verls_keys_is_what_the_table_says():
    assert (DOCS / "verl_keys.md").read_text() == render_verl_keys(), "run python -m paceline.config.describe verl"


@pytest.mark.parametrize("page", sorted([*DOCS.rglob("*.md"), ROOT / "README.md"]), ids=lambda page: page.name)
def test_keys_in_commands_exist(page: Path):
    """`section.key=value` in a page is a key that can be set."""
    sections = {key.split(".")[0] for key in KEYS}
    asked = re.findall(r"(?<![\w./{-])([a-z_]+(?:\.[a-z_0-9]+)+)=", page.read_text())
    unknown = [key for key in asked if key.split(".")[0] in sections and key not in KEYS and not _is_open(key)]
    assert unknown == []


def _is_open(key: str) -> bool:
    """Whether it is below a key that takes a section of the user's own, or stands on a page as a mistake."""
    parents = [key.rsplit(".", count)[0] for count in range(1, key.count("."))]
    return any(
        parent in KEYS and parent.endswith(("ray_init", "vllm", "kwargs", "weights", "teacher_models"))
        for parent in parents
    )


def _commands(program: str) -> list[list[str]]:
    """What follows the program's name on each line of a page that calls it."""
    pages = [*DOCS.rglob("*.md"), ROOT / "README.md", *(ROOT / "examples").rglob("README.md")]
    pattern = rf"^(?:    |\| `|`)(?:\S*/bin/)?{program} ([^`\n|]+)"
    return [
        line.split("  ")[0].split() for page in pages for line in re.findall(pattern, page.read_text(), re.MULTILINE)
    ]


def test_options_of_the_commands_on_the_pages_exist():
    commands = [words for words in _commands("paceline") if words[0] != "COMMAND"]
    assert len(commands) > 25
    asked = {(_command(words), word.split("=")[0]) for words in commands for word in words if word.startswith("--")}
    assert len(asked) > 8
    helps = {command: _help(command) for command in {command for command, _ in asked}}
    hydras = ("--help", "--cfg")
    assert [pair for pair in sorted(asked) if pair[1] not in helps[pair[0]] and pair[1] not in hydras] == []


def _command(words: list[str]) -> tuple[str, ...]:
    return tuple(words[:2]) if words[0] == "data" else (words[0],)


def _help(command: tuple[str, ...]) -> str:
    code = "import sys; from paceline.cli import main; sys.exit(main())"
    shown = subprocess.run([sys.executable, "-c", code, *command, "--help"], capture_output=True, text=True)
    assert shown.returncode == 0, f"paceline {command}: {shown.stderr}"
    return shown.stdout


def test_make_targets_of_the_pages_exist():
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets |= {f"backend-{name}" for name in ("veomni", "megatron", "torchtitan")}
    asked = {words[0] for words in _commands("make")}
    assert len(asked) >= 5
    assert asked <= targets
