from benchmarks.table import RECORDS, markdown, remark, report


def test_the_table_has_medians_quartiles_and_ratios_of_medians(tmp_path, monkeypatch, capsys):
    records = tmp_path / "records.jsonl"
    monkeypatch.setenv(RECORDS, str(records))
    report("sorting", {"ours": [1.0, 2.0, 3.0], "theirs": [2000.0, 4000.0, 8000.0]}, "s", of="ours")
    remark("On a quiet machine.")
    report("reading", {"theirs": [0.5, 0.5], "ours": [2.0, 2.0]}, "rows/s", of="ours")
    assert list(markdown(records))[2:] == [
        "| sorting (s) | **ours** | 2 | 1 .. 3 |  |",
        "|  | theirs | 4,000 | 2,000 .. 8,000 | 0.00 |",
        "| reading (rows/s) | theirs | 0.5 | 0.5 .. 0.5 | 4.00 |",
        "|  | **ours** | 2 | 2 .. 2 |  |",
        "",
        "- On a quiet machine.",
    ]
    assert "2,000 .. 8,000" in capsys.readouterr().out


def test_a_benchmark_alone_only_prints(monkeypatch, capsys):
    monkeypatch.delenv(RECORDS, raising=False)
    remark("Seen.")
    assert capsys.readouterr().out == "Seen.\n"


def test_figures_that_are_not_compared_have_no_ratio(tmp_path, monkeypatch):
    monkeypatch.setenv(RECORDS, str(tmp_path / "records.jsonl"))
    report("starting", {"one": [1.0, 1.0], "other": [2.0, 2.0]}, "s", of=None)
    assert [*markdown(tmp_path / "records.jsonl")][2:4] == [
        "| starting (s) | one | 1 | 1 .. 1 |  |",
        "|  | other | 2 | 2 .. 2 |  |",
    ]
