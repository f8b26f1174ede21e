"""Recipes: every command in them is one that its own checks take. tests/ray/test_recipes.py runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli import COMMANDS, recipe, smollm2_material
from paceline.cli.data import _parser as data_parser
from paceline.cli.eval import _parser as eval_parser
from paceline.cli.export import _parser as export_parser
from paceline.cli.recipe_material import make_sums
from paceline.config.describe import KINDS
from paceline.config.keys import is_known_key


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("name", recipe.recipe_names())
def test_the_commands_of_a_recipe_have_known_names_keys_and_options(name: str, short: bool) -> None:
    for command, *arguments in recipe.read_recipe(name).commands(Path("/here"), short=short):
        assert command in COMMANDS
        if command == "eval":
            eval_parser().parse_args(arguments)
            continue
        if command == "data":
            data_parser().parse_args(arguments)
            continue
        if command == "export":
            export_parser().parse_args(arguments)
            continue
        root = KINDS["ppo" if command in ("train", "distill") else command.replace("-", "_")].root
        assert [word for word in arguments if not is_known_key(word.partition("=")[0], root)] == []
        assert "{" not in " ".join(word for word in arguments if not word.startswith("reward_model.weights"))


def test_what_a_stage_reads_was_made_or_written_by_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2_material, "gguf_folder", lambda: Path())
    monkeypatch.setattr(smollm2_material, "convert_model", lambda source, folder: folder.mkdir())
    for name in recipe.recipe_names():
        made = recipe.read_recipe(name)
        folder = tmp_path / made.material
        recipe.run(recipe.Recipe("nothing", "", [], {}, made.material), folder, short=False)
        written: list[str] = []
        for _, *arguments in made.commands(folder, short=False):
            values = dict(word.lstrip("-").split("=", 1) for word in arguments if "=" in word)
            outputs = {key: values.pop(key) for key in ("trainer.default_local_dir", "output") if key in values}
            for value in values.values():
                if value.startswith(str(tmp_path)):
                    assert Path(value).exists() or value.startswith(tuple(written)), (name, value)
            written += outputs.values()


def test_the_material_is_the_same_at_every_time(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        make_sums(tmp_path / folder)
    files = [file.relative_to(tmp_path / "a") for file in (tmp_path / "a").rglob("*") if file.is_file()]
    assert len(files) > 8
    assert all((tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes() for file in files)


def test_a_stage_that_fails_ends_the_recipe(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    chain = recipe.Recipe("chain", "", [["recipe", "list"], ["recipe", "show", "nothing"], ["recipe", "list"]], {})
    assert recipe.run(chain, tmp_path, short=False) == 2
    said = capfd.readouterr()
    assert said.out.count("\nsums ") == 1
    assert "there is no recipe 'nothing'" in said.err
    assert "stage 2, paceline recipe, ended with code 2" in said.err
    assert recipe.run(recipe.Recipe("short", "", chain.stages[:1], {}), tmp_path, short=False) == 0
    assert "recipe short: complete" in capfd.readouterr().out


def test_list_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe.main(["list"]) == 0
    assert "sums" in capsys.readouterr().out
    assert recipe.main(["show", "dpo"]) == 0
    assert "paceline dpo \\\n    model.path=FOLDER/sft/model" in capsys.readouterr().out


def test_an_unknown_recipe_is_told_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        recipe.main(["show", "sum"])
    assert "there is no recipe 'sum'. Did you mean sums?" in capsys.readouterr().err


def test_data_of_the_users_own_take_the_place_of_made_ones(tmp_path: Path) -> None:
    own, made = (
        recipe.read_recipe("hh_rlhf").commands(tmp_path, short=True, raw=raw)[0] for raw in (Path("/hh"), None)
    )
    assert "--input=/hh" in own
    assert f"--input={tmp_path}/material/raw" in made
    with pytest.raises(SystemExit):
        recipe.main(["run", "sums", "--input", "/hh", "--output", str(tmp_path)])
    assert not list(tmp_path.iterdir())
