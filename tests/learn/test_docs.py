"""The run in one process of docs/single_controller.md, as it stands there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runs import make_material, read_metrics

PAGE = Path(__file__).parents[2] / "docs" / "single_controller.md"


def test_the_run_in_one_process_of_the_documentation_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_material(tmp_path)
    monkeypatch.chdir(tmp_path)
    # A device of its own is local: fsdp2 would leave a process group behind in this process.
    code = PAGE.read_text().split("## In one process")[1].split("```python\n")[1].split("```")[0]
    local = "keys += ['actor_rollout_ref.actor.strategy=local', 'critic.strategy=local']\nconfig ="
    exec(compile(code.replace("config =", local, 1), str(PAGE), "exec"), {"__name__": "__main__"})
    assert read_metrics(tmp_path / "run")[-1]["step"] == 1


def test_the_role_of_the_documentation_starts_and_answers(tmp_path: Path) -> None:
    import torch

    from paceline.protocol import DataProto
    from tests.in_process import build_in_process
    from tests.runs import base_config

    code = PAGE.read_text().split("## A role of your own")[1].split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {"__name__": "a_role"}
    exec(compile(code, str(PAGE), "exec"), names)
    trainer = build_in_process(base_config(make_material(tmp_path), tmp_path / "run"), names["Runner"])
    batch = DataProto.from_dict(tensors={"response_mask": torch.tensor([[1, 1, 0, 0, 0, 0, 0, 0], [1] * 8])})
    answer = trainer.worker_groups[names["MyRole"].Judge].judge(batch)
    assert answer.batch["brevity"].tolist() == [0.75, 0.0]
