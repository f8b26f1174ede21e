"""Trackers that are other people's packages: Weights & Biases, MLflow, SwanLab and Trackio.

Where each keeps or sends what it is given is set by its own variables. A resumed run goes on as the same one: its id
is in the run's folder. It repeats the steps after its checkpoint, with the same values.
"""

from __future__ import annotations

import io
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from contextvars import copy_context
from pathlib import Path

from paceline.files import keep_old, write_atomically
from paceline.report.json_lines import Row, json_line
from paceline.report.samples import SHOWN_TEXTS, as_text, shown_texts
from paceline.run_folder import MLFLOW_FOLDER, SWANLAB_FOLDER, run_id_file

logger = logging.getLogger(__name__)

_LONGEST_PARAMETER = 6000
_PARAMETERS_AT_ONCE = 100
_METRICS_AT_ONCE = 1000


class WandbTracker:
    """Scalars and tables for Weights & Biases.

    wandb takes no step twice, and a resumed run repeats some: so the step is a metric of its own, `global_step`, by
    which the others are drawn.
    """

    def __init__(self, folder: Path, project: str, name: str, config: Mapping[str, object], resumed: bool) -> None:
        import wandb  # an extra

        run_id, resumed = _run_id(folder, "wandb", resumed)
        self._table, self._teardown = wandb.Table, wandb.teardown
        self._run = wandb.init(
            project=project,
            name=name,
            dir=folder,
            config=dict(config),
            id=run_id,
            resume="allow" if resumed else None,
            settings=wandb.Settings(silent=True),  # its banner and its summary; where the run is, is said here
        )
        logger.info(
            "wandb: %s", f"offline; wandb sync {Path(self._run.dir).parent}" if self._run.offline else self._run.url
        )
        self._run.define_metric("global_step", hidden=True)
        self._run.define_metric("*", step_metric="global_step")

    def log(self, metrics: Row, step: int) -> None:
        self._run.log({**_numbers(metrics), "global_step": step})

    def show(self, rows: Sequence[Row], step: int) -> None:
        data = [[step, *shown_texts(row).values(), row["score"]] for row in rows]
        table = self._table(columns=["step", *SHOWN_TEXTS, "score"], data=data)
        self._run.log({"val/generations": table, "global_step": step})

    def close(self) -> None:
        self._run.finish()
        # Ray ends wandb's own process with this one; at exit wandb would complain that it can't reach it.
        self._teardown()


class MlflowTracker:
    """Scalars, the configuration as parameters, and responses as files, for MLflow.

    MLFLOW_TRACKING_URI names the store; without it, it is a database in the run's folder.
    """

    def __init__(self, folder: Path, project: str, name: str, config: Mapping[str, object], resumed: bool) -> None:
        from mlflow import MlflowClient, entities  # an extra

        own = (folder / MLFLOW_FOLDER).absolute()
        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{own / 'mlflow.db'}"
        is_own = "MLFLOW_TRACKING_URI" not in os.environ
        if is_own:
            own.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(tracking_uri=address)
        self._metric = entities.Metric
        id_file = folder / run_id_file("mlflow")
        if not resumed:
            keep_old(id_file)
        if id_file.exists():
            self._id = id_file.read_text().strip()
            self._client.update_run(self._id, status="RUNNING")
        else:
            experiment = self._client.get_experiment_by_name(project)
            files = (own / "artifacts").as_uri() if is_own else None
            experiment_id = (
                self._client.create_experiment(project, artifact_location=files)
                if experiment is None
                else experiment.experiment_id
            )
            self._id = self._client.create_run(experiment_id, run_name=name).info.run_id
            write_atomically(id_file, self._id.encode())
            # A parameter can't be given another value later, as a resumed run may have.
            parameters = [entities.Param(_key(key), value) for key, value in _flat(config)]
            for part in _parts(parameters, _PARAMETERS_AT_ONCE):
                self._client.log_batch(self._id, params=part)
        logger.info("mlflow: run %s in %s", self._id, address if is_own else "MLFLOW_TRACKING_URI")

    def log(self, metrics: Row, step: int) -> None:
        now = int(time.time() * 1000)
        values = [self._metric(_key(name), value, now, step) for name, value in _numbers(metrics).items()]
        for part in _parts(values, _METRICS_AT_ONCE):
            self._client.log_batch(self._id, metrics=part)

    def show(self, rows: Sequence[Row], step: int) -> None:
        lines = b"".join(json_line({"step": step, **shown_texts(row), "score": row["score"]}) for row in rows)
        self._client.log_text(self._id, lines.decode(), f"val_generations/{step}.jsonl")

    def close(self) -> None:
        self._client.set_terminated(self._id)


