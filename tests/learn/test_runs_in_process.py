"""How a run begins, validates, saves and resumes: the real trainer and workers, in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from paceline.config import ActorConfig
from paceline.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    RewardError,
    UnknownDataSourceError,
    WeightMismatchError,
)
from paceline.rollout.native import NativeRollout
from paceline.run_folder import list_checkpoints
from paceline.single_controller.base import Dispatch, Worker, register
from paceline.single_controller.in_process import InProcessWorkerGroup
from paceline.trainer.main_ppo import TaskRunner, complete_config
from paceline.trainer.ppo import run_lock as run_lock_module
from paceline.trainer.ppo.ray_trainer import RayPPOTrainer
from paceline.trainer.ppo.roles import Role
from paceline.trainer.ppo.weight_transfer import ObjectStoreTransfer
from paceline.trainer.ppo.worker_groups import count_optimizer_steps
from paceline.workers import weight_calls
from tests.in_process import build_in_process, train_in_process
from tests.runs import as_omegaconf, base_config, read_metrics, results


@pytest.fixture(scope="module")
def whole(material: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run of six steps with a checkpoint at each: the end of an epoch is among them."""
    run_dir = tmp_path_factory.mktemp("whole")
    train_in_process(config(material, run_dir))
    return run_dir


def config(material: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "trainer__total_training_steps": 6,
        "trainer__save_freq": 1,
        "trainer__test_freq": 2,
        "trainer__critic_warmup": 2,
        "algorithm__use_kl_in_reward": True,
        "algorithm__kl_ctrl__type": "adaptive",
        "actor_rollout_ref__actor__shuffle": True,
        "actor_rollout_ref__actor__ppo_epochs": 2,
    }
    return base_config(material, run_dir, **(settings | changes))


class CrashError(Exception):
    pass


