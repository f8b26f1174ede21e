"""`schema.COLUMNS` is true: every phase of a real step reads and writes what it says there, in that shape and dtype."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from paceline.protocol import DataProto, DataProtoFuture
from paceline.schema import COLUMNS, REQUEST_COLUMNS
from paceline.single_controller.in_process import InProcessWorkerGroup
from paceline.trainer.main_ppo import TaskRunner, complete_config
from paceline.trainer.ppo import phases
from paceline.trainer.ppo.ray_trainer import RayPPOTrainer
from paceline.trainer.ppo.step import Step
from tests.mixed import make_mixed_material, mixed_config
from tests.runs import as_omegaconf

PROMPT_WIDTH, RESPONSE_WIDTH, TEACHERS_TOKENS = 32, 8, 4


class Flow:
    """What went into each phase, and what came out of it."""

    def __init__(self) -> None:
        self.read: dict[str, set[str]] = defaultdict(set)
        self.written: dict[str, set[str]] = defaultdict(set)

    def saw(self, phase: str, inputs: DataProto, outputs: Any) -> None:
        self.read[phase] |= names(inputs)
        if isinstance(outputs, DataProto):
            kept = names(inputs) if phase == "compute_advantages" else set()  # it gives its batch back, with more in it
            self.written[phase] |= names(outputs) - kept
            check_kinds(phase, outputs)


def names(data: DataProto) -> set[str]:
    return {*(data.batch.keys() if data.batch is not None else ()), *data.non_tensor_batch}


def check_kinds(phase: str, data: DataProto) -> None:
    widths = {"B": len(data), "P": PROMPT_WIDTH, "R": RESPONSE_WIDTH, "P+R": PROMPT_WIDTH + RESPONSE_WIDTH}
    widths["K"] = TEACHERS_TOKENS
    for name, tensor in ({} if data.batch is None else data.batch).items():
        shape = tuple(widths[letter] for letter in COLUMNS[name].shape)
        if phase == "make_requests" and name in REQUEST_COLUMNS:
            shape = (len(data), PROMPT_WIDTH)
        assert (tuple(tensor.shape), tensor.dtype) == (shape, getattr(torch, COLUMNS[name].dtype)), (phase, name)


def run_steps(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Flow:
    flow = Flow()

    class WatchedGroup(InProcessWorkerGroup):
        def submit(self, method: str, calls: list[Any], *args: Any, **kwargs: Any) -> Any:
            future = super().submit(method, calls, *args, **kwargs)
            for value in calls[0].args:
                if isinstance(value, DataProto):
                    flow.saw(method, value, future.get())
            return future

    def watched_requests(*args: Any, **kwargs: Any) -> Any:
        requests, labels = make_requests(*args, **kwargs)
        for part in (requests, labels):
            flow.saw("make_requests", DataProto.from_dict(), part)
        return requests, labels

    def watched_dealing(data: DataProto, **kwargs: Any) -> DataProto:
        dealt = deal_mini_batches(data, **kwargs)
        flow.written["deal_mini_batches"] |= names(dealt) - names(data)
        return dealt

    make_requests, deal_mini_batches = phases.make_requests, phases.deal_mini_batches
    monkeypatch.setattr(phases, "deal_mini_batches", watched_dealing)
    monkeypatch.setattr(phases, "make_requests", watched_requests)
    trainer = TaskRunner().build_trainer(complete_config(as_omegaconf(config)), WatchedGroup)
    watch_phases(trainer, flow, monkeypatch)
    trainer.init_workers()
    trainer.fit()
    return flow


def watch_phases(trainer: RayPPOTrainer, flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's own phases take and give batches; an input that a phase does not need is not offered to it."""

    def watched_advantages(step: Step) -> None:
        batch = step.batch
        needed = [name for name, column in COLUMNS.items() if "compute_advantages" in column.consumers]
        wanted = {
            "batch_keys": [name for name in batch.batch.keys() if name in needed],  # noqa: SIM118 - a TensorDict
            "non_tensor_batch_keys": [name for name in batch.non_tensor_batch if name in needed],
        }
        offered = batch.select(**wanted)
        step.batch = offered.select()
        compute_advantages(step)
        flow.saw("compute_advantages", offered, step.batch)
        step.batch = batch.union(step.batch)

    def watched_baselines(*args: Any) -> DataProtoFuture | None:
        baselines = score_baselines(*args)
        if baselines is None:
            return None

        def watch(result: DataProto) -> DataProto:
            flow.saw("score_baselines", DataProto.from_dict(), result)
            return result

        return baselines.then(watch)

    def watched_responses(step: Step) -> None:
        take_responses(step)
        own = step.batch.select(batch_keys=["policy_versions"], non_tensor_batch_keys=[])
        flow.saw("take_responses", own, own)

    take_responses = trainer.take_responses
    monkeypatch.setattr(trainer, "take_responses", watched_responses)
    compute_advantages, score_baselines = trainer.compute_advantages, trainer.score_baselines
    monkeypatch.setattr(trainer, "compute_advantages", watched_advantages)
    monkeypatch.setattr(trainer, "score_baselines", watched_baselines)


