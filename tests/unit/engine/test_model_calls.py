"""From the columns of a micro-batch to a call of the model."""

from __future__ import annotations

import pytest
import torch

from paceline.engine.hf_models import ModelKind
from paceline.engine.model_calls import aligned_call, packed_call, padded_call
from tests.contract import engine_scenarios as scenarios
from tests.unit.engine.test_packed_attention import make_batch


def test_the_model_sees_each_token_that_counts_once_and_no_padding() -> None:
    """What comes behind the last answer is left out too, and of a row without answers all but one token."""
    data = make_batch([(2, 3, 0), (3, 4, 0b1100), (4, 2, 0b11)])
    call = packed_call(data.batch, "causal_lm", torch.device("cpu"))
    assert call.inputs["packed_lengths"] == (2 + 3 - 1, 3 + 2 - 1, 1)
    assert call.inputs["input_ids"].shape == (1, 9)
    assert "attention_mask" not in call.inputs


@pytest.mark.parametrize("kind", ["causal_lm", "value", "sequence_classification"])
def test_aligned_rows_begin_with_their_first_token_and_are_asked_the_same(kind: ModelKind):
    batch = scenarios.make_mini_batch().batch
    aligned, padded = (call(batch, kind, torch.device("cpu")) for call in (aligned_call, padded_call))
    assert torch.equal(aligned.tokens, padded.tokens)
    input_ids = aligned.inputs["input_ids"]
    assert torch.equal(input_ids.flatten()[aligned.places], padded.inputs["input_ids"].flatten()[padded.places])
    for row, (num_prompt, _) in enumerate(scenarios.LENGTHS):
        if row == scenarios.PADDING_ROW and kind != "sequence_classification":
            continue  # Nothing is asked of it.
        tokens = batch["input_ids"][row][batch["attention_mask"][row] == 1]
        assert torch.equal(input_ids[row, :num_prompt], tokens[:num_prompt])