def crash_in(trainer: RayPPOTrainer, method: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until `method` is called in `step`."""
    *path, name = method.split(".")
    owner = getattr(trainer, path[0]) if path else trainer
    original = getattr(owner, name)

    def crash(*args: Any, **kwargs: Any) -> Any:
        if trainer.global_step == step:
            raise CrashError
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, crash)
    with pytest.raises(CrashError):
        trainer.fit()


@pytest.mark.parametrize(
    "method", ["validate", "checkpoints.begin", "checkpoints.finish", "close", "score", "update_actor", "generate"]
)
@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_a_run_that_crashed_anywhere_and_resumed_equals_one_that_did_not(
    material: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, step: int
) -> None:
    if method == "validate":
        step = 4
    crash_in(build_in_process(config(material, tmp_path)), method, step, monkeypatch)
    train_in_process(config(material, tmp_path))
    assert results(tmp_path) == results(whole)


NORM = "model.norm.weight"
APART = {"trainer__n_gpus_per_node": 2, "trainer__placement__rollout_devices": 1}


@pytest.mark.device
def test_a_rollout_on_a_pool_of_its_own_gives_the_same_numbers_and_resumes(
    material: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_calls, "BUCKET_BYTES", 4096)
    trainer = build_in_process(config(material, tmp_path, **APART))
    assert isinstance(trainer.weight_transfer, ObjectStoreTransfer)
    assert trainer.weight_transfer.num_buckets > 3
    crash_in(trainer, "generate", 4, monkeypatch)
    train_in_process(config(material, tmp_path, **APART))
    assert results(tmp_path) == results(whole)


def test_a_rollout_that_lacks_weights_ends_the_run_in_the_step_it_happens(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, times = NativeRollout.load_weights, []

    def skip_norm(engine: NativeRollout, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        times.append(1)
        kept = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
        came = dict(named)
        load(engine, (came | {NORM: kept[NORM]} if len(times) == 4 else came).items())

    monkeypatch.setattr(NativeRollout, "load_weights", skip_norm)
    with pytest.raises(WeightMismatchError, match=rf"version 3: 1 of \d+ differ, {NORM}"):  # of steps 2, 3 and 4
        train_in_process(config(material, tmp_path, **APART))
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3]


def test_a_file_asks_for_a_checkpoint_and_the_run_goes_on(material: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").touch()
    settings = {"trainer__save_freq": -1, "trainer__total_training_steps": 2, "trainer__val_before_train": False}
    train_in_process(config(material, tmp_path, **settings))
    assert list(list_checkpoints(tmp_path / "checkpoints")) == [1]
    assert not (tmp_path / "checkpoint").exists()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_actor_and_rollout_in_one_process_cannot_broadcast(material: Path, tmp_path: Path) -> None:
    broadcast = {"actor_rollout_ref__rollout__weight_transfer": "broadcast"}
    with pytest.raises(ConfigError, match="share one, which would wait for itself"):
        build_in_process(config(material, tmp_path, **APART, **broadcast))


def test_the_critics_devices_generate_their_share_with_the_same_weights(material: Path, tmp_path: Path) -> None:
    split = {"trainer__n_gpus_per_node": 2, "trainer__placement__name": "split"}
    both = {"trainer__placement__rollout_on": ["actor_rollout_ref_pool", "critic_pool"]}
    train_in_process(config(material, tmp_path, **split, **both))
    lines = read_metrics(tmp_path)
    assert max(line.get("training/rollout_probs_diff_max", 0.0) for line in lines[1:]) < 1e-5
    assert {"timing_s/send_weights", "timing_s/receive_weights"} <= lines[3].keys()
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    generating = {rows[event["tid"]].split()[0] for event in events if event["name"] == "generate_sequences"}
    assert generating == {"actor_rollout_ref_pool", "critic_pool"}


def test_the_critic_alone_learns_before_the_step_that_critic_warmup_names(whole: Path) -> None:
    lines = read_metrics(whole)
    assert "actor/pg_loss" not in lines[1]
    assert "critic/vf_loss" in lines[1]
    assert "actor/pg_loss" in lines[2]


@pytest.mark.parametrize(("warmup", "batches"), [(0, 6), (1, 6), (2, 5), (5, 2)])
def test_the_actors_schedule_begins_with_its_first_step(
    material: Path, tmp_path: Path, warmup: int, batches: int
) -> None:
    """Batches of 8, 8 and 4 prompts, again and again, in mini-batches of 4 and two passes."""
    group = build_in_process(config(material, tmp_path, trainer__critic_warmup=warmup)).actor_rollout_wg
    sizes = [2, 2, 1, 2, 2, 1]
    assert group._workers[group.name].run.total_optimizer_steps == 2 * sum(sizes[-batches:])


def test_resuming_from_an_older_checkpoint_leaves_the_other_branch_aside(
    material: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_in_process(config(material, tmp_path))
    older = tmp_path / "checkpoints" / "global_step_2"
    path = {"trainer__resume_mode": "resume_path", "trainer__resume_from_path": str(older)}
    crash_in(build_in_process(config(material, tmp_path, **path)), "generate", 3, monkeypatch)
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2]
    train_in_process(config(material, tmp_path))
    assert results(tmp_path) == results(whole)
    first, second, last = ((tmp_path / name).read_text() for name in ("config.1.yaml", "config.2.yaml", "config.yaml"))
    assert str(older) in second
    assert first == last


def test_resuming_from_another_run_begins_new_records_at_its_step(material: Path, whole: Path, tmp_path: Path) -> None:
    path = str(whole / "checkpoints" / "global_step_4")
    train_in_process(config(material, tmp_path, trainer__resume_mode="resume_path", trainer__resume_from_path=path))
    assert results(tmp_path) == results(whole)[5:]


def test_starting_anew_keeps_what_an_earlier_run_left(material: Path, whole: Path, tmp_path: Path) -> None:
    for _ in range(2):
        train_in_process(config(material, tmp_path, trainer__resume_mode="disable"))
    assert results(tmp_path) == results(whole)
    assert (tmp_path / "metrics.1.jsonl").exists()
    assert (tmp_path / "checkpoints.1" / "global_step_6").exists()


def test_a_complete_run_is_left_as_it_is(material: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train_in_process(config(material, tmp_path, trainer__total_training_steps=1))
    before = results(tmp_path)
    train_in_process(config(material, tmp_path, trainer__total_training_steps=1))
    assert results(tmp_path) == before
    assert "this run is complete" in caplog.text


def test_val_only_validates_a_checkpoint_without_touching_the_runs_records(
    material: Path, whole: Path, tmp_path: Path
) -> None:
    train_in_process(config(material, tmp_path, trainer__val_only=True, trainer__total_training_steps=6))
    assert [line["step"] for line in read_metrics(tmp_path)] == [0]
    before = results(whole)
    train_in_process(config(material, whole, trainer__val_only=True))
    assert results(whole) == before
    (line,) = read_metrics(whole / "validation")
    key = "val-core/openai/gsm8k/reward/mean@1"
    assert (line["step"], line[key]) == (6, before[-1][key])


def test_a_checkpoint_of_a_run_with_other_roles_is_refused(material: Path, whole: Path, tmp_path: Path) -> None:
    grpo = {"algorithm__adv_estimator": "grpo", "actor_rollout_ref__rollout__n": 2, "trainer__critic_warmup": 0}
    train_in_process(config(material, tmp_path, trainer__total_training_steps=1, **grpo))
    with pytest.raises(CheckpointError, match="has no critic"):
        train_in_process(config(material, tmp_path))


def test_schedules_count_the_optimizer_steps_of_the_real_batches() -> None:
    """20 prompts in batches of 8 and mini-batches of 4: 2 + 2 + 1 optimizer steps in an epoch, times 2 passes."""
    actor = ActorConfig(ppo_mini_batch_size=4, ppo_epochs=2)
    data = {"prompts": 20, "batch": 8, "last_step": 6}
    assert count_optimizer_steps(actor, first_step=1, drop_last=False, **data) == 2 * 2 * (2 + 2 + 1)
    assert count_optimizer_steps(actor, first_step=3, drop_last=False, **data) == 2 * 1 + 2 * (2 + 2 + 1)
    assert count_optimizer_steps(actor, first_step=1, drop_last=True, **data) == 2 * 6 * 2


def test_samples_of_training_responses_are_logged_with_their_scores(
    material: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    changes = {"trainer__total_training_steps": 1, "trainer__log_train_samples": 2}
    train_in_process(config(material, tmp_path, **changes))
    samples = [record.getMessage() for record in caplog.records if "step 1 sample" in record.getMessage()]
    assert len(samples) == 2
    assert "prompt 'user: " in samples[0]
    assert "score" in samples[0]


class MyRole(Enum):
    Judge = "judge"


class JudgeWorker(Worker):
    def __init__(self, config: Any, role: str, run: Any) -> None:
        self.model_path = config.actor_rollout_ref.model.path

    @register(Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.loaded = True

    @register(Dispatch.RANK_ZERO)
    def judge(self) -> tuple[str, bool]:
        return self.model_path, self.loaded


def test_a_role_of_the_users_own_gets_its_workers(material: Path, tmp_path: Path) -> None:
    runner = TaskRunner()
    runner.role_worker_mapping[MyRole.Judge] = JudgeWorker
    runner.mapping[MyRole.Judge] = "global_pool"
    trainer = runner.build_trainer(complete_config(as_omegaconf(config(material, tmp_path))), InProcessWorkerGroup)
    trainer.init_workers()
    assert trainer.worker_groups[MyRole.Judge].judge() == (str(material / "model"), True)


def test_one_worker_can_be_actor_rollout_and_reference(material: Path, whole: Path, tmp_path: Path) -> None:
    runner = TaskRunner()
    complete = complete_config(as_omegaconf(config(material, tmp_path)))
    trainer = runner.build_trainer(complete, InProcessWorkerGroup)
    mapping = trainer.role_worker_mapping
    worker = mapping.pop(Role.ActorRollout)
    mapping.pop(Role.RefPolicy)
    mapping[Role.ActorRolloutRef] = worker
    trainer.resource_pool_manager.mapping[Role.ActorRolloutRef] = "global_pool"
    trainer.init_workers()
    assert trainer.ref_policy_wg is trainer.actor_rollout_wg
    trainer.fit()
    assert results(tmp_path) == results(whole)


def test_missing_roles_pools_and_rewards_are_all_reported(material: Path, tmp_path: Path) -> None:
    trainer = TaskRunner().build_trainer(
        complete_config(as_omegaconf(config(material, tmp_path))), InProcessWorkerGroup
    )
    with pytest.raises(ConfigError) as error:
        RayPPOTrainer(trainer.config, trainer.tokenizer, {MyRole.Judge: JudgeWorker}, trainer.resource_pool_manager)
    text = str(error.value)
    for part in ("Role.ActorRollout", "Role.Critic", "Role.RefPolicy", "Judge has a worker class", "reward_fn is None"):
        assert part in text


@pytest.mark.parametrize("files", ["train", "val"])
def test_an_unknown_source_in_training_or_validation_data_is_an_error_before_workers_start(
    material: Path, tmp_path: Path, files: str
) -> None:
    rows = pq.read_table(material / "test.parquet").to_pylist()
    for row in rows[:2]:
        row["data_source"] = "nobody/knows"
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "mixed.parquet")
    changes = {f"data__{files}_files": str(tmp_path / "mixed.parquet"), "custom_reward_function__path": None}
    with pytest.raises(UnknownDataSourceError, match=r"nobody/knows.*2 of 6 rows.*openai/gsm8k"):
        train_in_process(config(material, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_tests_of_code_that_every_program_passes_are_an_error_before_workers_start(
    material: Path, tmp_path: Path
) -> None:
    rows = pq.read_table(material / "test.parquet").to_pylist()
    for row, truth in zip(rows, ["assert f(1) == 2", "x = 1", "assert np.all(f(1))"], strict=False):
        row["data_source"], row["reward_model"]["ground_truth"] = "apps", truth
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "code.parquet")
    changes = {"data__train_files": str(tmp_path / "code.parquet"), "custom_reward_function__path": None}
    with pytest.raises(DataError, match=r"2 of 6 rows.*\n.*row 1 of .*code.parquet.*no assertion.*\n.*row 2 .*'np'"):
        train_in_process(config(material, tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_the_run_folder_holds_the_complete_config(whole: Path) -> None:
    from omegaconf import OmegaConf

    saved = OmegaConf.load(whole / "config.yaml")
    assert saved.trainer.save_freq == 1
    assert saved.algorithm.gamma == 1.0
    assert json.loads((whole / "checkpoints" / "global_step_6" / "trainer.json").read_text())["global_step"] == 6


def test_generations_of_training_and_validation_are_dumped(
    material: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    changes = {
        "trainer__total_training_steps": 2,
        "trainer__rollout_data_dir": str(tmp_path / "rollouts"),
        "trainer__validation_data_dir": str(tmp_path / "validation"),
        "trainer__log_val_generations": 1,
        "actor_rollout_ref__rollout__val_kwargs__n": 2,
        "actor_rollout_ref__rollout__val_kwargs__do_sample": True,
    }
    train_in_process(config(material, tmp_path / "run", **changes))
    rollouts = [json.loads(line) for line in (tmp_path / "rollouts" / "2.jsonl").read_text().splitlines()]
    assert len(rollouts) == 8
    assert set(rollouts[0]) >= {"step", "prompt", "response", "score", "data_source", "ground_truth", "uid"}
    mean = sum(row["score"] for row in rollouts) / 8
    line = read_metrics(tmp_path / "run")[2]
    assert line["critic/score/mean"] == pytest.approx(mean, rel=1e-5)
    for step in (0, 2):
        rows = [json.loads(text) for text in (tmp_path / "validation" / f"{step}.jsonl").read_text().splitlines()]
        assert len(rows) == 12
    best = [max(pair[0]["score"], pair[1]["score"]) for pair in zip(rows[::2], rows[1::2], strict=True)]
    assert line["val-aux/openai/gsm8k/reward/best@2"] == pytest.approx(sum(best) / 6)


def test_old_checkpoints_go_when_there_are_enough(material: Path, whole: Path, tmp_path: Path) -> None:
    keep = {"trainer__max_actor_ckpt_to_keep": 2, "trainer__max_critic_ckpt_to_keep": 1}
    train_in_process(config(material, tmp_path, **keep))
    folders = sorted(folder.name for folder in (tmp_path / "checkpoints").glob("global_step_*"))
    assert folders == ["global_step_5", "global_step_6"]
    assert not (tmp_path / "checkpoints" / "global_step_5" / "critic").exists()
    assert results(tmp_path) == results(whole)


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(
    material: Path, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    train_in_process(config(material, tmp_path, trainer__total_training_steps=4))
    weights = tmp_path / "checkpoints" / "global_step_4" / "actor" / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(weights.read_bytes()[:-100])
    train_in_process(config(material, tmp_path))
    assert "model.safetensors" in caplog.text
    assert results(tmp_path) == results(whole)


@pytest.mark.parametrize("overlap", ["none", "updates"])
def test_less_overlap_gives_the_same_numbers(material: Path, whole: Path, tmp_path: Path, overlap: str) -> None:
    train_in_process(config(material, tmp_path, trainer__overlap=overlap))
    assert results(tmp_path) == results(whole)


def test_groups_without_signal_are_replaced(material: Path, tmp_path: Path) -> None:
    """The reward is 1 for every response to half of the prompts, so groups of those teach nothing."""
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 1.0 if extra_info['index'] % 2 else float(len(solution_str.encode()) + hash_of(solution_str))\n"
        "def hash_of(text):\n"
        "    return sum(map(ord, text)) / 1000\n"
    )
    changes = {
        "algorithm__adv_estimator": "grpo",
        "algorithm__use_kl_in_reward": False,
        "algorithm__filter_groups__enable": True,
        "actor_rollout_ref__rollout__n": 2,
        "trainer__critic_warmup": 0,
        "custom_reward_function__path": str(tmp_path / "reward.py"),
        "trainer__rollout_data_dir": str(tmp_path / "rollouts"),
        "trainer__total_training_steps": 3,
    }
    train_in_process(config(material, tmp_path / "run", **changes))
    lines = read_metrics(tmp_path / "run")
    for step, line in enumerate(lines[1:], start=1):
        rows = [json.loads(text) for text in (tmp_path / "rollouts" / f"{step}.jsonl").read_text().splitlines()]
        by_group: dict[str, set[float]] = {}
        for row in rows:
            by_group.setdefault(row["uid"], set()).add(row["score"])
        assert all(len(scores) == 2 for scores in by_group.values())
        assert len(rows) == 16
        assert line["training/gen_batches"] > 1
        assert line["training/share_kept"] < 1


@pytest.mark.device
def test_a_run_may_go_on_in_another_placement(material: Path, whole: Path, tmp_path: Path) -> None:
    train_in_process(config(material, tmp_path, trainer__total_training_steps=4))
    split = {"trainer__placement__name": "split", "trainer__n_gpus_per_node": 2}
    train_in_process(config(material, tmp_path, **split))
    assert results(tmp_path) == results(whole)


def test_a_run_that_was_asked_to_end_saves_and_goes_on_later(
    material: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build_in_process(config(material, tmp_path, trainer__save_freq=-1))
    update = trainer.update_actor

    def asking(batch: Any) -> Any:
        if trainer.global_step == 3:
            (tmp_path / "stop").touch()
        return update(batch)

    monkeypatch.setattr(trainer, "update_actor", asking)
    trainer.fit()
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3]
    assert not (tmp_path / "stop").exists()
    train_in_process(config(material, tmp_path))
    assert results(tmp_path) == results(whole)


def test_a_folder_has_one_run_at_a_time(material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock_module, "PATIENCE_SECONDS", 0.3)
    with (
        run_lock_module.run_lock(tmp_path),
        pytest.raises(ConfigError, match=rf"in use by another run \(process {os.getpid()} on .*, since "),
    ):
        build_in_process(config(material, tmp_path))  # before a model is loaded
    train_in_process(config(material, tmp_path, trainer__total_training_steps=1))


@pytest.mark.parametrize("metric", ["seq_reward", "acc"])
def test_failed_gradings_and_uneven_fields_do_not_stop_a_refill_and_are_counted(
    material: Path, tmp_path: Path, metric: str
) -> None:
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if extra_info['index'] % 4 == 0:\n"
        "        raise ValueError('no')\n"
        "    score = float(sum(map(ord, solution_str)) % 2)\n"
        "    return {'score': score, 'acc': score} | ({'note': 'odd'} if extra_info['index'] % 2 else {})\n"
    )
    changes = {
        "algorithm__adv_estimator": "grpo",
        "algorithm__use_kl_in_reward": False,
        "algorithm__filter_groups__enable": True,
        "algorithm__filter_groups__metric": metric,
        "actor_rollout_ref__rollout__n": 2,
        "trainer__critic_warmup": 0,
        "custom_reward_function__path": str(tmp_path / "reward.py"),
        "trainer__total_training_steps": 3,
        "data__val_files": None,
        "trainer__test_freq": -1,
    }
    train_in_process(config(material, tmp_path / "run", **changes))
    assert all(line["reward/grader_errors"] > 0 for line in read_metrics(tmp_path / "run"))


def test_a_step_whose_update_fails_late_is_not_saved(
    material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With full overlap a save is issued before it is known that the updates went well."""
    trainer = build_in_process(config(material, tmp_path))
    update_critic = trainer.update_critic

    class FailsLate:
        def get(self) -> Any:
            raise CrashError

    def failing(batch: Any) -> Any:
        return FailsLate() if trainer.global_step == 3 else update_critic(batch)

    monkeypatch.setattr(trainer, "update_critic", failing)
    with pytest.raises(CrashError):
        trainer.fit()
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("global_step_*")) == [
        "global_step_1",
        "global_step_2",
    ]
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize("mode", ["resume_path", "disable"])
def test_a_look_at_an_older_checkpoint_changes_nothing_in_the_run(material: Path, tmp_path: Path, mode: str) -> None:
    train_in_process(config(material, tmp_path, trainer__total_training_steps=3))
    before = sorted(path.name for path in (tmp_path / "checkpoints").iterdir()), results(tmp_path)
    older = {"trainer__resume_from_path": str(tmp_path / "checkpoints" / "global_step_2")}
    look = {"trainer__val_only": True, "trainer__resume_mode": mode, **(older if mode == "resume_path" else {})}
    train_in_process(config(material, tmp_path, **look))
    assert (sorted(path.name for path in (tmp_path / "checkpoints").iterdir()), results(tmp_path)) == before
    (line,) = read_metrics(tmp_path / "validation")
    assert line["step"] == (2 if mode == "resume_path" else 0)