@pytest.fixture(scope="module")
def flows(tmp_path_factory: pytest.TempPathFactory) -> list[Flow]:
    """All roles and terms once: PPO with critic, reference, reward model, corrected rollout and a teacher's log-probs;
    ReMax for its baseline, with a loss that chooses tokens and a teacher's likeliest ones."""
    folder = tmp_path_factory.mktemp("flow")
    material = make_mixed_material(folder / "material")
    kl = {
        "algorithm__use_kl_in_reward": True,
        "actor_rollout_ref__actor__tis_imp_ratio_cap": 2.0,
        "algorithm__rollout_correction__rollout_rs": "token_k1",
        "algorithm__rollout_correction__rollout_rs_threshold": 2.0,
        "actor_rollout_ref__actor__calculate_sum_pi_squared": True,
        "trainer__total_training_steps": 1,
        "data__val_files": None,
    }
    kl |= {
        "distillation__enabled": True,
        "distillation__distillation_loss__loss_mode": "k3",
        "distillation__teacher_models__one__model_path": str(material / "model"),
    }
    remax = {
        **kl,
        "algorithm__adv_estimator": "remax",
        "actor_rollout_ref__actor__policy_loss__loss_mode": "kl_cov",
        "distillation__distillation_loss__loss_mode": "forward_kl_topk",
        "distillation__distillation_loss__topk": TEACHERS_TOKENS,
    }
    flows = []
    for name, changes in {"ppo": kl, "remax": remax}.items():
        with pytest.MonkeyPatch.context() as monkeypatch:
            flows.append(run_steps(mixed_config(material, folder / name, **changes), monkeypatch))
    return flows


def test_every_phase_gets_no_column_that_it_does_not_declare(flows: list[Flow]) -> None:
    for flow in flows:
        for phase, read in flow.read.items():
            declared = {name for name, column in COLUMNS.items() if phase in column.consumers}
            declared |= set(REQUEST_COLUMNS) if phase == "generate_sequences" else set()
            assert read - declared - {"ability"} == set(), phase


OF_REQUESTS = ("is_finished", "request_id")
"""Columns of requests that come one by one: `tests/unit/workers/test_request_calls.py`."""
OF_CONVERSATIONS = ("turn_scores", "conversation", "conversation_info", "agent_name")
"""Columns where agents have conversations: `tests/unit/trainer/test_conversations.py`."""
OF_IMAGES = ("pixel_values", "image_grid_thw")
"""Columns where prompts have images: `tests/learn/test_images.py`."""
ELSEWHERE = OF_REQUESTS + OF_CONVERSATIONS + OF_IMAGES


def test_every_declared_reader_gets_its_column(flows: list[Flow]) -> None:
    read = {(name, phase) for flow in flows for phase, columns in flow.read.items() for name in columns}
    for name, column in COLUMNS.items():
        if name in ELSEWHERE:
            continue
        for phase in column.consumers:
            if phase != "score" and name != "token_level_rewards":  # what passes inside of a phase of the driver
                assert (name, phase) in read


def test_every_column_is_written_by_its_producer(flows: list[Flow]) -> None:
    written = {(name, phase) for flow in flows for phase, columns in flow.written.items() for name in columns}
    for name, column in COLUMNS.items():
        if name in ELSEWHERE:
            continue
        if column.producer != "RLHFDataset":
            assert (name, column.producer) in written
    strangers = {name for name, _ in written} - set(COLUMNS) - {"ability"}
    assert strangers == set()
