"""The records that a run of any kind leaves: its configuration, metrics, timeline and status, in its folder."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import ray
from omegaconf import OmegaConf

from paceline.config import AnyRunConfig
from paceline.config.load import to_dict
from paceline.config.secrets import without_secrets
from paceline.files import keep_old, write_atomically
from paceline.redaction import redacted
from paceline.report.environment import describe_environment
from paceline.report.json_lines import plain
from paceline.report.metrics import Timer, idle_metrics
from paceline.report.status import State, StatusWriter, deaths_before
from paceline.report.timeline import TimelineWriter, merge_spans
from paceline.report.trackers import Tracking
from paceline.run_folder import CONFIG_FILE, ENVIRONMENT_FILE, STATUS_FILE, TIMELINE_FILE
from paceline.single_controller.base import CallRecord, call_tag

if TYPE_CHECKING:
    from paceline.report.spans import SpanExport

logger = logging.getLogger(__name__)

COLLECT_SECONDS = 10.0
"""How often the timeline follows within a step."""
IDLE = "idle"

# How the remote methods are called in `timing_s/...`.
PHASE_NAMES = {
    "generate_sequences": "gen",
    "decode_until": "gen",
    "sample": "gen",
    "serve_agents": "gen",
    "serve_until": "gen",
    "compute_log_prob": "old_log_prob",
    "compute_ref_log_prob": "ref",
    "compute_teacher_log_prob": "teacher",
    "compute_values": "values",
    "compute_rm_score": "rm",
    "compute_reward": "reward",
    "update_actor": "update_actor",
    "update_critic": "update_critic",
    "send_weights": "send_weights",
    "receive_weights": "receive_weights",
    "broadcast_weights": "send_weights",
    "receive_broadcast": "receive_weights",
    "update_model": "update_model",
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


class RunRecords:
    """The records of one run, whatever it trains."""

    def __init__(
        self,
        run_dir: Path,
        config: AnyRunConfig,
        *,
        resume_step: int | None,
        step: int,
        total_steps: int,
        pools: Iterable[str],
        pool_of_role: Mapping[str, str],
        drain_call_records: Callable[[], list[CallRecord]],
        running_calls: Callable[[], dict[str, str]],
        more: Callable[[dict[str, str]], dict[str, object]] = lambda running: {},
    ) -> None:
        trainer = config.trainer
        run_dir.mkdir(parents=True, exist_ok=True)
        self._write_environment(run_dir / ENVIRONMENT_FILE, config)
        self.pools = list(pools)

        def running() -> dict[str, str]:
            calls = {pool_of_role.get(role, role): method for role, method in running_calls().items()}
            return dict.fromkeys(self.pools, IDLE) | calls

        deaths = deaths_before(run_dir, resumes=resume_step is not None)
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

            tracker = PrometheusTracker(trainer.prometheus_port, running, more, total_steps, step, deaths)
            self.tracking.add(tracker)
        self._spans: SpanExport | None = None
        if trainer.otlp_endpoint is not None:
            from paceline.report.spans import SpanExport

            self._spans = SpanExport.to(trainer.otlp_endpoint, f"{trainer.project_name}/{trainer.experiment_name}")
        self.timeline = TimelineWriter(run_dir / TIMELINE_FILE)
        self._drain_call_records = drain_call_records
        self._records: list[CallRecord] = []
        self._timer = Timer()
        self._last_line = time.time()
        self._last_collected = time.monotonic()
        self.at_phase = ""
        """What the driver itself is at."""
        self._status = StatusWriter(run_dir / STATUS_FILE, running, total_steps, step, more, deaths)
        self.begin_step(step)

    @staticmethod
    def _write_config(path: Path, text: str) -> None:
        """The configuration of this session; another one of an earlier session is kept."""
        content = text.encode()
        if path.exists() and path.read_bytes() != content:
            keep_old(path)
        path.write_bytes(content)

    @staticmethod
    def _write_environment(path: Path, config: AnyRunConfig) -> None:
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
        """Calls issued inside belong to this step, perhaps a later one; they sample with weights of this version, or
        make it."""
        token = call_tag.set({"step": step, "version": version})
        try:
            yield
        finally:
            call_tag.reset(token)

    @contextmanager
    def phase(self, name: str, **about: object) -> Iterator[None]:
        """Time what the driver does itself, for the next line and the timeline, where more may be said of it."""
        start = time.time()
        before, self.at_phase = self.at_phase, name
        try:
            with self._timer(name):
                yield
        finally:
            self.at_phase = before
        self.timeline.add_span("driver", name, start, time.time(), {"step": self.step, **about})

    def step_seconds(self, step: int) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds of each phase of a step whose line is written now, `step` for all of it, and how idle pools were.

        A step's time is that from line to line.
        """
        self._collect_records()
        start, self._last_line = self._last_line, time.time()
        end = self._last_line
        seconds = self._timer.seconds | phase_seconds(self._records, step) | {"step": end - start}
        idle = idle_metrics(self._records, self.pools, start, end)
        self._records = [record for record in self._records if record.end > end or _step_of(record) > step]
        if self._spans is not None:
            self._spans.end_step(step, end)
        return seconds, idle

    def write_line(self, step: int, metrics: Mapping[str, float]) -> None:
        """The line of a step; what is timed from here on is of the next."""
        self.tracking.log(dict(metrics), step=step)
        self._timer = Timer()

    @contextmanager
    def validating(self, num_rows: int) -> Iterator[None]:
        """Calls issued inside belong to validation, not to the step's own phases."""
        token = call_tag.set({"step": self.step, "validation": True})
        self._status.set_validation(0, num_rows)
        try:
            with self.phase("testing"):
                yield
        finally:
            self._status.set_validation(0, 0)
            call_tag.reset(token)

    def validated(self, num_rows: int) -> None:
        """So many rows of this validation are done."""
        self._status.set_validation(num_rows)

    def write_validation(self, metrics: dict[str, float]) -> None:
        """The line of a validation outside of any step."""
        self._collect_records()
        self.write_line(self.step, metrics)
        self._last_line = time.time()

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

    def follow(self) -> None:
        """Bring the timeline up to date in the middle of a step, now and then: a long one has very many calls."""
        if time.monotonic() - self._last_collected > COLLECT_SECONDS:
            self._collect_records()

    def _collect_records(self) -> None:
        self._last_collected = time.monotonic()
        records = self._drain_call_records()
        self._status.processes |= {
            f"{record.pool} {record.process_roles} rank {record.rank}": record.pid for record in records
        }
        self.timeline.add(records)
        self.timeline.flush()
        if self._spans is not None:
            self._spans.add(records)
        self._records += records
