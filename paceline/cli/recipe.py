"""`paceline recipe list|show|run NAME`: chains of commands that run here from nothing, with a model and data.

A recipe is a yaml in paceline/recipes: what it is `about`, the `stages` (each a command of paceline with arguments),
what makes each command `short`, and the `material` if that is not sums. In arguments {folder} is the recipe's folder,
{material} what was made for it, {raw} data of the user's own or made.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.cli import make_parser
from paceline.command_line import errors_as_exit_codes
from paceline.errors import ConfigError
from paceline.run_folder import RUNS_FOLDER
from paceline.text import did_you_mean

MATERIALS = {
    "sums": "paceline.cli.recipe_material:make_sums",
    "smollm2": "paceline.cli.smollm2_material:make_smollm2",
    "hh": "paceline.cli.hh_material:make_hh",
    "calculator": "paceline.cli.calculator_material:make_calculator",
}
"""By the `material` of a recipe, the function that makes it in a folder."""
RECIPES = Path(__file__).parents[1] / "recipes"
EXAMPLES = (
    "list",
    "show sums",
    "run sums --output ~/sums",
    "run dpo --output /tmp/dpo --short          a step or two of each stage",
)


@dataclass(frozen=True)
class Recipe:
    """A chain of commands."""

    name: str
    about: str
    stages: list[list[str]]
    short: dict[str, list[str]]
    material: str = "sums"

    def commands(self, folder: Path, *, short: bool, raw: Path | None = None) -> list[list[str]]:
        """The arguments of `paceline` for each stage. `raw` has data of the user's own, where a recipe takes some."""
        material = folder / "material"
        places = {"folder": folder, "material": material, "raw": raw or material / "raw"}

        def placed(word: str) -> str:
            for name, place in places.items():
                word = word.replace(f"{{{name}}}", str(place))
            return word

        added = self.short if short else {}
        return [[placed(word) for word in [*stage, *added.get(stage[0], ())]] for stage in self.stages]


def main(argv: Sequence[str]) -> int:
    """List, show or run. Gives the exit code."""
    arguments = _parser().parse_args(argv)
    with errors_as_exit_codes():
        if arguments.what == "list":
            print("\n".join(f"{name:<14} {read_recipe(name).about}" for name in recipe_names()))
            return 0
        recipe = read_recipe(arguments.name)
        if arguments.what == "show":
            print(_shown(recipe))
            return 0
        folder = (arguments.output or RUNS_FOLDER / "recipes" / recipe.name).expanduser()
        if arguments.input and not any("{raw}" in word for stage in recipe.stages for word in stage):
            raise ConfigError(
                f"--input has no part in the recipe {recipe.name}, which makes its own data. Leave it out."
            )
        return run(recipe, folder, arguments.short, arguments.input)
    return 0


def recipe_names() -> list[str]:
    """All there are."""
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


def read_recipe(name: str) -> Recipe:
    """The recipe of this name."""
    import yaml

    if name not in recipe_names():
        hint = did_you_mean(name, recipe_names())
        raise ConfigError(f"there is no recipe {name!r}.{hint} There are {', '.join(recipe_names())}.")
    content = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    return Recipe(name, **content)


def run(recipe: Recipe, folder: Path, short: bool, raw: Path | None = None) -> int:
    """Make the material, then one stage after the other, each in a process of its own. Gives the exit code.

    The same call goes on where it was stopped: a stage that is complete does nothing more.
    """
    folder = folder.absolute()
    module, _, function = MATERIALS[recipe.material].partition(":")
    getattr(importlib.import_module(module), function)(folder / "material")
    commands = recipe.commands(folder, short=short, raw=raw and raw.expanduser().absolute())
    for number, command in enumerate(commands, 1):
        print(f"\nstage {number} of {len(recipe.stages)}: paceline {shlex.join(command)}", flush=True)
        code = "import sys; from paceline.cli import main; sys.exit(main())"
        done = subprocess.run([sys.executable, "-c", code, *command])
        if done.returncode != 0:
            print(f"stage {number}, paceline {command[0]}, ended with code {done.returncode}", file=sys.stderr)
            return done.returncode
    print(f"\nrecipe {recipe.name}: complete ({folder})")
    return 0


def _shown(recipe: Recipe) -> str:
    lines = [f"{recipe.name}: {recipe.about}", ""]
    for command in recipe.commands(Path("FOLDER"), short=False):
        name, *words = (shlex.quote(word) for word in command)
        lines += [f"paceline {name} \\", *(f"    {word} \\" for word in words[:-1]), f"    {words[-1]}", ""]
    return "\n".join(lines).rstrip()


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "recipe", "Chains of commands from nothing to a trained model, small enough for a CPU.", EXAMPLES
    )
    what = parser.add_subparsers(dest="what", required=True)
    what.add_parser("list", help="names, and what each does")
    show = what.add_parser("show", help="the commands of a recipe")
    run_it = what.add_parser("run", help="run all of its commands")
    for one in (show, run_it):
        one.add_argument("name", metavar="NAME")
    run_it.add_argument("--output", type=Path, metavar="DIR", help="(runs/recipes/NAME)")
    run_it.add_argument("--input", type=Path, metavar="DIR", help="real data for hh_rlhf: a folder of its jsonl files")
    run_it.add_argument("--short", action="store_true", help="a step or two of each stage, to see that it works here")
    return parser
