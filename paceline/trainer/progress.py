"""How far a run is on its way to the last step, and what files in its folder ask of it meanwhile."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from paceline.run_folder import CHECKPOINT_FILE, STOP_FILE

logger = logging.getLogger(__name__)


class RunProgress:
    """The steps of one run."""

    def __init__(self, run_dir: Path, last_step: int) -> None:
        self.last_step = last_step
        self.step = 0
        """The one that runs, or ran last."""
        self.is_stopping = False
        """Whether the run was asked to end after this step."""
        self._stop_file = run_dir / STOP_FILE
        self._checkpoint_file = run_dir / CHECKPOINT_FILE

    @property
    def is_last(self) -> bool:
        """Whether no step follows: the run is complete, or was asked to end here."""
        return self.is_stopping or self.step >= self.last_step

    @property
    def end(self) -> Literal["stopped", "finished"]:
        """How a run that ends here has ended."""
        return "stopped" if self.is_stopping else "finished"

    def is_due(self, every: int | None) -> bool:
        """Every so many steps, and at the end; None is only at the end, -1 never.

        >>> progress = RunProgress(Path("run"), last_step=5)
        >>> progress.step = 4
        >>> progress.is_due(2), progress.is_due(None), progress.is_due(-1)
        (True, False, False)
        """
        if every == -1:
            return False
        return self.step >= self.last_step or (every is not None and self.step % every == 0)

    def go_on_from(self, checkpoint: Path, step: int) -> None:
        """After a resume."""
        self.step = step
        logger.info("resumed from %s at step %d of %d", checkpoint, step, self.last_step)
        if step >= self.last_step:
            logger.warning(
                "this run is complete; set trainer.total_training_steps higher, or trainer.resume_mode=disable."
            )

    def look_for_stop(self) -> bool:
        """Whether the file is there that asks the run to end: then this step is the last. It is removed."""
        self.is_stopping = self._stop_file.exists()
        if self.is_stopping:
            logger.warning("ending after step %d, as the file %s asks", self.step, self._stop_file)
            self._stop_file.unlink()
        return self.is_stopping

    def is_asked_to_save(self) -> bool:
        """Whether the file is there that asks for a checkpoint. It is removed."""
        asked = self._checkpoint_file.exists()
        if asked:
            logger.info("saving a checkpoint after step %d, as the file %s asks", self.step, self._checkpoint_file)
            self._checkpoint_file.unlink()
        return asked
