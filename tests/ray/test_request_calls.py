"""A rollout on a device of its own that takes single requests, on a real Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
import torch

from paceline.config import ActorRolloutRefConfig, PolicyModelConfig, RolloutConfig
from paceline.errors import WorkerError
from paceline.protocol import DataProto
from paceline.rollout import SamplingParams
from paceline.rollout.native import NativeRollout
from paceline.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from paceline.workers.engine_workers import ActorRolloutRefWorker, RunContext
from paceline.workers.weight_calls import in_buckets
from tests.tiny import build_tiny_model, make_tiny_model

LENGTH = 400
RUN = RunContext(
    seed=0, device="cpu", total_optimizer_steps=1, max_prompt_length=4, max_response_length=LENGTH, eos_token_ids=(1,)
)
HOW = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "ignore_eos": True}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[RayWorkerGroup]:
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    folder = make_tiny_model(tmp_path / "model", initializer_range=0.2)
    config = ActorRolloutRefConfig(
        model=PolicyModelConfig(path=str(folder)), rollout=RolloutConfig(max_num_seqs=2, load_format="auto")
    )
    pool = RayResourcePool([1], use_gpu=False, name_prefix="rollout_pool")
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ActorRolloutRefWorker, config, "rollout", RUN), "rollout")
    group.init_model().get()
    yield group
    group.shutdown()
    ray.shutdown()


def make_requests(*names: int) -> DataProto:
    data = DataProto.from_dict(
        {
            "input_ids": torch.tensor([[0, 5 + name, 6, 7] for name in names]),
            "attention_mask": torch.tensor([[0, 1, 1, 1]] * len(names)),
            "seeds": torch.tensor(names),
        },
        {"request_id": np.array(names, dtype=object)},
    )
    data.meta_info["sampling"] = HOW
    return data


def test_requests_come_go_and_outlive_new_weights(group: RayWorkerGroup) -> None:
    group.start_sampling().get()
    group.submit_requests([make_requests(0, 1)]).get()
    group.submit_requests([make_requests(2)]).get()
    state = group.collect_finished().get()[0].meta_info
    assert (state["num_running"] + state["num_waiting"], state["version"]) == (3, 0)

    # Short calls while it decodes: pause, take one request out, new weights, and on.
    group.pause_sampling().get()
    [aborted] = group.abort_requests([[1]]).get()
    assert aborted.non_tensor_batch["request_id"].tolist() == [1]
    assert not aborted.batch["is_finished"].any()
    sampled = int(aborted.batch["response_mask"].sum())
    weights = build_tiny_model(initializer_range=0.2, seed=1).state_dict().items()
    buckets = [DataProto(meta_info={"weights": bucket}) for bucket in in_buckets(weights)]
    group.receive_weights(*buckets, version=4).get()
    aborted.meta_info["sampling"] = HOW
    group.submit_requests([aborted]).get()
    group.resume_sampling().get()

    rows: dict[int, DataProto] = {}
    end = time.monotonic() + 300
    while len(rows) < 3:
        [finished] = group.collect_finished().get()
        rows |= {finished.non_tensor_batch["request_id"][row]: finished[row : row + 1] for row in range(len(finished))}
        assert time.monotonic() < end
        time.sleep(0.1)  # each call keeps it from decoding
    for row in rows.values():
        versions = row.batch["policy_versions"][0].tolist()
        assert versions == sorted(versions)
        assert set(versions) <= {0, 4}
        assert row.batch["is_finished"].all()
        assert row.batch["response_mask"].sum() == LENGTH
    assert torch.equal(rows[1].batch["responses"][0, :sampled], aborted.batch["responses"][0, :sampled])
    assert rows[2].batch["policy_versions"].unique().tolist()[-1] == 4  # it waited, or had just begun

    # The batch call goes on as ever, and gives what the engine gives in this process.
    batch = make_requests(7, 8)
    batch.meta_info["with_versions"] = True
    found = group.generate_sequences(batch).get()
    model = build_tiny_model(initializer_range=0.2, seed=1).eval()
    wanted = NativeRollout(model, {1}, 0, max_num_seqs=2).generate(
        [[12, 6, 7], [13, 6, 7]], SamplingParams(LENGTH, ignore_eos=True), [7, 8]
    )
    assert found.batch["responses"].tolist() == [completion.token_ids for completion in wanted]
    assert found.batch["policy_versions"].unique().tolist() == [4]

    # An error of the thread arrives with the next call.
    group.submit_requests([make_requests(10_000)]).get()
    time.sleep(0.5)
    with pytest.raises(WorkerError, match="collect_finished"):
        group.collect_finished().get()
