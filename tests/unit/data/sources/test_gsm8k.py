"""A row of GSM8K."""

from __future__ import annotations

from tests.unit.data.sources.records import (
    GSM8K,
    prepared,
)


def test_gsm8k_row(tmp_path):
    [row] = prepared("gsm8k", [GSM8K], tmp_path)
    [message] = row.pop("prompt")
    assert message["role"] == "user"
    assert message["content"].startswith("What is 600 + 600?\n")
    assert "####" in message["content"]
    assert row == {
        "data_source": "openai/gsm8k",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1200"},
        "extra_info": {"split": "train", "index": 0, **GSM8K},
    }
