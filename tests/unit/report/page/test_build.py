from __future__ import annotations

import json
import shutil
from pathlib import Path

from paceline.report.page.build import differences, page_data, render
from tests.pages import data_in


def test_secrets_of_the_configuration_are_masked(finished_run: Path, tmp_path: Path) -> None:
    text = (finished_run / "config.yaml").read_text()
    secret = text.replace("ray_init: {}", "ray_init: {runtime_env: {env_vars: {WANDB_API_KEY: abc123}}}")
    assert secret != text
    (tmp_path / "config.yaml").write_text(secret)
    page = render(page_data([tmp_path]))
    assert "WANDB_API_KEY: '***'" in page
    assert "abc123" not in page


def test_no_text_of_a_run_ends_the_script(finished_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    evil = "</script><script>window.pwned = 1</script>{{data}}\u2028"
    with (run / "samples/4.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "training", "prompt": evil, "response": evil, "score": 1}) + "\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, evil: 1.0}) + "\n")
    page = render(page_data([run]))
    assert page.count("</script>") == render(page_data([finished_run])).count("</script>")
    assert data_in(page)["runs"][0]["samples"][-1]["rows"][-1]["response"] == evil


def test_runs_are_told_apart_by_what_differs_in_their_configuration() -> None:
    def rows(**values: str) -> list[tuple[str, str, str, bool]]:
        return [(key.replace("__", "."), value, "", True) for key, value in values.items()]

    first = rows(data__train_files="/a/x.parquet", actor__lr="1", critic__lr="1", trainer__default_local_dir="a")
    second = rows(data__train_files="/b/x.parquet", actor__lr="2", critic__lr="3", trainer__default_local_dir="b")
    assert differences([first, second]) == ["actor.lr=1, critic.lr=1", "actor.lr=2, critic.lr=3"]
    assert differences([first, first]) == ["", ""]
    many = [rows(**{f"k{number}": value for number in range(9)}) for value in "ab"]
    assert differences(many)[0] == "k0=a, k1=a, k2=a, 6 more"
