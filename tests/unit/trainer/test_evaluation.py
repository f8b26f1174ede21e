from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import ConfigError
from paceline.trainer import evaluation
from paceline.trainer.evaluation import evaluate, summarize
from paceline.trainer.saved_policy import SamplingOptions, SavedPolicy


@pytest.fixture(scope="module")
def policy(material: Path) -> SavedPolicy:
    return SavedPolicy.open(str(material / "model"), None, SamplingOptions(max_tokens=3))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "RESPONSES_PER_PART", 4)


def ask(policy: SavedPolicy, material: Path, folder: Path, **changes: Any) -> list[dict[str, Any]]:
    prompts = policy.read_data(str(material / "test.parquet"), limit=5)
    return evaluate(policy, prompts, folder, {"model": "m", **changes}, n=2, seed=1)


@pytest.mark.parametrize("cut", [0, 1, 5, 17, 400, 700, 1300])
def test_what_was_interrupted_goes_on_and_ends_as_if_it_had_not_been(
    policy: SavedPolicy, material: Path, tmp_path: Path, cut: int
) -> None:
    whole = ask(policy, material, tmp_path / "whole")
    content = (tmp_path / "whole/responses.jsonl").read_bytes()
    assert len(whole) == 10
    ask(policy, material, tmp_path / "cut")
    (tmp_path / "cut/responses.jsonl").write_bytes(content[: min(cut, len(content) - 1)])
    assert ask(policy, material, tmp_path / "cut") == whole
    assert (tmp_path / "cut/responses.jsonl").read_bytes() == content


def test_what_is_complete_is_not_sampled_again(
    policy: SavedPolicy, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ask(policy, material, tmp_path)
    monkeypatch.setattr(policy, "answer", None)
    assert ask(policy, material, tmp_path) == first


def test_another_question_needs_another_folder(policy: SavedPolicy, material: Path, tmp_path: Path) -> None:
    ask(policy, material, tmp_path, seed=1)
    with pytest.raises(ConfigError, match=r"has answers to another question: seed was 1, is 2\. Give another --output"):
        ask(policy, material, tmp_path, seed=2)
    (tmp_path / "eval.json").write_text("[")
    with pytest.raises(ConfigError, match=r"eval\.json can't be read"):
        ask(policy, material, tmp_path, seed=1)
    (tmp_path / "eval.json").unlink()
    with pytest.raises(ConfigError, match=r"holds something else: it has no eval\.json"):
        ask(policy, material, tmp_path, seed=1)


def row(uid: str, acc: float | None, pred: str = "", source: str = "s") -> dict[str, Any]:
    return {"uid": uid, "data_source": source, "score": acc, "acc": acc, "pred": pred}


def test_figures_of_a_source_by_hand() -> None:
    rows = [row("a", 1.0, "4"), row("a", 0.0, "5"), row("a", 1.0, "4"), row("a", 0.0, "6")]
    rows += [row("b", 0.0, "1"), row("b", 0.0, "1"), row("b", 1.0, "2"), row("b", 0.0, "1")]
    rows += [row("c", None, source="without a rule")]
    metrics = summarize(rows, n=4, ks=[1, 2, 4])
    assert metrics["val-core/s/acc/mean@4"] == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert metrics["val-aux/s/acc/pass@1"] == pytest.approx((2 / 4 + 1 / 4) / 2)
    # Two of four at random: all wrong in 1 of 6 draws of a, in 3 of 6 draws of b.
    assert metrics["val-aux/s/acc/pass@2"] == pytest.approx((5 / 6 + 3 / 6) / 2)
    assert metrics["val-aux/s/acc/pass@4"] == 1.0
    assert metrics["val-aux/s/acc/maj@4"] == 0.5
    assert metrics["val-aux/s/acc/mean@4/standard_error"] == pytest.approx(np.std([0.5, 0.25], ddof=1) / 2**0.5)
    assert not [name for name in metrics if "without a rule" in name]


def test_scores_between_right_and_wrong_have_no_pass_at_k() -> None:
    metrics = summarize([row("a", 0.5), row("a", 1.0)], n=2, ks=[1, 2])
    assert not [name for name in metrics if "pass@" in name]
    assert metrics["val-core/s/acc/mean@2"] == 0.75


def test_records_are_those_that_a_report_reads(policy: SavedPolicy, material: Path, tmp_path: Path) -> None:
    rows = ask(policy, material, tmp_path)
    evaluation.write_records(tmp_path, rows, summarize(rows, n=2, ks=[1, 2]), {"n": 2}, step=7)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert line["step"] == 7
    assert "val-core/openai/gsm8k/acc/mean@2" in line
    assert (tmp_path / "samples/7.jsonl").is_file()
