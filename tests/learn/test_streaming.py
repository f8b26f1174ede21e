"""Streaming in real runs in this process: equal to sync without staleness, bounded with it, exact about prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.catalog import ESTIMATORS
from paceline.protocol import DataProto
from paceline.report.page.read import summarize
from paceline.report.timeline import read_events
from paceline.trainer import run_records
from paceline.trainer.ppo.request_pool import RequestPool
from paceline.trainer.ppo.step import Step
from tests.in_process import build_in_process, train_in_process
from tests.learn.test_runs_in_process import crash_in
from tests.learn.test_schedules import APART, GROUPS, Watch, assert_exactly_once, estimators, ppo
from tests.mixed import make_mixed_material, mixed_config
from tests.runs import base_config, make_material, read_metrics, results

NO_MORE = "training/too_old_groups"
STREAMED = [name for name, entry in ESTIMATORS.built_in.items() if not entry.needs_baseline]


def streaming(max_staleness: int, **changes: Any) -> dict[str, Any]:
    names = {"trainer__schedule__name": "streaming", "trainer__schedule__max_staleness": max_staleness}
    return names | {f"trainer__schedule__{name}": value for name, value in changes.items()}


@estimators(STREAMED)
def test_streaming_without_staleness_is_sync(estimator: str, material: Path, tmp_path: Path) -> None:
    changes = {"algorithm__adv_estimator": estimator, "trainer__total_training_steps": 4, "trainer__test_freq": 2}
    if ESTIMATORS.built_in[estimator].needs_groups:
        changes |= GROUPS
    if ESTIMATORS.built_in[estimator].needs_components:
        changes["algorithm__gdpo_reward_keys"] = ["score"]
    for name, schedule in (("sync", {}), ("streaming", streaming(0))):
        train_in_process(base_config(material, tmp_path / name, **changes, **schedule))
    assert results(tmp_path / "streaming", NO_MORE) == results(tmp_path / "sync")


def test_streaming_without_staleness_beside_the_training_is_sync(material: Path, tmp_path: Path) -> None:
    changes = {"trainer__total_training_steps": 4, "trainer__test_freq": 2, **APART}
    for name, schedule in (("sync", {}), ("streaming", streaming(0))):
        train_in_process(base_config(material, tmp_path / name, **changes, **schedule))
    assert results(tmp_path / "streaming", NO_MORE) == results(tmp_path / "sync")


@pytest.mark.parametrize(
    "on_update", ["continue", *(pytest.param(choice, marks=pytest.mark.slow) for choice in ("restart", "finish"))]
)
@pytest.mark.parametrize("on_too_old", ["wait", "drop"])
@pytest.mark.parametrize(
    "placement", [pytest.param({}, marks=pytest.mark.slow, id="colocated"), pytest.param(APART, id="apart")]
)
def test_the_bound_holds_and_each_prompt_trains_once(
    placement: dict[str, Any], on_too_old: str, on_update: str, material: Path, tmp_path: Path
) -> None:
    how = streaming(2, on_update=on_update, on_too_old=on_too_old)
    train_in_process(ppo(material, tmp_path, **{**GROUPS, **how, **placement, "trainer__save_freq": -1}))
    lines = read_metrics(tmp_path)[1:]
    assert len(lines) == 7
    assert max(line["training/staleness/max"] for line in lines) <= 2
    assert_exactly_once(tmp_path)
    if on_update == "finish":  # every response is of one version: the log-probs of the rollout are those of its weights
        assert all(line["training/too_old_groups"] == 0 for line in lines) or on_too_old == "drop"


def test_responses_that_go_on_across_updates_have_the_log_probs_of_their_versions(
    material: Path, tmp_path: Path
) -> None:
    """At a learning rate of 0 all versions are the same weights: recomputed log-probs must be those of the rollout."""
    still = {"actor_rollout_ref__actor__optim__lr": 0.0, "critic__optim__lr": 0.0, "trainer__save_freq": -1}
    train_in_process(ppo(material, tmp_path, **{**GROUPS, **streaming(2, on_too_old="drop"), **still}))
    assert max(line["training/rollout_probs_diff_max"] for line in read_metrics(tmp_path)[1:]) < 1e-5


@pytest.mark.parametrize("on_too_old", [pytest.param("wait", marks=pytest.mark.slow), "drop"])
@pytest.mark.parametrize("method", ["close", "update_actor", "checkpoints.finish"])
def test_a_run_that_crashed_and_resumed_lost_nothing_and_repeated_nothing(
    method: str, on_too_old: str, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ppo(material, tmp_path, **{**GROUPS, **streaming(2, on_too_old=on_too_old)})
    crash_in(build_in_process(config), method, 4, monkeypatch)
    train_in_process(config)
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(8))
    assert_exactly_once(tmp_path)


@pytest.mark.parametrize("names", [("streaming", "sync"), ("pipelined", "streaming")])
def test_a_run_goes_on_in_another_schedule(
    names: tuple[str, str], material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (ppo(material, tmp_path, **GROUPS, trainer__schedule__name=name) for name in names)
    if names[1] == "sync":
        second["trainer.schedule.max_staleness"] = 0
    crash_in(build_in_process(first), "update_actor", 4, monkeypatch)
    train_in_process(second)
    assert_exactly_once(tmp_path)


class Seen:
    """The batches of a run, and the weights of each version."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.batches: list[DataProto] = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.trainer = build_in_process(config)
        take, update = self.trainer.take_responses, self.trainer.update_actor
        self.keep_weights()

        def taking(step: Step) -> None:
            take(step)
            self.batches.append(step.batch)

        def updating(step: Step) -> Any:
            result = update(step)
            self.keep_weights()
            return result

        self.trainer.take_responses, self.trainer.update_actor = taking, updating  # type: ignore[method-assign]
        self.trainer.fit()

    def keep_weights(self) -> None:
        group: Any = self.trainer.actor_rollout_wg
        state = group._workers[group.name].actor.module.state_dict()
        self.weights.append({name: tensor.clone() for name, tensor in state.items()})

    def num_spanning(self) -> int:
        """Responses with tokens of several versions; they only rise."""
        count = 0
        for batch in self.batches:
            for versions, mask in zip(batch.batch["policy_versions"], batch.batch["response_mask"].bool(), strict=True):
                own = versions[mask].tolist()
                assert own == sorted(own)
                count += own[0] != own[-1]
        return count


