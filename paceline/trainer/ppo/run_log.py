"""The records of a run: metrics, timeline and samples of every step, in the run's folder and on the console."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import ray
from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase

from paceline.config import PPOConfig
from paceline.config.load import to_dict
from paceline.config.secrets import without_secrets
from paceline.files import keep_old, write_atomically
from paceline.log_file import SAMPLES_LOGGER
from paceline.protocol import DataProto
from paceline.redaction import redacted
from paceline.report.dumps import dump_generations, generation_rows, token_rows
from paceline.report.environment import describe_environment
from paceline.report.json_lines import plain
from paceline.report.metrics import Timer, data_metrics, idle_metrics, throughput_metrics, timing_metrics
from paceline.report.samples import SampleFiles
from paceline.report.status import State, StatusWriter
from paceline.report.timeline import TimelineWriter, merge_spans
from paceline.report.trackers import Tracking
from paceline.run_folder import CONFIG_FILE, ENVIRONMENT_FILE, SAMPLES_FOLDER, STATUS_FILE, TIMELINE_FILE
from paceline.single_controller.base import CallRecord, call_tag
from paceline.trainer.ppo.scoring import grader_fields
from paceline.trainer.ppo.step import Step

if TYPE_CHECKING:
    from paceline.report.spans import SpanExport

logger = logging.getLogger(__name__)

NOTICE_SECONDS = 10.0
"""A validation that takes longer says so in the log, and how far it is."""

# How the remote methods are called in `timing_s/...`.
PHASE_NAMES = {
    "generate_sequences": "gen",
    "decode_until": "gen",
    "compute_log_prob": "old_log_prob",
    "compute_ref_log_prob": "ref",
    "compute_values": "values",
    "compute_rm_score": "rm",
    "compute_reward": "reward",
    "update_actor": "update_actor",
    "update_critic": "update_critic",
    "send_weights": "send_weights",
    "receive_weights": "receive_weights",
    "describe_update": "describe_update",
}


def phase_seconds(records: list[CallRecord], step: int) -> dict[str, float]:
    """Seconds of each remote phase of a step in which at least one rank was at it, validation left out."""
    seconds = {}
    own = [record for record in records if record.tag.get("step") == step and "validation" not in record.tag]
    for method, phase in PHASE_NAMES.items():
        spans = merge_spans([(record.start, record.end) for record in own if record.method == method])
        if spans:
            seconds[phase] = sum(end - start for start, end in spans)
    return seconds


def _step_of(record: CallRecord) -> int:
    return cast(int, record.tag.get("step", 0))


class RunLog:
    """The records of one run."""

    def __init__(
        self,
        run_dir: Path,
        config: PPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        resume_step: int | None,
        step: int,
        total_steps: int,
        pools: Iterable[str],
        pool_of_role: Mapping[str, str],
        drain_call_records: Callable[[], list[CallRecord]],
        running_calls: Callable[[], dict[str, str]],
    ) -> None:
        trainer = config.trainer
        run_dir.mkdir(parents=True, exist_ok=True)
        self._write_environment(run_dir / ENVIRONMENT_FILE, config)
        self._samples = SampleFiles(run_dir / SAMPLES_FOLDER, trainer.keep_samples, resume_step)
        self._running = lambda: {
            **dict.fromkeys(pools, "idle"),
            **{pool_of_role.get(role, role): method for role, method in running_calls().items()},
        }
        shown = without_secrets(to_dict(config))
        self._write_config(run_dir / CONFIG_FILE, OmegaConf.to_yaml(OmegaConf.create(shown)))
        self.tracking = Tracking(
            run_dir,
            trainer.logger,
            trainer.project_name,
            trainer.experiment_name,
            resume_step=resume_step,
            total_steps=total_steps,
            config=shown,
        )
        if trainer.prometheus_port is not None:
            from paceline.report.prometheus import PrometheusTracker

            self.tracking.add(PrometheusTracker(trainer.prometheus_port, self._running, total_steps, step))
        self._spans: SpanExport | None = None
        if trainer.otlp_endpoint is not None:
            from paceline.report.spans import SpanExport

            self._spans = SpanExport.to(trainer.otlp_endpoint, f"{trainer.project_name}/{trainer.experiment_name}")
        self._config = config
        self._tokenizer = tokenizer
        self.timeline = TimelineWriter(run_dir / TIMELINE_FILE)
        self._drain_call_records = drain_call_records
        self._records: list[CallRecord] = []
        self._pools = list(pools)
        self._timer = Timer()
        self._last_line = time.time()
        self._status = StatusWriter(run_dir / STATUS_FILE, self._running, total_steps, first_step=step)
        self.begin_step(step)

    @staticmethod
    def _write_config(path: Path, text: str) -> None:
        """The configuration of this session; another one of an earlier session is kept."""
        content = text.encode()
        if path.exists() and path.read_bytes() != content:
            keep_old(path)
        path.write_bytes(content)

    @staticmethod
    def _write_environment(path: Path, config: PPOConfig) -> None:
        """What this session runs on; an earlier one's is kept."""
        keep_old(path)
        trainer = config.trainer
        devices = {"kind": trainer.device, "nodes": trainer.nnodes, "per_node": trainer.n_gpus_per_node}
        nodes = [
            {"host": node["NodeManagerHostname"], "resources": node["Resources"]}
            for node in (ray.nodes() if ray.is_initialized() else ())
            if node["Alive"]
        ]
        content = json.dumps(plain(describe_environment(devices=devices, ray_nodes=nodes)), indent=2)
        write_atomically(path, content.encode() + b"\n")

    def begin_step(self, step: int) -> None:
        """Calls issued from now on carry this step in their records."""
        call_tag.set({"step": step})
        self.step = step
        self._status.set_step(step)

    @contextmanager
    def calls_of(self, step: int, version: int) -> Iterator[None]:
        """Calls issued inside belong to this step, perhaps a later one, and sample with weights of this version."""
        token = call_tag.set({"step": step, "version": version})
        try:
            yield
        finally:
            call_tag.reset(token)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what the driver does itself, for the next line and the timeline."""
        start = time.time()
        with self._timer(name):
            yield
        self.timeline.add_span("driver", name, start, time.time(), {"step": self.step})

    @contextmanager
    def validating(self, num_prompts: int) -> Iterator[None]:
        """Calls issued inside belong to validation, not to the step's own phases."""
        trainer = self._config.trainer
        self._validated: list[dict[str, Any]] = []
        token = call_tag.set({"step": self.step, "validation": True})
        self._status.set_validation(0, num_prompts)
        self._next_notice = time.monotonic() + NOTICE_SECONDS
        notice = threading.Timer(NOTICE_SECONDS, self._say_validation)
        notice.daemon = True
        notice.start()
        try:
            with self.phase("testing"):
                yield
        finally:
            notice.cancel()
            self._status.set_validation(0, 0)
            call_tag.reset(token)
        if trainer.validation_data_dir:
            dump_generations(trainer.validation_data_dir, self.step, self._validated)
        self.tracking.show_generations(self._validated, self.step, trainer.log_val_generations)
        self._samples.add_validation(self._validated)

    def add_validated(self, batch: DataProto, info: dict[str, np.ndarray]) -> None:
        """Responses of one batch of a validation: all for files and trackers that want them, else a few to keep."""
        trainer = self._config.trainer
        if not (trainer.validation_data_dir or trainer.log_val_generations):
            batch, info = self._chosen(batch, info)
        self._validated += self._rows(self.step, batch, info)

    def validated(self, num_prompts: int) -> None:
        """So many prompts of this validation have been answered."""
        self._status.set_validation(num_prompts)
        if time.monotonic() > self._next_notice:
            self._say_validation()

    def _say_validation(self) -> None:
        self._next_notice = time.monotonic() + NOTICE_SECONDS
        done, total = self._status.validation
        logger.info("step %d, validation: %d of %d prompts answered", self.step, done, total)

    def _chosen(self, batch: DataProto, info: dict[str, np.ndarray]) -> tuple[DataProto, dict[str, np.ndarray]]:
        rows = self._samples.choose(len(batch))
        return batch[rows], {name: column[rows] for name, column in info.items()}

    def _rows(self, step: int, batch: DataProto, info: dict[str, np.ndarray]) -> list[dict[str, Any]]:
        source_key = self._config.data.reward_fn_key
        return generation_rows(batch, self._tokenizer, step=step, info=info, reward_fn_key=source_key)

    def write_validation(self, metrics: dict[str, float]) -> None:
        """The line of a validation outside of any step."""
        self._collect_records()
        self._samples.write(self.step)
        self.tracking.log(metrics, step=self.step)
        self._timer = Timer()
        self._last_line = time.time()

    def write_step(self, step: Step, *, use_critic: bool, devices: int) -> dict[str, float]:
        """The line of a step whose updates have ended; the next one may have begun. Gives what is in it.

        Its time is that from line to line: the rollout of the next step that went on beside the last update is in it,
        as that of this step was in the line before. A checkpoint behind the next rollout counts for the next.
        """
        self._collect_records()
        start, self._last_line = self._last_line, time.time()
        end = self._last_line
        batch = step.batch
        seconds = self._timer.seconds | phase_seconds(self._records, step.number) | {"step": end - start}
        metrics = {
            **step.metrics,
            **data_metrics(batch, use_critic=use_critic),
            **timing_metrics(batch, seconds),
            **throughput_metrics(batch, seconds["step"], devices),
            **idle_metrics(self._records, self._pools, start, end),
        }
        self._records = [record for record in self._records if record.end > end or _step_of(record) > step.number]
        self._show_samples(step.number, batch)
        info = grader_fields(batch)
        if self._config.trainer.rollout_data_dir:
            dump_generations(self._config.trainer.rollout_data_dir, step.number, self._rows(step.number, batch, info))
        kept, of_kept = self._chosen(batch, info)
        tokens = token_rows(kept, self._tokenizer)
        rows = self._rows(step.number, kept, of_kept)
        self._samples.write(step.number, [{**row, "tokens": own} for row, own in zip(rows, tokens, strict=True)])
        self.tracking.log(metrics, step=step.number)
        if self._spans is not None:
            self._spans.end_step(step.number, end)
        self._timer = Timer()
        return metrics

    def end(self, state: State, error: BaseException | None = None) -> None:
        """Say how the run ended."""
        self._status.close(state, redacted(f"{type(error).__name__}: {error}") if error is not None else None)

    def close(self) -> None:
        """Write what is left. Never raises: it runs also when a run fails, and must not hide why."""
        try:
            self._collect_records()
            self.timeline.close()
        except OSError as error:
            logger.warning("the last calls are missing in the timeline: %s", error)
        except Exception:
            logger.warning("the last calls are missing in the timeline", exc_info=True)
        call_tag.set({})
        if self._spans is not None:
            self._spans.close(time.time())
        self.tracking.close()
        self.end("stopped")  # unless it was said before

    def _collect_records(self) -> None:
        records = self._drain_call_records()
        self._status.processes |= {
            f"{record.pool} {record.process_roles} rank {record.rank}": record.pid for record in records
        }
        self.timeline.add(records)
        self.timeline.flush()
        if self._spans is not None:
            self._spans.add(records)
        self._records += records

    def _show_samples(self, step: int, batch: DataProto) -> None:
        """Put into the log what is rewarded: reward hacking must be visible."""
        scores = batch.batch["token_level_scores"].sum(dim=-1)
        lengths = batch.batch["response_mask"].sum(dim=-1)
        prompt_width = batch.batch["prompts"].shape[-1]
        for row in range(min(self._config.trainer.log_train_samples, len(batch))):
            valid = batch.batch["attention_mask"][row, :prompt_width].bool()
            logging.getLogger(SAMPLES_LOGGER).info(
                "step %d sample: prompt %r response %r score %.3f",
                step,
                self._tokenizer.decode(batch.batch["prompts"][row][valid]),
                self._tokenizer.decode(batch.batch["responses"][row][: int(lengths[row])]),
                scores[row].item(),
            )
