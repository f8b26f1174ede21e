"""The schedule in real runs in this process: which weights sample what, and that a resumed run lost and repeated
nothing."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.catalog import ESTIMATORS
from paceline.errors import CheckpointError
from paceline.report.ledger import DataPosition, read_ledger
from paceline.single_controller.base import call_tag
from paceline.workers.engine_workers import ActorRolloutRefWorker
from tests.in_process import build_in_process, train_in_process
from tests.learn.test_runs_in_process import crash_in
from tests.runs import base_config, read_metrics, results

GROUPS = {"actor_rollout_ref__rollout__n": 2}
GRPO = {**GROUPS, "algorithm__adv_estimator": "grpo"}
APART = {"trainer__n_gpus_per_node": 2, "trainer__placement__rollout_devices": 1}
SPLIT = {"trainer__n_gpus_per_node": 2, "trainer__placement__name": "split"}
BOTH = {**SPLIT, "trainer__placement__rollout_on": ["actor_rollout_ref_pool", "critic_pool"]}
LAST_BITS = "training/rollout_probs_diff"
"""A copy of the weights lies elsewhere in memory, which may change the last bit of a matrix product."""


def pipelined(max_staleness: int) -> dict[str, Any]:
    return {"trainer__schedule__name": "pipelined", "trainer__schedule__max_staleness": max_staleness}


@pytest.fixture(scope="module")
def whole(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of seven steps at staleness 2, with a checkpoint at each."""
    run_dir = tmp_path_factory.mktemp("whole")
    train_in_process(ppo(material, run_dir))
    return run_dir


def ppo(material: Path, run_dir: Path, max_staleness: int = 2, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "trainer__total_training_steps": 7,
        "trainer__save_freq": 1,
        "trainer__test_freq": 3,
        "actor_rollout_ref__actor__ppo_epochs": 2,
        **pipelined(max_staleness),
    }
    return base_config(material, run_dir, **(settings | changes))


FAST = ("gae", "grpo", "remax", "gdpo")
"""With a critic, with groups, with a baseline of its own, with components: what an estimator may want of a schedule."""


def estimators(names: Iterable[str]) -> Any:
    """For a test of each estimator; those that want nothing else of a schedule are left to `make test-all`."""
    marked = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("estimator", marked)


@estimators(ESTIMATORS.built_in)
def test_pipelined_without_staleness_is_sync(estimator: str, material: Path, tmp_path: Path) -> None:
    changes = {"algorithm__adv_estimator": estimator, "trainer__total_training_steps": 2}
    if ESTIMATORS.built_in[estimator].needs_groups:
        changes |= GROUPS
    if ESTIMATORS.built_in[estimator].needs_components:
        changes["algorithm__gdpo_reward_keys"] = ["score"]
    for name, schedule in (("sync", {}), ("pipelined", pipelined(0))):
        train_in_process(base_config(material, tmp_path / name, **changes, **schedule))
    sync, ahead = (results(tmp_path / name) for name in ("sync", "pipelined"))
    assert len(sync) == 3
    assert sync == ahead
    assert not [name for line in sync for name in line if "staleness" in name]


# ------------------------------------------------------------------------------------------------ weights and versions


