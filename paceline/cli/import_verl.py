"""`paceline import-verl SCRIPT`: a launch script of verl's as our command, with what became of each of its keys.

The script is read, not run. Several scripts, or a JSON file that has lists of overrides by name, give a line each.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.cli import make_parser
from paceline.cli.shell_script import Script, read_script
from paceline.command_line import errors_as_exit_codes
from paceline.config.checks import all_problems
from paceline.config.dialect.translation import Note, notes_text, rule_for
from paceline.config.load import read_config
from paceline.config.machine_problems import MachineProblem
from paceline.config.secrets import masked_command
from paceline.errors import ConfigError

EXAMPLES = (
    "run_qwen3_8b.sh",
    "run_qwen3_8b.sh > run.sh                          a script that runs here",
    "run_qwen3_8b.sh --set NNODES=2 -- trainer.save_freq=10    variables, and what $@ stands for",
    "scripts/*.sh                                      a line for each, and counts",
)
_ENTRY = re.compile(r"[\w.]*\bmain_ppo\w*|[\w.]*(?:verl|recipe)[\w.]*main\w*")
_INNER = re.compile(r"\s-m\s+\S*main_ppo")
_FILE_ENTRY = re.compile(r".*\bmain_\w+\.py")


@dataclass
class Imported:
    """One launch, as our configuration."""

    name: str
    overrides: list[str]
    """As the script has them."""
    command: list[str] = field(default_factory=list)
    """Ours: the same without keys of verl's, those that are refused last."""
    notes: list[Note] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What is refused, and what does not fit; files and packages that are not on this machine are left out."""

    @property
    def unknown(self) -> list[str]:
        return [problem for problem in self.problems if " is not a key" in problem]

    @property
    def kind(self) -> str:
        """text, images or megatron: what the run is for."""
        text = " ".join(self.overrides)
        if re.search(r"\bmegatron\b|_megatron_|megatron\.", text):
            return "megatron"
        has_images = re.search(r"data\.(image|video|audio)_|model\.path=\S*(VL|[Oo]mni|-o-|[Vv]ision)|geo3k", text)
        return "images" if has_images else "text"


def main(argv: Sequence[str]) -> int:
    """Print the command and the list. Gives the exit code: 1 if something is refused or unknown."""
    argv, rest = _split(list(argv))
    parser = make_parser(
        "import-verl", "Read launch scripts of verl's: our command, and what became of each key.", EXAMPLES
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="SCRIPT", help="a launch script, or overrides by name as JSON"
    )
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a variable of the script's")
    arguments = parser.parse_args(argv)
    variables = dict(pair.split("=", 1) for pair in arguments.set if "=" in pair)
    with errors_as_exit_codes():
        if len(arguments.files) == 1 and arguments.files[0].suffix != ".json":
            script = _read(arguments.files[0], rest, variables)
            imported = import_overrides(arguments.files[0].name, launch_of(arguments.files[0].name, script))
            sys.stdout.write(script_text(imported, script))
            return 1 if imported.problems else 0
        everything = [one for file in arguments.files for one in _imports(file, rest, variables)]
        sys.stdout.write(summary(everything))
    return 1 if any(one.problems for one in everything) else 0


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place], argv[place + 1 :]


def _read(file: Path, arguments: list[str], variables: dict[str, str]) -> Script:
    try:
        return read_script(file.read_text(), arguments, variables)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{file} can't be read: {error}. Give a launch script.") from error


def _imports(file: Path, arguments: list[str], variables: dict[str, str]) -> Iterable[Imported]:
    if file.suffix != ".json":
        try:
            return [import_overrides(file.name, launch_of(file.name, _read(file, arguments, variables)))]
        except ConfigError as error:
            return [Imported(file.name, [], problems=error.problems)]
    try:
        lists = json.loads(file.read_text())
        return [import_overrides(str(name), [str(item) for item in lists[name]]) for name in lists]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is not JSON with overrides by name: {error}.") from error


def launch_of(name: str, script: Script) -> list[str]:
    """The overrides of the command that starts a training."""
    for place, command in enumerate(script.commands):
        inner = next((word for word in command if _INNER.search(word)), None)
        if inner is not None:
            nested = read_script(inner)  # bash -c "...", behind srun or docker
            script.remarks += [remark for remark in nested.remarks if remark not in script.remarks]
            return launch_of(name, nested)
        for index, word in enumerate(command):
            after_m = index > 0 and command[index - 1] == "-m" and _ENTRY.fullmatch(word)
            if after_m or _FILE_ENTRY.fullmatch(word):
                if "main_ppo" not in word:
                    script.remarks.append(f"{word} is another entry than main_ppo: what it does otherwise is not here")
                lost = [later[0] for later in script.commands[place + 1 :] if re.match(r"\+*\w+(\.\w+)+=", later[0])]
                if lost:
                    script.remarks.append(
                        f"after a comment, the shell takes {', '.join(lost)} for commands of their own"
                    )
                return command[index + 1 :]
    raise ConfigError(
        f"{name} has no command with `python -m verl.trainer.main_ppo`. Give a script that starts a training."
    )


def import_overrides(name: str, overrides: list[str]) -> Imported:
    """What one list of overrides becomes here."""
    from paceline.config.overrides import override_tree  # loads Hydra, which help does not need

    result = Imported(name, overrides)
    readable: list[str] = []
    for override in map(_with_commands_quoted, overrides):
        try:
            override_tree([override])
        except ConfigError as error:
            result.problems += error.problems
        else:
            readable.append(override)
    asked, tree = override_tree(readable)
    reading = read_config(tree)
    result.notes = reading.notes
    found = all_problems(reading.cfg, reading.problems)
    result.problems += [problem for problem in found if not isinstance(problem, MachineProblem)]
    gone = {note.key for note in reading.notes}
    refused = {key for key in asked if key in reading.problems}
    result.command = [text for key, text in asked.items() if key not in gone and key not in refused]
    for note in reading.notes:
        result.command += [f"{key}={_as_typed(value)}" for key, value in note.settings.items()]
    result.command += [text for key, text in asked.items() if key in refused and key not in gone]
    return result


def _with_commands_quoted(override: str) -> str:
    """`key=a-$(date)` with its value in quotes: it is text to Hydra, and a command to the shell that runs ours."""
    key, equals, value = override.partition("=")
    is_bare = equals and _runs_a_command(value) and not re.search("[\"'\\[{]", value)
    return f"{key}='{value}'" if is_bare else override


def _runs_a_command(text: str) -> bool:
    return "$(" in text or "`" in text


def _quoted_for_shell(text: str) -> str:
    """As one word of a script; a command in it is left for the shell to run."""
    return f'"{text}"' if _runs_a_command(text) and not re.search(r'["\\]', text) else shlex.quote(text)


def _as_typed(value: object) -> str:
    """A value in Hydra's grammar."""
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return f"[{','.join(_as_typed(item) for item in value)}]"
    text = str(value)
    return (
        text
        if not isinstance(value, str) or re.fullmatch(r"[\w./:@%+-]+", text)
        else "'" + text.replace("'", "\\'") + "'"
    )


