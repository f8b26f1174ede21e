from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from paceline.config import PPOConfig
from paceline.config.describe import KINDS, docstring, render_help, render_markdown, render_yaml
from paceline.config.keys import walk_keys
from paceline.config.load import HYDRA_KEYS, load_config, read_config_of, to_dict

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "paceline/trainer/config/ppo_trainer.yaml"


def test_the_shipped_yaml_has_the_keys_and_defaults_of_the_dataclasses():
    shipped = OmegaConf.to_container(OmegaConf.load(SHIPPED))
    assert isinstance(shipped, dict)
    assert {key: value for key, value in shipped.items() if key not in HYDRA_KEYS} == to_dict(PPOConfig())
    assert load_config(OmegaConf.load(SHIPPED)) == PPOConfig()


def test_every_key_of_the_shipped_yaml_has_a_comment_above_it():
    lines = SHIPPED.read_text().splitlines()
    ours = lines[lines.index("data:") :]
    bare = [line for before, line in pairwise(ours) if ":" in line and "#" not in line + before]
    assert bare == []


def test_every_key_has_a_docstring():
    assert [key.name for key in walk_keys() if not docstring(key)] == []


def test_the_shipped_yaml_is_what_the_dataclasses_say():
    assert SHIPPED.read_text() == render_yaml(), "run python -m paceline.config.describe yaml"


@pytest.mark.parametrize("kind", list(KINDS)[1:])
def test_the_yaml_of_other_kinds_is_what_their_dataclasses_say(kind: str):
    shipped, root = SHIPPED.with_name(f"{kind}_trainer.yaml"), KINDS[kind].root
    assert shipped.read_text() == render_yaml(kind), f"run python -m paceline.config.describe yaml {kind}"
    reading = read_config_of(root, OmegaConf.load(shipped))
    assert (reading.cfg, reading.problems) == (root(), {})
    assert [key.name for key in walk_keys(root()) if not docstring(key)] == []


def test_the_reference_page_is_what_the_dataclasses_say():
    page = (ROOT / "docs/config.md").read_text()
    assert page == render_markdown(), "run python -m paceline.config.describe markdown"


def test_help_has_every_key_with_its_default():
    text = render_help("prog")
    for key in walk_keys():
        if not key.is_section:
            assert f"  {key.name}=" in text
