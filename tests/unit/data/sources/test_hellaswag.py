"""Rows of HellaSwag: lettered endings, and the letter of the right one."""

from __future__ import annotations

from paceline.data.sources.hellaswag import clean
from tests.unit.data.sources.records import (
    ENDINGS,
    HELLASWAG,
    prepared,
)


def test_hellaswag_row_shows_lettered_endings_and_has_the_letter(tmp_path):
    rows = prepared("hellaswag", [HELLASWAG, {**HELLASWAG, "label": "1"}], tmp_path)
    content = rows[0]["prompt"][0]["content"]
    assert content.startswith("Roof shingle removal: A man is sitting on a roof. he ...\n")
    assert f"\nA. {ENDINGS[0]}\nB. {ENDINGS[1]}\nC. {ENDINGS[2]}\nD. {ENDINGS[3]}\n" in content
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["D", "B"]
    assert rows[0]["extra_info"]["endings"] == ENDINGS


def test_marks_of_wikihow_pages_are_taken_out():
    assert clean("[header] How to bake [title] Heat it. [step] Wait. [title] Eat [insert name].") == (
        "How to bake. Heat it. Wait. Eat [insert name]."
    )