def fingerprint(module: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for _, tensor in sorted(module.state_dict().items()):
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


class Watch:
    """What weights were used for what: method to step to fingerprint. Validation is a method of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sampled: dict[int, str] = {}
        self.validated: dict[int, str] = {}
        self.old: dict[int, str] = {}
        self.before: dict[int, str] = {}
        self.after: dict[int, str] = {}
        worker = ActorRolloutRefWorker
        for name, watching in (
            ("generate_sequences", self._generating),
            ("compute_log_prob", self._inferring),
            ("update_actor", self._updating),
        ):
            monkeypatch.setattr(worker, name, self._around(getattr(worker, name), watching))

    @staticmethod
    def _around(method: Callable[..., Any], watching: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def watched(worker: ActorRolloutRefWorker, data: Any) -> Any:
            return watching(worker, lambda: method(worker, data))

        return watched

    def _generating(self, worker: ActorRolloutRefWorker, call: Callable[[], Any]) -> Any:
        result = call()  # a stale copy is refreshed in it
        tag = call_tag.get()
        found = self.validated if "validation" in tag else self.sampled
        print_of = fingerprint(worker.rollout.model)  # type: ignore[union-attr]
        assert found.setdefault(tag["step"], print_of) == print_of, "two pools sample with other weights"
        return result

    def _inferring(self, worker: ActorRolloutRefWorker, call: Callable[[], Any]) -> Any:
        self.old[call_tag.get()["step"]] = fingerprint(worker.actor.module)  # type: ignore[union-attr,arg-type]
        return call()

    def _updating(self, worker: ActorRolloutRefWorker, call: Callable[[], Any]) -> Any:
        step = call_tag.get()["step"]
        self.before[step] = fingerprint(worker.actor.module)  # type: ignore[union-attr,arg-type]
        result = call()
        self.after[step] = fingerprint(worker.actor.module)  # type: ignore[union-attr,arg-type]
        return result


@pytest.mark.parametrize(
    ("max_staleness", "placement"),
    [
        pytest.param(0, {}, id="k0"),
        pytest.param(1, {}, id="k1"),
        pytest.param(1, BOTH, id="k1-two-pools"),
        pytest.param(2, APART, id="k2-apart"),
        pytest.param(2, {"actor_rollout_ref__rollout__name": "hf"}, id="k2-hf", marks=pytest.mark.slow),
    ],
)
def test_each_rollout_validation_and_old_log_prob_uses_the_weights_that_it_must(
    max_staleness: int, placement: dict[str, Any], material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On policy is not one step off; old log-probs are never of the weights after an update, nor of those that sampled;
    a validation never lacks the last update."""
    seen = Watch(monkeypatch)
    steps = 5
    changes = {"trainer__total_training_steps": steps, "trainer__test_freq": 1, "trainer__save_freq": -1, **placement}
    train_in_process(ppo(material, tmp_path, max_staleness, **changes))
    weights = {0: seen.before[1], **seen.after}
    assert len(set(weights.values())) == steps + 1
    every = range(1, steps + 1)
    assert seen.sampled == {step: weights[max(0, step - 1 - max_staleness)] for step in every}
    assert seen.validated == {step: weights[step] for step in range(steps + 1)}
    assert seen.old == seen.before == {step: weights[step - 1] for step in every}


def test_the_warm_up_of_a_critic_makes_no_version(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Watch(monkeypatch)
    train_in_process(ppo(material, tmp_path, 1, trainer__critic_warmup=3))
    first = seen.before[3]
    assert [seen.sampled[step] for step in range(1, 5)] == [first] * 4
    assert seen.sampled[5] == seen.after[3]
    lines = read_metrics(tmp_path)[1:]
    assert [line["training/staleness/max"] for line in lines] == [0, 0, 0, 1, 1, 1, 1]


def test_staleness_is_measured_token_by_token(whole: Path) -> None:
    lines = read_metrics(whole)[1:]
    ages = [0, 1, 2, 2, 2, 2, 2]
    assert [line["training/staleness/mean"] for line in lines] == ages
    assert [line["training/staleness/max"] for line in lines] == ages
    assert all(line[f"training/staleness/share_of_tokens/{age}"] == 1 for line, age in zip(lines, ages, strict=True))
    assert all(line["timing_s/gen"] > 0 for line in lines)
    events = json.loads((whole / "timeline.json").read_text())["traceEvents"]
    calls = [event["args"] for event in events if event["name"] == "generate_sequences"]
    versions = {call["step"]: call["version"] for call in calls if "validation" not in call}
    assert versions == {step: max(0, step - 3) for step in range(1, 8)}


# -------------------------------------------------------------------------------------------------------- equalities


@pytest.mark.parametrize(
    ("placement", "but"), [({}, ""), (SPLIT, ""), (APART, LAST_BITS)], ids=["again", "split", "apart"]
)
def test_a_pipelined_run_gives_the_same_numbers_again_and_in_every_placement(
    placement: dict[str, Any], but: str, material: Path, whole: Path, tmp_path: Path
) -> None:
    train_in_process(ppo(material, tmp_path, trainer__save_freq=-1, **placement))
    left_out = (but,) if but else ()
    assert results(tmp_path, *left_out) == results(whole, *left_out)


@pytest.mark.parametrize("method", ["checkpoints.begin", "checkpoints.finish", "close", "update_actor", "generate"])
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(7, marks=pytest.mark.slow)])
def test_a_pipelined_run_that_crashed_anywhere_and_resumed_equals_one_that_did_not(
    material: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, step: int
) -> None:
    if method == "generate" and step == 7:
        pytest.skip("its rollout was issued in step 5")
    crash_in(build_in_process(ppo(material, tmp_path)), method, step, monkeypatch)
    train_in_process(ppo(material, tmp_path))
    assert results(tmp_path) == results(whole)
    assert_exactly_once(tmp_path)
    assert (tmp_path / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {**GROUPS, "algorithm__adv_estimator": "remax"},
        {**GRPO, "algorithm__filter_groups__enable": True, "algorithm__filter_groups__max_num_gen_batches": 3},
        pytest.param(
            {"actor_rollout_ref__model__lora_rank": 4, "actor_rollout_ref__actor__use_kl_loss": False, **APART},
            marks=pytest.mark.slow,
        ),
        pytest.param(BOTH, marks=pytest.mark.slow),
    ],
    ids=["remax", "dapo", "lora", "two pools"],
)
def test_what_runs_beside_a_schedule_resumes_too(
    changes: dict[str, Any], material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**changes, "trainer__total_training_steps": 5, "trainer__test_freq": -1}
    train_in_process(ppo(material, tmp_path / "whole", **settings))
    crash_in(build_in_process(ppo(material, tmp_path / "crashed", **settings)), "update_actor", 4, monkeypatch)
    train_in_process(ppo(material, tmp_path / "crashed", **settings))
    assert results(tmp_path / "crashed") == results(tmp_path / "whole")
    assert_exactly_once(tmp_path / "crashed")


