"""The likeliest tokens of an engine, against the whole distribution."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from paceline.config import ModelConfig, OptimConfig
from paceline.engine import EngineSpec, get_engine
from paceline.engine import top_tokens as top_tokens_module
from paceline.engine.top_tokens import Likeliest, likeliest_tokens
from paceline.protocol import DataProto
from tests.tiny import build_tiny_model, make_tiny_model

LENGTHS = [(3, 4), (5, 2), (2, 0), (6, 5)]


def test_tokens_that_the_other_model_lacks_are_not_named() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0], [3.0, 1.0, 2.0, -1.0]])
    log_probs, tokens = likeliest_tokens(lambda part: logits[part], 2, 2.0, Likeliest(2, vocabulary=3))
    assert tokens.tolist() == [[2, 1], [0, 2]]
    torch.testing.assert_close(log_probs, (logits / 2).log_softmax(dim=-1).gather(-1, tokens.long()))


def test_no_place_and_a_small_vocabulary() -> None:
    log_probs, tokens = likeliest_tokens(lambda part: torch.zeros(0, 3)[part], 0, 1.0, Likeliest(8, vocabulary=9))
    assert log_probs.shape == tokens.shape == (0, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "model", initializer_range=0.2)


def batch() -> DataProto:
    generator = torch.Generator().manual_seed(0)
    width, rows = 6, len(LENGTHS)
    attention, response = torch.zeros(rows, 2 * width, dtype=torch.long), torch.zeros(rows, width, dtype=torch.long)
    for row, (prompt, answer) in enumerate(LENGTHS):
        attention[row, width - prompt : width + answer] = 1
        response[row, :answer] = 1
    tokens = torch.randint(3, 90, (rows, 2 * width), generator=generator) * attention
    columns = {
        "input_ids": tokens,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(dim=-1) - 1).clamp(min=0),
        "responses": tokens[:, width:],
        "response_mask": response,
    }
    return DataProto.from_tensordict(TensorDict(columns, batch_size=[rows]))


@pytest.mark.parametrize("packed", [False, True])
def test_an_engine_gives_the_likeliest_tokens_and_trains_on_their_log_probs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    monkeypatch.setattr(top_tokens_module, "CHUNK_PLACES", 3)
    model = ModelConfig(path=str(folder), use_remove_padding=packed)
    engine = get_engine("local")(EngineSpec(model=model, kind="causal_lm", optim=OptimConfig(lr=0.0)))
    engine.initialize()
    data = batch()
    found = engine.infer_batch(data, temperature=0.7, likeliest=Likeliest(4, vocabulary=60), max_tokens=20)

    whole = build_tiny_model(initializer_range=0.2).eval()
    with torch.no_grad():
        logits = whole(
            input_ids=data.batch["input_ids"],
            attention_mask=data.batch["attention_mask"],
            position_ids=data.batch["position_ids"],
        ).logits
    expected = (logits[:, 5:-1] / 0.7).log_softmax(dim=-1)[..., :60].topk(4, dim=-1)
    mask = data.batch["response_mask"].bool()
    assert torch.equal(found["top_tokens"][mask].long(), expected.indices[mask])
    torch.testing.assert_close(found["top_log_probs"][mask], expected.values[mask], rtol=1e-4, atol=1e-5)
    assert not found["top_log_probs"][~mask].any()

    seen: list[torch.Tensor] = []

    def loss_fn(output, micro_batch):
        own = micro_batch["response_mask"].bool()
        seen.append(output["top_log_probs"][own].detach() - micro_batch["top_log_probs"][own])
        return output["top_log_probs"].sum(), {}

    metrics = engine.train_batch(
        data.union(DataProto.from_dict(tensors=found)), loss_fn, temperature=0.7, micro_batch_size=3
    )
    assert torch.cat(seen).abs().max() < 1e-5
    assert metrics["grad_norm"] > 0