class SwanlabTracker:
    """Scalars and texts for SwanLab; SWANLAB_MODE=offline keeps them in the run's folder, for `swanlab sync`."""

    def __init__(self, folder: Path, project: str, name: str, config: Mapping[str, object], resumed: bool) -> None:
        import swanlab  # an extra

        logs = folder / SWANLAB_FOLDER
        logs.mkdir(parents=True, exist_ok=True)
        run_id, _ = _run_id(folder, "swanlab", resumed)
        self._text = swanlab.Text
        with _printed_to_log("swanlab"):
            self._run = swanlab.init(
                project=project,
                name=name,
                config=dict(config),
                log_dir=str(logs),
                id=run_id,
                resume="allow",  # also of a new run, which otherwise could have no id of its own
                # A run has log files, and its output may hold what nobody else is to see.
                settings=swanlab.Settings(terminal={"proxy_type": "none"}),
            )

    def log(self, metrics: Row, step: int) -> None:
        self._run.log(_numbers(metrics), step=step)

    def show(self, rows: Sequence[Row], step: int) -> None:
        self._run.log({"val/generations": [self._text(as_text(row)) for row in rows]}, step=step)

    def close(self) -> None:
        with _printed_to_log("swanlab"):
            self._run.finish()


class TrackioTracker:
    """Scalars and tables for Trackio, which keeps them in TRACKIO_DIR unless a Space or a server is named.

    A run is found again by its name, so the id is a part of that.
    """

    def __init__(self, folder: Path, project: str, name: str, config: Mapping[str, object], resumed: bool) -> None:
        import trackio  # an extra

        run_id, resumed = _run_id(folder, "trackio", resumed)
        self._table, self._finish = trackio.Table, trackio.finish
        # Its run is that of a context: one of our own, so that any thread can end it, and nothing ends it twice.
        self._context = copy_context()
        with _printed_to_log("trackio"):
            self._run = self._context.run(
                trackio.init,
                project=project,
                name=f"{name}-{run_id}",
                config=dict(config),
                resume="allow" if resumed else "never",
                embed=False,
            )

    def log(self, metrics: Row, step: int) -> None:
        self._run.log(_numbers(metrics), step=step)

    def show(self, rows: Sequence[Row], step: int) -> None:
        data = [{**shown_texts(row), "score": row["score"]} for row in rows]
        self._run.log({"val/generations": self._table(data=data)}, step=step)

    def close(self) -> None:
        with _printed_to_log("trackio"):
            self._context.run(self._finish)


PACKAGE_TRACKERS: dict[str, type[WandbTracker | MlflowTracker | SwanlabTracker | TrackioTracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "swanlab": SwanlabTracker,
    "trackio": TrackioTracker,
}


def _run_id(folder: Path, tracker: str, resumed: bool) -> tuple[str, bool]:
    """The id of a run, and whether it is that of an earlier session: a new one where the folder has none."""
    file = folder / run_id_file(tracker)
    if not resumed:
        keep_old(file)
    known = file.exists()
    if not known:
        write_atomically(file, secrets.token_hex(4).encode())
    return file.read_text().strip(), known


def _numbers(metrics: Row) -> dict[str, int | float]:
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}


def _flat(config: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Keys with their sections, and values as text."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)[:_LONGEST_PARAMETER]


def _key(name: str) -> str:
    """A name as MLflow takes it, which has no @.

    >>> _key("val-core/openai/gsm8k/acc/mean@4")
    'val-core/openai/gsm8k/acc/mean_at_4'
    """
    kept = re.sub(r"[^\w.\-/ :]", "_", name.replace("@", "_at_"), flags=re.ASCII)
    return re.sub(r"/{2,}", "/", kept).strip("/")[:250]


def _parts(items: Sequence[object], size: int) -> Iterator[Sequence[object]]:
    return (items[start : start + size] for start in range(0, len(items), size))


@contextmanager
def _printed_to_log(tracker: str) -> Iterator[None]:
    """What the tracker prints goes to the log, a line each."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        for line in filter(None, map(str.strip, printed.getvalue().splitlines())):
            logger.info("%s: %s", tracker, line)
