"""The settings on the pages about algorithms are ones that a run takes."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from paceline.catalog import ESTIMATORS, LOSSES
from paceline.config.checks import validate

DOCS = Path(__file__).parents[3] / "docs"
PAGES = sorted((DOCS / "algorithms").glob("*.md"))
BLOCK = re.compile(r"(?:^    [a-z_.]+=\S+\n)+", re.MULTILINE)


def _settings(page: Path) -> list[list[str]]:
    return [block.split() for block in BLOCK.findall(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_settings_of_a_page_are_a_good_configuration(page: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["x"]}), tmp_path / "train.parquet")
    common = [f"data.train_files={tmp_path}/train.parquet", "actor_rollout_ref.model.path=org/name"]
    blocks = _settings(page)
    assert blocks
    for block in blocks:
        validate(OmegaConf.from_dotlist([*common, *block]))


def test_there_is_a_page_for_everything_that_can_be_chosen() -> None:
    chosen = {line for page in PAGES for block in _settings(page) for line in block}
    assert {f"algorithm.adv_estimator={name}" for name in ESTIMATORS.built_in} <= chosen
    losses = set(LOSSES.built_in) - {"vanilla"}
    assert {f"actor_rollout_ref.actor.policy_loss.loss_mode={name}" for name in losses} <= chosen


def test_the_index_links_to_every_page() -> None:
    links = set(re.findall(r"\]\(algorithms/(\w+\.md)\)", (DOCS / "algorithms.md").read_text()))
    assert links == {page.name for page in PAGES}
