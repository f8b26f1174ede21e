from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small real run in split placement, with checkpoints of steps 2 and 4; its data beside it."""
    from tests.in_process import train_in_process
    from tests.runs import base_config, make_material

    folder = tmp_path_factory.mktemp("finished")
    changes = {"trainer.placement.name": "split", "trainer.n_gpus_per_node": 2}
    config = base_config(make_material(folder), folder / "run", trainer__save_freq=2, trainer__test_freq=2, **changes)
    train_in_process(config)
    return folder / "run"
