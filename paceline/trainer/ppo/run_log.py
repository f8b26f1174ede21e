"""What a run tells: metrics, timeline and samples of every step, in the run's folder and on the console."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase

from paceline.config import PPOConfig
from paceline.config.load import to_dict
from paceline.protocol import DataProto
from paceline.report.metrics import data_metrics, throughput_metrics, timing_metrics
from paceline.report.timeline import TimelineWriter
from paceline.report.timing import Timer
from paceline.report.trackers import Tracking
from paceline.single_controller.base import CallRecord, call_tag

logger = logging.getLogger(__name__)

# How the remote methods are called in `timing_s/...`.
PHASE_NAMES = {
    "generate_sequences": "gen",
    "compute_log_prob": "old_log_prob",
    "compute_ref_log_prob": "ref",
    "compute_values": "values",
    "update_actor": "update_actor",
    "update_critic": "update_critic",
}


def phase_seconds(records: list[CallRecord]) -> dict[str, float]:
    """Seconds of each remote phase: from the first rank's start to the last rank's end, validation left out."""
    seconds = {}
    for method, phase in PHASE_NAMES.items():
        spans = [
            (record.start, record.end)
            for record in records
            if record.method == method and "validation" not in record.tag
        ]
        if spans:
            seconds[phase] = max(end for _, end in spans) - min(start for start, _ in spans)
    return seconds


class RunLog:
    """The records of one run. `metrics` collects those of the current step."""

    def __init__(
        self,
        run_dir: Path,
        config: PPOConfig,
        *,
        resume_step: int | None,
        step: int,
        total_steps: int,
        drain_call_records: Callable[[], list[CallRecord]],
    ) -> None:
        trainer = config.trainer
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(to_dict(config))))
        self.tracking = Tracking(
            run_dir,
            trainer.logger,
            trainer.project_name,
            trainer.experiment_name,
            resume_step=resume_step,
            total_steps=total_steps,
        )
        self.timeline = TimelineWriter(run_dir / "timeline.json")
        self._drain_call_records = drain_call_records
        self.num_samples = trainer.log_train_samples
        self._clear()
        self.begin_step(step)

    def begin_step(self, step: int) -> None:
        """Calls issued from now on carry this step in their records."""
        call_tag.set({"step": step})
        self.step = step
        self.started = time.time()

    def _clear(self) -> None:
        self.metrics: dict[str, float] = {}
        self.timer = Timer()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what the driver does itself, and show it in the timeline."""
        start = time.time()
        with self.timer(name):
            yield
        self.timeline.add_span("driver", name, start, time.time(), {"step": self.step})

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Calls issued inside belong to validation, not to the step's own phases."""
        token = call_tag.set({"step": self.step, "validation": True})
        try:
            with self.phase("testing"):
                yield
        finally:
            call_tag.reset(token)

    def write_validation(self) -> None:
        """The line of a validation outside of any step."""
        self._collect_records()
        self.tracking.log(self.metrics, step=self.step)
        self._clear()

    def write_step(
        self, batch: DataProto, *, tokenizer: PreTrainedTokenizerBase, use_critic: bool, devices: int
    ) -> None:
        """The line of a finished step. What is timed after it, such as saving, counts for the next."""
        seconds = self.timer.seconds | phase_seconds(self._collect_records()) | {"step": time.time() - self.started}
        self.metrics |= data_metrics(batch, use_critic=use_critic)
        self.metrics |= timing_metrics(batch, seconds)
        self.metrics |= throughput_metrics(batch, seconds["step"], devices)
        self._show_samples(batch, tokenizer)
        self.tracking.log(self.metrics, step=self.step)
        self._clear()

    def close(self) -> None:
        """Write what is left. Never raises: it runs also when a run fails, and must not hide why."""
        try:
            self._collect_records()
        except Exception:
            logger.warning("the last calls are missing in the timeline", exc_info=True)
        call_tag.set({})
        self.timeline.close()
        self.tracking.close()

    def _collect_records(self) -> list[CallRecord]:
        records = self._drain_call_records()
        self.timeline.add(records)
        self.timeline.flush()
        return records

    def _show_samples(self, batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> None:
        """Show what is rewarded: reward hacking must be visible."""
        scores = batch.batch["token_level_scores"].sum(dim=-1)
        lengths = batch.batch["response_mask"].sum(dim=-1)
        prompt_width = batch.batch["prompts"].shape[-1]
        for row in range(min(self.num_samples, len(batch))):
            valid = batch.batch["attention_mask"][row, :prompt_width].bool()
            logger.info(
                "step %d sample: prompt %r response %r score %.3f",
                self.step,
                tokenizer.decode(batch.batch["prompts"][row][valid]),
                tokenizer.decode(batch.batch["responses"][row][: int(lengths[row])]),
                scores[row].item(),
            )