# ----------------------------------------------------------------------------------------------------- exactly once


def assert_exactly_once(run: Path) -> None:
    """Each prompt up to the data position is in the ledger once; those after the last step's were never drawn."""
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    prompts = lines[0]["prompts"]
    found: Counter[tuple[int, int]] = Counter()
    for line in lines[1:]:
        for ranges in (line["trained"], *line.get("dropped", {}).values()):
            found.update((epoch, place) for epoch, first, stop in ranges for place in range(first, stop))
    last_epoch, last_place = max(found)
    everything = [(epoch, place) for epoch in range(last_epoch) for place in range(prompts)]
    assert found == Counter([*everything, *((last_epoch, place) for place in range(last_place + 1))])
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert read_ledger(run / "ledger.jsonl").missing(DataPosition(last_epoch, last_place + 1), 0) == 0


def test_the_ledger_has_each_prompt_once(whole: Path) -> None:
    assert_exactly_once(whole)
    lines = [json.loads(line) for line in (whole / "ledger.jsonl").read_text().splitlines()]
    assert lines[3] == {"step": 3, "trained": [[0, 16, 20]]}
    assert lines[4] == {"step": 4, "trained": [[1, 0, 8]]}


def test_prompts_that_do_not_train_stand_in_the_ledger_with_the_reason(material: Path, tmp_path: Path) -> None:
    changes = {"algorithm__filter_groups__enable": True, "algorithm__filter_groups__max_num_gen_batches": 3}
    train_in_process(ppo(material, tmp_path, 1, **GRPO, **changes, data__drop_last=True))
    assert_exactly_once(tmp_path)
    account = read_ledger(tmp_path / "ledger.jsonl")
    assert account.dropped["filter_groups"] > 0
    assert account.dropped["drop_last"] >= 4
    assert account.trained <= 7 * 8