@pytest.fixture(scope="module")
def tails(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return end_early(make_material(tmp_path_factory.mktemp("tails")))


def end_early(folder: Path) -> Path:
    """Let most responses be short and a few long: one in eight of the model's tokens ends a response."""
    path = folder / "model" / "generation_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    vocabulary = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
    path.write_text(json.dumps(settings | {"eos_token_id": list(range(3, vocabulary, 8))}))
    return folder


LONG = {"data__max_response_length": 40, "trainer__save_freq": -1, "trainer__test_freq": -1, **GROUPS}


def assert_log_probs_of_their_versions(seen: Seen, material: Path) -> None:
    """The slow way: each token's version, as a whole model over the whole text."""
    model = AutoModelForCausalLM.from_pretrained(material / "model").eval()
    compared = 0
    for batch in seen.batches:
        columns = batch.batch
        width = columns["responses"].shape[1]
        for version in columns["policy_versions"][columns["response_mask"].bool()].unique().tolist():
            model.load_state_dict(seen.weights[version])
            with torch.no_grad():
                logits = model(
                    columns["input_ids"], attention_mask=columns["attention_mask"], position_ids=columns["position_ids"]
                ).logits
            log_probs = logits[:, -width - 1 : -1].log_softmax(-1)
            expected = log_probs.gather(-1, columns["responses"][..., None])[..., 0]
            own = (columns["policy_versions"] == version) & columns["response_mask"].bool()
            torch.testing.assert_close(columns["rollout_log_probs"][own], expected[own], atol=1e-4, rtol=0)
            compared += int(own.sum())
    assert compared == sum(int(batch.batch["response_mask"].sum()) for batch in seen.batches)


@pytest.mark.parametrize("placement", [{}, APART], ids=["colocated", "apart"])
def test_responses_go_on_across_updates_and_each_log_prob_is_of_the_version_that_it_carries(
    placement: dict[str, Any], tails: Path, tmp_path: Path
) -> None:
    """With keys and values computed again."""
    seen = Seen(ppo(tails, tmp_path, **{**streaming(2, on_too_old="drop"), **LONG, **placement}))
    assert_log_probs_of_their_versions(seen, tails)
    assert seen.num_spanning() > 0 or placement, "beside the training it depends on time"


@pytest.mark.parametrize("on_update", ["restart", "finish"])
def test_no_response_spans_an_update_that_it_restarts_at_or_ends_before(
    on_update: str, tails: Path, tmp_path: Path
) -> None:
    seen = Seen(ppo(tails, tmp_path, **{**streaming(2, on_update=on_update, on_too_old="drop"), **LONG}))
    assert seen.num_spanning() == 0


def test_groups_that_are_too_old_are_sampled_anew_and_counted(tails: Path, tmp_path: Path) -> None:
    config = ppo(tails, tmp_path, **{**streaming(1, on_too_old="drop"), **LONG})
    train_in_process(config)
    assert sum(line[NO_MORE] for line in read_metrics(tmp_path)[1:]) > 0
    assert_exactly_once(tmp_path)


def test_kept_keys_and_values_are_a_choice(tails: Path, tmp_path: Path) -> None:
    train_in_process(ppo(tails, tmp_path, **{**streaming(2, kv_cache="keep"), **LONG, **APART}))
    assert max(line["training/staleness/max"] for line in read_metrics(tmp_path)[1:]) <= 2


def test_admission_sampling_waiting_and_versions_are_in_the_records(
    tails: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And responses are graded as they end, some groups while others of their step are sampled."""
    monkeypatch.setattr(run_records, "COLLECT_SECONDS", 0.0)
    trainer = build_in_process(ppo(tails, tmp_path, **{**streaming(1), **LONG, **APART}))
    graded, queues, sides = [], [], []
    ask, take = trainer.groups.reward.compute_reward, trainer.take_responses

    def asking(batch: DataProto, **options: Any) -> Any:
        graded.extend([] if options["validation"] else [len(batch)])
        return ask(batch, **options)

    def taking(step: Step) -> None:
        take(step)
        queues.append(trainer.rollouts.queue())
        sides.append(trainer.log._sides({"rollout_pool": "idle", "global_pool": "update_actor"}))
        trainer.log.follow()
        newest = [
            event["name"] for event in read_events(tmp_path / "timeline.json") if event["args"]["step"] == step.number
        ]
        assert "wait_for_responses" in newest, "in the middle of a step"

    trainer.groups.reward.compute_reward, trainer.take_responses = asking, taking  # type: ignore[attr-defined,method-assign]
    trainer.fit()
    lines = read_metrics(tmp_path)[1:]
    rows = [2 * size for size in (8, 8, 4, 8, 8, 4, 8)]
    assert sum(graded) == sum(rows)
    assert len(graded) > len(rows), "as they end, and not step by step"
    assert [queue["sampling"] + queue["ended"] for queue in queues] == [*(size // 2 for size in rows[1:]), 0]
    assert sides[0] == {"queue": queues[0], "waits": "rollout"}
    assert lines[0]["timing_s/gen"] > 0
    assert all(line["timing_s/wait_for_responses"] >= 0 for line in lines)

    events = read_events(tmp_path / "timeline.json")
    by_name = {name: [event["args"] for event in events if event["name"] == name] for name in ("admit", "sample")}
    assert sum(about["prompts"] for about in by_name["admit"]) == sum(rows) // 2
    assert [about["version"] for about in by_name["admit"]] == list(range(6))
    assert {about["pool"] for about in by_name["sample"]} == {"rollout_pool"}
    assert {about["version"] for about in by_name["sample"]} <= set(range(8))
    updates = [event["args"] for event in events if event["name"] in ("update_actor", "receive_weights")]
    assert {about["version"] - about["step"] for about in updates if about["step"]} == {0}
    assert not [event for event in events if event["name"] == "collect_finished"]
    shown = dict(summarize(lines, {}, None))
    assert "rollout" in shown["waited for the other"]


@pytest.mark.parametrize("placement", [{}, APART], ids=["colocated", "apart"])
def test_validation_and_old_log_probs_are_of_the_newest_weights(
    placement: dict[str, Any], tails: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While responses are under way: a validation never lacks the last update, and old log-probs have it, too."""
    seen = Watch(monkeypatch)
    changes = {**streaming(2, on_too_old="drop"), **LONG, **placement, "trainer__test_freq": 1}
    train_in_process(ppo(tails, tmp_path, **{**changes, "trainer__total_training_steps": 4}))
    weights = {0: seen.before[1], **seen.after}
    assert len(set(weights.values())) == 5
    assert seen.validated == weights
    assert seen.old == seen.before == {step: weights[step - 1] for step in range(1, 5)}


def test_the_warm_up_of_a_critic_makes_no_version(material: Path, tmp_path: Path) -> None:
    train_in_process(ppo(material, tmp_path, **{**GROUPS, **streaming(1), "trainer__critic_warmup": 3}))
    ages = [line["training/staleness/max"] for line in read_metrics(tmp_path)[1:]]
    assert ages[:3] == [0, 0, 0]
    assert max(ages) == 1
    assert_exactly_once(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("on_update", ["continue", "restart", "finish"])
@pytest.mark.parametrize("placement", [{}, APART], ids=["colocated", "apart"])
def test_adapters_and_what_is_sampled_with_them(
    placement: dict[str, Any], on_update: str, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = {"actor_rollout_ref__model__lora_rank": 4, "actor_rollout_ref__actor__use_kl_loss": False}
    config = ppo(material, tmp_path, **{**GROUPS, **streaming(2, on_update=on_update), **lora, **placement})
    crash_in(build_in_process(config), "update_actor", 4, monkeypatch)
    train_in_process(config)
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(8))
    assert_exactly_once(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["pipelined", "streaming"])
def test_a_reward_model_scores_stale_responses_as_those_of_sync(schedule: str, tmp_path: Path) -> None:
    """Without staleness to the last bit; with it, the bound holds and each prompt trains once."""
    mixed = make_mixed_material(tmp_path / "material")
    how = {"trainer__total_training_steps": 3, **GROUPS}
    train_in_process(mixed_config(mixed, tmp_path / "sync", **how))
    for staleness in (0, 1):
        keys = {"trainer__schedule__name": schedule, "trainer__schedule__max_staleness": staleness}
        train_in_process(mixed_config(mixed, tmp_path / str(staleness), **how, **keys))
        assert_exactly_once(tmp_path / str(staleness))
    assert results(tmp_path / "0", NO_MORE) == results(tmp_path / "sync")
    assert max(line["training/staleness/max"] for line in read_metrics(tmp_path / "1")[1:]) == 1


def test_what_a_step_waits_for_is_not_taken_by_a_look_after_the_requests(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looks come from any wait for a call, also from that of `collect` itself."""
    trainer = build_in_process(ppo(material, tmp_path, **{**GROUPS, **streaming(1), **APART, "trainer__save_freq": -1}))
    poll, grade = RequestPool.poll, trainer.grade
    looking: list[str] = []

    def polling(pool: RequestPool, wanted: int) -> list[DataProto]:
        assert not looking, "it would wait for the next response, though this one is there"
        looking.append("inside")
        trainer._look_after()
        looking.clear()
        return poll(pool, wanted)

    def grading(*args: Any, **kwargs: Any) -> Any:
        trainer._look_after()
        return grade(*args, **kwargs)

    monkeypatch.setattr(RequestPool, "poll", polling)
    trainer.grade = grading  # type: ignore[method-assign]
    trainer.fit()
    assert len(read_metrics(tmp_path)) == 8
    assert_exactly_once(tmp_path)
