"""The records of a PPO run: beside those of every run, its samples and what is measured of its batches."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from paceline.config import PPOConfig
from paceline.config.derived import ROLLOUT_POOL
from paceline.log_file import SAMPLES_LOGGER
from paceline.protocol import DataProto
from paceline.report.dumps import dump_generations, generation_rows, token_rows
from paceline.report.metrics import data_metrics, throughput_metrics, timing_metrics
from paceline.report.samples import SampleFiles
from paceline.run_folder import SAMPLES_FOLDER
from paceline.single_controller.base import CallRecord
from paceline.trainer.ppo.sampling_records import METHOD, with_sampling
from paceline.trainer.ppo.scoring import grader_fields
from paceline.trainer.ppo.step import Step
from paceline.trainer.run_records import IDLE, RunRecords

logger = logging.getLogger(__name__)

NOTICE_SECONDS = 10.0
"""A validation that takes longer says so in the log, and how far it is."""
WAITING = "wait_for_responses"
"""The phase in which training waits for the rollout."""


class RunLog(RunRecords):
    """The records of one run; `queue` is what is sampled ahead, `records` are the further arguments of RunRecords."""

    def __init__(
        self,
        run_dir: Path,
        config: PPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        resume_step: int | None,
        drain_call_records: Callable[[], list[CallRecord]],
        running_calls: Callable[[], dict[str, str]],
        queue: Callable[[], dict[str, int] | None] = lambda: None,
        **records: Any,
    ) -> None:
        self._samples = SampleFiles(run_dir / SAMPLES_FOLDER, config.trainer.keep_samples, resume_step)
        self._config = config
        self._tokenizer = tokenizer
        self._queue = queue
        self._running_calls = running_calls
        super().__init__(
            run_dir,
            config,
            resume_step=resume_step,
            drain_call_records=lambda: with_sampling(drain_call_records()),
            running_calls=self._running,
            more=self._sides,
            **records,
        )

    def _running(self) -> dict[str, str]:
        """What each role is at; a rollout that decodes beside its calls is at work while prompts are being sampled."""
        samples = (self._queue() or {}).get("sampling") and ROLLOUT_POOL in self.pools
        return self._running_calls() | ({ROLLOUT_POOL: METHOD} if samples else {})

    def _sides(self, running: dict[str, str]) -> dict[str, object]:
        """For the status: what is sampled ahead, and which side waits for the other. A thread asks."""
        queue = self._queue()
        if queue is None:
            return {}
        others_work = any(method != IDLE for pool, method in running.items() if pool != ROLLOUT_POOL)
        waits = "training" if self.at_phase == WAITING else ""
        if running.get(ROLLOUT_POOL) == IDLE and others_work:
            waits = "rollout"
        return {"queue": queue} | ({"waits": waits} if waits else {})

    @contextmanager
    def validating(self, num_prompts: int) -> Iterator[None]:
        """Calls issued inside belong to validation, not to the step's own phases."""
        trainer = self._config.trainer
        self._validated: list[dict[str, object]] = []
        self._next_notice = time.monotonic() + NOTICE_SECONDS
        notice = threading.Timer(NOTICE_SECONDS, self._say_validation)
        notice.daemon = True
        notice.start()
        try:
            with super().validating(num_prompts):
                yield
        finally:
            notice.cancel()
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
        super().validated(num_prompts)
        if time.monotonic() > self._next_notice:
            self._say_validation()

    def _say_validation(self) -> None:
        self._next_notice = time.monotonic() + NOTICE_SECONDS
        done, total = self._status.validation
        logger.info("step %d, validation: %d of %d prompts answered", self.step, done, total)

    def _chosen(self, batch: DataProto, info: dict[str, np.ndarray]) -> tuple[DataProto, dict[str, np.ndarray]]:
        rows = self._samples.choose(len(batch))
        return batch[rows], {name: column[rows] for name, column in info.items()}

    def _rows(self, step: int, batch: DataProto, info: dict[str, np.ndarray]) -> list[dict[str, object]]:
        source_key = self._config.data.reward_fn_key
        return generation_rows(batch, self._tokenizer, step=step, info=info, reward_fn_key=source_key)

    def write_validation(self, metrics: dict[str, float]) -> None:
        """The line of a validation outside of any step."""
        self._samples.write(self.step)
        super().write_validation(metrics)

    def write_step(self, step: Step, *, use_critic: bool, devices: int) -> dict[str, float]:
        """The line of a step whose updates have ended; the next one may have begun. Gives what is in it.

        Its time is that from line to line: the rollout of the next step that went on beside the last update is in it,
        as that of this step was in the line before. A checkpoint behind the next rollout counts for the next.
        """
        batch = step.batch
        seconds, idle = self.step_seconds(step.number)
        metrics = {
            **step.metrics,
            **data_metrics(batch, use_critic=use_critic),
            **timing_metrics(batch, seconds),
            **throughput_metrics(batch, seconds["step"], devices),
            **idle,
        }
        self._show_samples(step.number, batch)
        info = grader_fields(batch)
        if self._config.trainer.rollout_data_dir:
            dump_generations(self._config.trainer.rollout_data_dir, step.number, self._rows(step.number, batch, info))
        kept, of_kept = self._chosen(batch, info)
        tokens = token_rows(kept, self._tokenizer)
        rows = self._rows(step.number, kept, of_kept)
        self._samples.write(step.number, [{**row, "tokens": own} for row, own in zip(rows, tokens, strict=True)])
        self.write_line(step.number, metrics)
        return metrics

    def _show_samples(self, step: int, batch: DataProto) -> None:
        """Put into the log what is rewarded: reward hacking must be visible."""
        batch = batch[: self._config.trainer.log_train_samples]  # the texts of others need not come here
        scores = batch.batch["token_level_scores"].sum(dim=-1)
        prompt_width = batch.batch["prompts"].shape[-1]
        lengths = batch.batch["attention_mask"][:, prompt_width:].sum(dim=-1)
        for row in range(len(batch)):
            valid = batch.batch["attention_mask"][row, :prompt_width].bool()
            logging.getLogger(SAMPLES_LOGGER).info(
                "step %d sample: prompt %r response %r score %.3f",
                step,
                self._tokenizer.decode(batch.batch["prompts"][row][valid]),
                self._tokenizer.decode(batch.batch["responses"][row][: int(lengths[row])]),
                scores[row].item(),
            )