def test_a_checkpoint_holds_what_was_sampled_ahead_and_the_position_after_it(whole: Path) -> None:
    folder = whole / "checkpoints" / "global_step_4"
    state = json.loads((folder / "trainer.json").read_text())
    ahead = [(item["step"], item["version"], item["epoch"], item["position"]) for item in state["rollouts"]]
    assert ahead == [(5, 2, 1, 8), (6, 3, 1, 16)]
    assert (state["dataloader"]["epoch"], state["dataloader"]["position"]) == (1, 20)
    assert state["version"] == 4
    assert {path.name for path in (folder / "rollouts").iterdir()} == {
        "step_5.responses.safetensors",
        "step_6.responses.safetensors",
    }
    last = json.loads((whole / "checkpoints" / "global_step_7" / "trainer.json").read_text())
    assert last["rollouts"] == []


@pytest.mark.parametrize("max_staleness", [0, pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_run_goes_on_with_another_bound_and_the_same_prompts(
    max_staleness: int, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    crash_in(build_in_process(ppo(material, tmp_path)), "update_actor", 4, monkeypatch)
    monkeypatch.undo()
    seen = Watch(monkeypatch)
    train_in_process(ppo(material, tmp_path, max_staleness))
    assert_exactly_once(tmp_path)
    ages = [line["training/staleness/max"] for line in read_metrics(tmp_path)[4:] if "training/staleness/max" in line]
    assert max(ages, default=0) <= max_staleness
    # Responses of steps 4 and 5 were in the checkpoint; they are too old for a smaller bound.
    sampled_again = {4, 5} & set(seen.sampled)
    assert sampled_again == ({4, 5} if max_staleness < 2 else set())
    assert ("too stale" in caplog.text) == (max_staleness < 2)


def test_responses_to_other_prompts_are_refused(material: Path, tmp_path: Path) -> None:
    train_in_process(ppo(material, tmp_path / "run", trainer__total_training_steps=4))
    folder = tmp_path / "run" / "checkpoints" / "global_step_2"
    responses = folder / "rollouts" / "step_3.responses.safetensors"
    responses.write_bytes(
        (tmp_path / "run/checkpoints/global_step_1/rollouts/step_2.responses.safetensors").read_bytes()
    )
    (folder / "manifest.json").unlink()  # as if it had been written so
    path = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": str(folder)}
    with pytest.raises(CheckpointError, match="responses to other prompts"):
        train_in_process(ppo(material, tmp_path / "other", **path))


def test_accepted_changes_of_the_data_drop_what_was_sampled_ahead(material: Path, tmp_path: Path) -> None:
    from tests.runs import write_sums

    data = {"data__train_files": str(write_sums(tmp_path / "train.parquet", 20))}
    trainer = build_in_process(ppo(material, tmp_path / "run", **data))
    update = trainer.update_actor

    def asking(step: Any) -> Any:
        if step.number == 3:
            (tmp_path / "run" / "stop").touch()
        return update(step)

    trainer.update_actor = asking  # type: ignore[method-assign]
    trainer.fit()
    write_sums(tmp_path / "train.parquet", 24, seed=5)
    train_in_process(ppo(material, tmp_path / "run", **data, data__accept_changed_files=True))
    lines = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    starts = [line for line in lines if "starts" in line]
    assert starts == [
        {"step": 0, "starts": [0, 0], "prompts": 20, "waiting": 0},
        {"step": 3, "starts": [1, 0], "prompts": 24, "waiting": 0},
    ]
    assert len(read_metrics(tmp_path / "run")) == 8