def _shown(override: str) -> str:
    """An override without a secret; a key that the table names in full, such as data.image_key, holds none."""
    rule = rule_for(override.partition("=")[0])
    return override if rule is not None and not rule.pattern.endswith("**") else masked_command([override])[0]


def script_text(imported: Imported, script: Script) -> str:
    """A shell script: our command, with all that is to be said of it in comments."""
    lines = [f"# From {imported.name}, by paceline import-verl."]
    exports = masked_command([f"{name}={value}" for name, value in script.exports.items()])
    lines += [f"# export {text}" for text in exports]
    command = " \\\n    ".join(["paceline train", *(_quoted_for_shell(_shown(text)) for text in imported.command)])
    lines += ["", command, ""]
    lines += [f"# {line}".rstrip() for line in notes_text(imported.notes).splitlines()]
    if imported.problems:
        lines += ["# Missing, or to be changed:", *(f"#   {problem}" for problem in imported.problems), "#"]
    if script.remarks:
        lines += ["# Of the script itself:", *(f"#   {remark}." for remark in script.remarks)]
    return "\n".join(lines).rstrip("#\n ") + "\n"


def summary(everything: Sequence[Imported]) -> str:
    """A line for each launch, and how many of each kind are taken."""
    width = max((len(one.name) for one in everything), default=0)
    lines = []
    for one in sorted(everything, key=lambda one: (len(one.problems), one.name)):
        state = "taken" if not one.problems else f"{len(one.problems)} problems, {len(one.unknown)} unknown keys"
        lines.append(f"{one.name:<{width}}  {one.kind:<8}  {len(one.overrides):>4} overrides  {state}")
    lines.append("")
    for kind in ("text", "images", "megatron"):
        of_kind = [one for one in everything if one.kind == kind]
        if of_kind:
            lines.append(f"{kind}: {sum(not one.problems for one in of_kind)} of {len(of_kind)} taken as they are")
    counts = Counter(note.kind for one in everything for note in one.notes)
    said = ", ".join(f"{counts[kind]} {kind}" for kind in ("renamed", "so anyway", "no effect"))
    unknown = sorted({problem.split()[0] for one in everything for problem in one.unknown})
    lines.append(f"keys of verl's: {said}; unknown: {', '.join(unknown) or 'none'}")
    return "\n".join(lines) + "\n"