def test_a_reward_function_that_fails_on_everything_stops_the_run_unless_it_may(material: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    raise ValueError('broken')\n"
    )
    changes = {"custom_reward_function__path": str(tmp_path / "reward.py"), "trainer__total_training_steps": 1}
    with pytest.raises(RewardError, match=r"all 6 responses.*broken"):
        train_in_process(config(material, tmp_path / "run", **changes))
    counted = {"reward_model__on_error": "zero_and_count"}
    train_in_process(config(material, tmp_path / "counted", **changes, **counted))
    assert read_metrics(tmp_path / "counted")[1]["reward/grader_errors"] == 8


def test_without_a_word_about_it_a_run_saves_and_validates_at_its_end(material: Path, tmp_path: Path) -> None:
    unset = {"trainer__save_freq": None, "trainer__test_freq": None, "trainer__total_training_steps": 3}
    train_in_process(config(material, tmp_path / "unset", **unset))
    assert [path.name for path in (tmp_path / "unset/checkpoints").glob("global_step_*")] == ["global_step_3"]
    assert _validated_steps(tmp_path / "unset") == [0, 3]
    never = {**unset, "trainer__save_freq": -1, "trainer__test_freq": -1}
    train_in_process(config(material, tmp_path / "never", **never))
    assert not (tmp_path / "never/checkpoints").exists()
    assert _validated_steps(tmp_path / "never") == [0]


def _validated_steps(run: Path) -> list[int]:
    return [line["step"] for line in read_metrics(run) if any(name.startswith("val-core/") for name in line)]


def test_the_size_of_validation_batches_changes_nothing(material: Path, tmp_path: Path) -> None:
    sampling = {"do_sample": True, "n": 2}
    changes = {f"actor_rollout_ref__rollout__val_kwargs__{name}": value for name, value in sampling.items()}
    responses = {}
    for size in (None, 4):
        run = tmp_path / str(size)
        dumps = {"trainer__validation_data_dir": str(run / "dumps"), "trainer__val_only": True}
        trainer = build_in_process(config(material, run, data__val_batch_size=size, **changes, **dumps))
        assert len(trainer.val_dataloader) == (1 if size is None else 2)
        trainer.fit()
        lines = [json.loads(line) for line in (run / "dumps/0.jsonl").read_text().splitlines()]
        responses[size] = [(line["uid"], line["prompt"], line["response"]) for line in lines]
    assert responses[None] == responses[4]
    assert len({response for *_, response in responses[4]}) > 2, "they were sampled"
