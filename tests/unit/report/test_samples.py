from __future__ import annotations

from pathlib import Path

from paceline.report.samples import LONGEST_TEXT, SampleFiles, cut_value, read_samples, sample_files


def row(text: str) -> dict[str, object]:
    return {"prompt": text, "response": text, "score": 1.0, "ground_truth": ["x" * 10_000]}


def test_a_steps_file_has_both_kinds_with_long_texts_cut(tmp_path: Path) -> None:
    files = SampleFiles(tmp_path / "samples", count=2, resume_step=None)
    files.add_validation([row(str(number)) for number in range(10)])
    files.write(3, [row("a" * 50_000)])
    rows = list(read_samples(tmp_path / "samples/3.jsonl"))
    assert [(kept["kind"], kept["prompt"][:1]) for kept in rows] == [
        ("training", "a"),
        ("validation", "0"),
        ("validation", "5"),
    ]
    assert len(rows[0]["response"]) < LONGEST_TEXT + 100
    assert len(rows[0]["ground_truth"]) < LONGEST_TEXT + 100
    files.write(4)
    assert list(sample_files(tmp_path / "samples")) == [3], "a step with nothing to keep has no file"


def test_a_fresh_start_keeps_old_files_aside_and_a_resumed_run_cuts_them_back(tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    for step in (1, 2, 3):
        SampleFiles(folder, 1, resume_step=step - 1).write(step, [row("old")])
    SampleFiles(folder, 1, resume_step=2)
    assert list(sample_files(folder)) == [1, 2]
    SampleFiles(folder, 1, resume_step=None)
    assert not folder.exists()
    assert list(sample_files(tmp_path / "samples.1")) == [1, 2]


def test_a_half_written_line_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b')
    assert list(read_samples(tmp_path / "1.jsonl")) == [{"prompt": "a"}]


def test_a_run_keeps_four_responses_of_a_step_and_of_a_validation(finished_run: Path) -> None:
    found = {
        step: [kept["kind"] for kept in read_samples(path)]
        for step, path in sample_files(finished_run / "samples").items()
    }
    assert found == {
        0: ["validation"] * 4,
        1: ["training"] * 4,
        2: ["training"] * 4 + ["validation"] * 4,
        3: ["training"] * 4,
        4: ["training"] * 4 + ["validation"] * 4,
    }


def test_of_a_conversation_each_text_is_cut() -> None:
    turns = [{"by": "model", "text": "x" * 90, "tokens": 90, "reward": 1.0}, {"by": "read", "text": "y", "tokens": 1}]
    first, second = cut_value(turns, longest=20)  # type: ignore[misc]
    assert first == {
        "by": "model",
        "text": f"{'x' * 10} [70 characters left out] {'x' * 10}",
        "tokens": 90,
        "reward": 1.0,
    }
    assert second == turns[1]
