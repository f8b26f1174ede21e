"""The Python of the pages runs as it stands there; what needs more than itself can at least be imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.engine import engine_interface as engines
from paceline.errors import SandboxUnavailableError
from paceline.rewards.score import code
from paceline.rollout import rollout_interface as rollouts
from tests.contract.engine_scenarios import make_mini_batch, policy_loss
from tests.tiny import make_tiny_model

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
BLOCKS = [
    pytest.param(str(page.relative_to(ROOT)), block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
]
ONLY_IMPORTED = {
    ("README.md", "def fit("): "compared with the loop in tests/ray/test_commands.py",
    ("README.md", "run_ppo("): "trains on Ray in tests/ray/test_commands.py",
    ("docs/data.md", "make_dataloader("): "has its files in tests/unit/data/test_docs.py",
    ("docs/rollout.md", "rollout.generate("): "has its model in tests/unit/rollout/test_docs.py",
    ("docs/rollout.md", "rollout.submit("): "has its model in tests/unit/rollout/test_docs.py",
    ("docs/distillation.md", "Distill("): "trains in tests/ray/test_distillation_runs.py",
    ("docs/supervised.md", "SFT("): "trains in tests/ray/test_notebook.py",
    ("docs/single_controller.md", "ray.init("): "runs on Ray in tests/ray/test_single_controller.py",
    ("docs/single_controller.md", "trainer.fit()"): "trains in tests/learn/test_docs.py",
}
"""A page, what one block of it contains, and why that is not executed here."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The home and working folder, with a model and two runs. What is registered as `mine` is forgotten."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for registry in (engines, rollouts):
        monkeypatch.delitem(registry._ENGINES._entries, "mine", raising=False)
    monkeypatch.setattr(code, "_given", None)
    make_tiny_model(tmp_path / "models" / "qwen")
    for run in ("a", "b"):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "metrics.jsonl").write_text('{"step": 1, "critic/score/mean": 0.5}\n')
    yield
    for registry in (engines, rollouts):
        registry._ENGINES._entries.pop("mine", None)


@pytest.mark.parametrize(("page", "block"), BLOCKS)
def test_a_block_runs(page: str, block: str, place: None) -> None:
    tree = ast.parse(block)
    if any(page == other and text in block for other, text in ONLY_IMPORTED):
        tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    # docs/backends.md speaks of a batch and a loss that there are.
    names: dict[str, Any] = {"__name__": "example", "data": make_mini_batch(), "loss_fn": policy_loss}
    try:
        exec(compile(tree, page, "exec"), names)
    except SandboxUnavailableError as error:
        pytest.skip(f"no isolation to be had here: {error}")


def test_what_is_only_imported_is_on_the_pages_and_runs_elsewhere() -> None:
    assert len(BLOCKS) > 2 * len(ONLY_IMPORTED)
    for (page, text), reason in ONLY_IMPORTED.items():
        blocks = [block for block in BLOCKS if block.values[0] == page and text in str(block.values[1])]
        assert len(blocks) == 1, f"{page}: {text}"
        [file] = re.findall(r"tests/\S+\.py", reason)
        assert Path(page).name in (ROOT / file).read_text(), f"{file} does not speak of {page}"
