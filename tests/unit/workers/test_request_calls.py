"""Requests on a worker whose rollout shares the actor's process: decoding happens in calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.config import ActorConfig, ActorRolloutRefConfig, PolicyModelConfig, RolloutConfig
from paceline.protocol import DataProto
from paceline.rollout import SamplingParams
from paceline.workers.engine_workers import ActorRolloutRefWorker
from paceline.workers.request_calls import requests_of, sampled_before
from paceline.workers.role_worker import RunContext, built
from tests.tiny import build_tiny_model, make_tiny_model

LENGTH = 12
RUN = RunContext(seed=0, device="cpu", total_optimizer_steps=1, max_prompt_length=3, max_response_length=LENGTH)
HOW = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True}


def make_data(*names: str) -> DataProto:
    return DataProto.from_dict(
        {
            "input_ids": torch.tensor([[0, 5, 6 + row] for row in range(len(names))]),
            "attention_mask": torch.tensor([[0, 1, 1]] * len(names)),
            "seeds": torch.arange(len(names)),
        },
        {"request_id": np.array(names, dtype=object)},
        {"sampling": HOW},
    )


@pytest.fixture(params=["local", "fsdp2"])
def worker(tmp_path: Path, request: pytest.FixtureRequest) -> ActorRolloutRefWorker:
    """Its rollout samples from the actor's own module, or from a copy."""
    folder = make_tiny_model(tmp_path / "model", initializer_range=0.2)
    config = ActorRolloutRefConfig(
        model=PolicyModelConfig(path=str(folder)),
        actor=ActorConfig(strategy=request.param),
        rollout=RolloutConfig(max_num_seqs=2),
    )
    worker = ActorRolloutRefWorker(config, "actor_rollout", RUN)
    worker.init_model()
    return worker


def test_a_batch_becomes_requests_and_an_answer_becomes_requests_that_go_on(worker: ActorRolloutRefWorker) -> None:
    first, second = requests_of(make_data("a", "b"), LENGTH)
    assert (first.id, first.prompt_ids, first.seed, first.sampled) == ("a", [5, 6], 0, None)
    assert (second.id, second.prompt_ids, second.seed) == ("b", [5, 7], 1)
    assert first.sampling == SamplingParams(LENGTH, ignore_eos=True)

    worker.submit_requests(make_data("a", "b"))
    for _ in range(4):
        built(worker.rollout).step()
    answer = worker.abort_requests(["b", "a"])
    assert answer.non_tensor_batch["request_id"].tolist() == ["b", "a"]
    assert answer.batch["is_finished"].tolist() == [False, False]
    assert answer.batch["response_mask"].sum(dim=1).tolist() == [5, 5]
    answer.meta_info["sampling"] = HOW
    going_on = requests_of(answer, LENGTH)
    assert [request.prompt_ids for request in going_on] == [[5, 7], [5, 6]]
    assert [request.sampled for request in going_on] == sampled_before(answer)
    assert going_on[0].num_sampled == 5

    worker.submit_requests(answer)
    found = worker.decode_until(2)
    batch = worker.generate_sequences(make_data("a", "b"))
    order = [["a", "b"].index(name) for name in found.non_tensor_batch["request_id"]]
    assert torch.equal(found.batch["responses"], batch.batch["responses"][order])
    assert torch.equal(found.batch["input_ids"], batch.batch["input_ids"][order])
    assert "policy_versions" not in batch.batch
    assert worker.prompts == {}


def test_decoding_in_calls_goes_on_after_the_actor_has_trained(
    worker: ActorRolloutRefWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.set_version(3)
    worker.submit_requests(make_data("a", "b", "c", "d"))
    first = worker.decode_until(1)
    assert len(first) == 2  # they began together and are equally long
    left = sorted({"a", "b", "c", "d"} - set(first.non_tensor_batch["request_id"]))
    assert first.meta_info == {"version": 3, "num_running": 0, "num_waiting": 2, "not_begun": left}
    built(worker.rollout).step()
    weights = build_tiny_model(initializer_range=0.2, seed=1).state_dict()
    actor = built(worker.actor)
    if actor.module is not None:
        actor.module.load_state_dict(weights)
    else:
        monkeypatch.setattr(actor, "named_full_weights", weights.items)
    worker.version = 4
    worker.on_new_weights()
    rest = worker.decode_until(5)
    assert len(rest) == 2
    for versions, response in zip(rest.batch["policy_versions"].tolist(), rest.batch["responses"], strict=True):
        assert versions == [3] * 2 + [4] * (LENGTH - 2)
        assert len(response) == LENGTH
    model = build_tiny_model(initializer_range=0.2, seed=1).eval()
    with torch.no_grad():
        logits = model(rest.batch["input_ids"][:, 1:]).logits[:, 1:-1]  # all prompts have two tokens
    now = logits.log_softmax(dim=-1).gather(-1, rest.batch["responses"].unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(rest.batch["rollout_log_probs"][:, 2:], now[:, 2:], atol=1e-4)
    assert not torch.allclose(rest.batch["rollout_log_probs"][:, :2], now[:, :2], atol=1e-2)
    assert len(worker.decode_until(1)) == 0


def test_no_thread_decodes_where_a_model_trains(worker: ActorRolloutRefWorker) -> None:
    with pytest.raises(RuntimeError, match=r"trains in this process: its rollout decodes in calls"):
        worker.start_sampling()
