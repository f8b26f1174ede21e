"""Grade a saved policy on prepared data, part by part: what was answered is kept, and the same call goes on after it.

<folder>/
  eval.json          what was asked; another question needs another folder
  responses.jsonl    every response with its score, in the order of the data
  metrics.jsonl      one line, when all is answered; with config.yaml and samples/ what `paceline report` reads
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from paceline.errors import ConfigError, DataError
from paceline.files import append_whole, readable_storage_errors, sync, write_atomically
from paceline.report.json_lines import Row, json_line, read_line
from paceline.report.samples import SampleFiles
from paceline.report.validation_metrics import CORE, pass_at, validation_metrics
from paceline.run_folder import CONFIG_FILE, METRICS_FILE, SAMPLES_FOLDER
from paceline.trainer.ppo.run_lock import run_lock
from paceline.trainer.saved_policy import Columns, SavedPolicy

logger = logging.getLogger(__name__)

ASKED_FILE = "eval.json"
RESPONSES_FILE = "responses.jsonl"
RESPONSES_PER_PART = 128
"""Sampled together and written together: a fixed number, since what is decoded together decides the last bits."""
SHOWN_RESPONSES = 12


def evaluate(
    policy: SavedPolicy, prompts: Sequence[Columns], folder: Path, asked: Mapping[str, object], *, n: int, seed: int
) -> list[Row]:
    """All graded responses, n to each prompt. Parts that are in the folder already are not sampled again."""
    if not prompts:
        raise DataError("the data have no prompt that the model could answer.")
    with readable_storage_errors(folder), run_lock(folder):
        _same_question(folder, asked)
        path = folder / RESPONSES_FILE
        size = max(1, RESPONSES_PER_PART // n)
        rows = _whole_parts(path, size * n, total=len(prompts) * n)
        if rows:
            logger.info("%d of %d prompts were answered before", len(rows) // n, len(prompts))
        with path.open("ab", buffering=0) as file:
            for start in range(len(rows) // n, len(prompts), size):
                part = policy.answer(prompts[start : start + size], n=n, seed=seed, first_row=start)
                graded = policy.grade(part)
                append_whole(file, b"".join(map(json_line, graded)))
                sync(path)
                rows += graded
                logger.info("%d of %d prompts answered%s", len(rows) // n, len(prompts), _so_far(rows))
    return rows


def write_records(folder: Path, rows: Sequence[Row], metrics: Mapping[str, float], asked: Row, step: int) -> None:
    """What `paceline report` makes a page of."""
    with readable_storage_errors(folder):
        write_atomically(folder / CONFIG_FILE, OmegaConf.to_yaml(OmegaConf.create({"eval": asked})).encode())
        samples = SampleFiles(folder / SAMPLES_FOLDER, SHOWN_RESPONSES, resume_step=step)
        samples.add_validation(rows)
        samples.write(step)
        write_atomically(folder / METRICS_FILE, json_line({"step": step, **metrics}))


def summarize(rows: Sequence[Row], *, n: int, ks: Sequence[int]) -> dict[str, float]:
    """The metrics of a validation, `val-aux/<source>/acc/pass@k` where answers are right or wrong, and the standard
    error of each mean over the prompts."""
    graded = [row for row in rows if row["score"] is not None]
    sources = [str(row["data_source"]) for row in graded]
    uids = [row["uid"] for row in graded]
    scores = {
        name: np.array([_number(row.get(key)) for row in graded])
        for name, key in zip(CORE, ("score", "acc"), strict=True)
    }
    metrics = validation_metrics(sources, uids, scores, n=n, answers=[row.get("pred") for row in graded])
    for source in dict.fromkeys(sources):
        for name, values in scores.items():
            groups = _by_prompt(values, sources, uids, source)
            if not groups:
                continue
            if len(groups) > 1:
                means = np.array([group.mean() for group in groups])
                error = means.std(ddof=1) / math.sqrt(len(means))
                metrics[f"val-aux/{source}/{name}/mean@{n}/standard_error"] = float(error)
            if all(np.isin(group, (0.0, 1.0)).all() for group in groups) and name == "acc":
                for k in ks:
                    metrics[f"val-aux/{source}/{name}/pass@{k}"] = pass_at(k, groups)
    return metrics


def _by_prompt(values: np.ndarray, sources: Sequence[str], uids: Sequence[object], source: str) -> list[np.ndarray]:
    groups: dict[object, list[float]] = {}
    for value, other, uid in zip(values, sources, uids, strict=True):
        if other == source and not np.isnan(value):
            groups.setdefault(uid, []).append(float(value))
    return [np.array(group) for group in groups.values()]


def fingerprint(path: str) -> list[list[object]] | str:
    """What shows that a file, or the files of a model's folder, are still the same: name, size and time of each."""
    place = Path(path).expanduser()
    if not place.exists():
        return path  # a hub id
    files = sorted(item for item in place.iterdir() if item.is_file()) if place.is_dir() else [place]
    return [[item.name, item.stat().st_size, item.stat().st_mtime_ns] for item in files]


def _same_question(folder: Path, asked: Mapping[str, object]) -> None:
    """Raise if the folder holds answers to another question; note the question in a new one."""
    path = folder / ASKED_FILE
    now = json.loads(json.dumps(dict(asked)))
    if not path.exists():
        if (folder / RESPONSES_FILE).exists() or (folder / METRICS_FILE).exists():
            raise ConfigError(f"--output {folder} holds something else: it has no {ASKED_FILE}. Give another folder.")
        write_atomically(path, json.dumps(now, indent=2).encode())
        return
    before = read_line(path.read_bytes())
    if before is None:
        raise ConfigError(f"{path} can't be read. Remove the folder, or give another --output.")
    names = [name for name in now | before if now.get(name) != before.get(name)]
    if names:
        changes = "; ".join(f"{name} was {_short(before.get(name))}, is {_short(now.get(name))}" for name in names)
        raise ConfigError(
            f"--output {folder} has answers to another question: {changes}. Give another --output, or remove it."
        )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 80 else "another state of its files" if isinstance(value, list) else f"{text[:77]}..."


def _whole_parts(path: Path, part: int, total: int) -> list[Row]:
    """The rows of the parts that were written to their end; what is behind them is cut off."""
    if not path.exists():
        return []
    rows: list[Row] = []
    end = kept = 0
    with path.open("rb") as file:
        for line in file:
            row = read_line(line) if line.endswith(b"\n") else None
            if row is None:
                break
            rows.append(row)
            end += len(line)
            if len(rows) % part == 0 or len(rows) == total:
                kept = end
    del rows[len(rows) if len(rows) == total else len(rows) - len(rows) % part :]
    os.truncate(path, kept)
    return rows


def _so_far(rows: Sequence[Row]) -> str:
    scores = [row["score"] for row in rows if row["score"] is not None]
    return f", mean score {sum(scores) / len(scores):.3f}" if scores else ""


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
