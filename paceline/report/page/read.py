"""What the page shows of one run, from its folder: plain data of bounded size, whatever state the files are in."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from paceline.config import AnyRunConfig
from paceline.config.derived import ROLLOUT_POOL
from paceline.config.keys import known_keys
from paceline.config.load import root_of, to_dict
from paceline.config.secrets import masked
from paceline.errors import DataError
from paceline.report.json_lines import Row, finite, is_number, read_line
from paceline.report.ledger import read_ledger
from paceline.report.live import duration
from paceline.report.page.gantt import read_gantt
from paceline.report.page.thin import spread, thinned
from paceline.report.samples import cut_text, read_samples, sample_files
from paceline.report.status import read_status
from paceline.report.trackers import read_metrics
from paceline.report.validation_metrics import HEADLINE
from paceline.run_folder import (
    ALARMS_FILE,
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    LEDGER_FILE,
    METRICS_FILE,
    SAMPLES_FOLDER,
    can_be_resumed,
    list_checkpoints,
)

LONGEST_CONFIG_VALUE = 500
SPEED = "perf/tokens_per_second"
MOST_NODES = 16
MOST_ALARMS = 100
SAMPLE_FIELDS = (
    "kind",
    "data_source",
    "prompt",
    "response",
    "turns",
    "ground_truth",
    "score",
    "acc",
    "pred",
    "extracted",
)


@dataclass(frozen=True)
class Limits:
    """What keeps a page small. About 3 MB of one run at most, seldom more than 0.5."""

    points: int = 500
    """Of a curve; of more, neighbours are averaged."""
    series: int = 400
    gantt_steps: int = 120
    sample_steps: int = 40
    samples_per_step: int = 12
    sample_characters: int = 1500
    sample_tokens: int = 150
    checkpoints: int = 200
    steps: frozenset[int] = frozenset()
    """Shown in any case, if the run has them."""

    @classmethod
    def shared_by(cls, runs: int, steps: Iterable[int] = ()) -> Limits:
        """Several runs share what one may have, down to a tenth; the `steps` are shown in any case."""
        share = max(1 / max(runs, 1), 0.1)
        full = cls()
        return cls(
            points=max(100, int(full.points * share)),
            gantt_steps=max(12, int(full.gantt_steps * share)),
            sample_steps=max(4, int(full.sample_steps * share)),
            steps=frozenset(steps),
        )


def read_run(folder: Path, name: str, limits: Limits) -> Row:
    """All that the page shows of a run."""
    if not (folder / METRICS_FILE).is_file() and not (folder / CONFIG_FILE).is_file():
        raise DataError(
            f"{folder} is not a folder of a run: {_instead(folder)}. "
            "Give the folder that trainer.default_local_dir named, such as runs/paceline/ppo."
        )
    lines, unreadable = _metrics(folder / METRICS_FILE)
    for line in lines:
        line |= _speed(line)
    steps = [line["step"] for line in lines]
    config = read_run_config(folder)
    status = read_status(folder)
    return {
        "name": name,
        "folder": str(folder.resolve()),
        "status": status,
        "summary": [*summarize(lines, config, status), *_prompts(folder / LEDGER_FILE), *unreadable],
        "curves": curves(lines, limits),
        "gantt": read_gantt(folder, steps, limits.gantt_steps, limits.steps),
        "samples": read_run_samples(folder, limits),
        "config": config_rows(config),
        "checkpoints": read_checkpoints(folder, limits),
        "alarms": read_alarms(folder),
        "environment": read_environment(folder),
    }


def _speed(line: Row) -> dict[str, float]:
    """Tokens per second of all devices together: shows whether a run with more of them is faster."""
    tokens, seconds = finite(line.get("perf/total_num_tokens")), finite(line.get("timing_s/step"))
    return {SPEED: tokens / seconds} if tokens is not None and seconds else {}


def _metrics(path: Path) -> tuple[list[Row], list[tuple[str, str]]]:
    """The lines of the metrics, and a row of the summary if whole lines of them can't be read."""
    if not path.is_file():
        return [], []
    lines = read_metrics(path)
    with path.open("rb") as file:
        unreadable = sum(line.endswith(b"\n") for line in file) - len(lines)
    return lines, [("unreadable", f"{unreadable} lines of {METRICS_FILE}")] if unreadable > 0 else []


def _prompts(path: Path) -> list[tuple[str, str]]:
    """A row of the summary: what became of the prompts, by the ledger."""
    if not path.is_file():
        return []
    try:
        account = read_ledger(path)
    except (AttributeError, KeyError, TypeError, ValueError):
        return [("prompts", f"{LEDGER_FILE} can't be read")]
    dropped = [f"{count:,} dropped ({reason})" for reason, count in sorted(account.dropped.items()) if count]
    return [("prompts", ", ".join([f"{account.trained:,} trained", *dropped]))]


def _instead(folder: Path) -> str:
    """What is found where the folder of a run should be."""
    if not folder.is_dir():
        return "it is a file" if folder.exists() else "it does not exist"
    found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8])
    return f"it has neither {METRICS_FILE} nor {CONFIG_FILE}, but {found}" if found else "it is empty"


def summarize(lines: Sequence[Row], config: Row, status: Row | None) -> list[tuple[str, str]]:
    """The numbers that one asks for first, as pairs of name and text."""

    def at(key: str) -> object:
        value: object = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def values(name: str) -> list[float]:
        return [number for line in lines if (number := finite(line.get(name))) is not None]

    total = (status or {}).get("total_steps") or at("trainer.total_training_steps")
    placement = at("trainer.placement.name") or "one pool"
    rows = [
        ("state", _state(status)),
        ("steps", f"{lines[-1]['step'] if lines else 0}" + (f" of {total}" if total else "")),
        ("time in steps", duration(sum(values("timing_s/step")))),
        ("placement", f"{placement}, {at('trainer.nnodes')} x {at('trainer.n_gpus_per_node')} devices"),
        ("model", str(at("actor_rollout_ref.model.path") or at("model.path"))),
        ("algorithm", f"{at('algorithm.adv_estimator') or at('trainer.experiment_name')}, seed {at('trainer.seed')}"),
    ]
    if score := values("critic/score/mean"):
        few = max(1, min(10, len(score) // 4))
        first, last = (statistics.mean(part) for part in (score[:few], score[-few:]))
        rows.append(("training score", f"{first:.3f} → {last:.3f} (mean of {few} steps)"))
    for name in ("train/loss", "val/loss", "val/accuracy"):
        if measured := values(name):
            rows.append((name, f"{measured[0]:.4f} → {measured[-1]:.4f}"))
    for name in sorted({name for line in lines for name in line if name.startswith(HEADLINE)}):
        measured = values(name)
        if measured:
            text = f"{measured[0]:.3f} → {measured[-1]:.3f}, best {max(measured):.3f}"
            rows.append((f"validation {name.removeprefix(HEADLINE)}", text))
    if speed := values(SPEED):
        step = statistics.median(values("timing_s/step"))
        rows.append(("speed", f"{statistics.median(speed):,.0f} tokens/s, {step:.2f} s a step (median)"))
    if throughput := values("perf/throughput"):
        rows.append(("throughput", f"{statistics.median(throughput):,.0f} tokens/s per device (median)"))
    if ages := values("training/staleness/max"):
        mean = statistics.mean(values("training/staleness/mean"))
        rows.append(("staleness", f"{mean:.2f} updates (mean), {max(ages):.0f} at most"))
    in_steps = sum(values("timing_s/step"))
    if ages and in_steps:
        sides = {"training": "timing_s/wait_for_responses", "rollout": f"timing_s/idle/{ROLLOUT_POOL}"}
        shares = [f"{side} {sum(found) / in_steps:.0%}" for side, name in sides.items() if (found := values(name))]
        rows.append(("waited for the other", f"{', '.join(shares) or 'neither'} of the time"))
    if anew := sum(values("training/too_old_groups")):
        rows.append(("sampled anew", f"{anew:.0f} groups that were too old"))
    if overlap := values("perf/overlap"):
        rows.append(("busy pools", f"{statistics.mean(overlap):.0%} of the time (mean)"))
    return [(name, cut_text(text, 300)) for name, text in rows]


def _state(status: Row | None) -> str:
    if status is None:
        return "unknown"
    if status["state"] == "silent":
        return "no sign of life: killed, or its machine is gone"
    return status["state"] + (f": {status['error']}" if status.get("error") else "")


def curves(lines: Sequence[Row], limits: Limits) -> Row:
    """`series`: metric to (which list of `steps`, its values); a value that is not finite is None."""
    points: dict[str, tuple[list[int], list[float | None]]] = {}
    for line in lines:
        for name, value in line.items():
            if name == "step" or isinstance(value, bool) or not is_number(value):
                continue
            if name not in points and len(points) >= limits.series:
                continue
            steps, values = points.setdefault(name, ([], []))
            steps.append(line["step"])
            values.append(finite(value))
    all_steps: list[list[int]] = []
    series: dict[str, tuple[int, list[float | None]]] = {}
    for name, (steps, values) in points.items():
        steps, values = thinned(steps, values, limits.points)
        if steps not in all_steps:
            all_steps.append(steps)
        series[name] = (all_steps.index(steps), values)
    return {"steps": all_steps, "series": series}


def read_run_samples(folder: Path, limits: Limits) -> list[Row]:
    """Steps with their samples, evenly spread over the run, the last one included."""
    files = list(sample_files(folder / SAMPLES_FOLDER).items())
    return [
        {
            "step": step,
            "rows": sample_rows(path, limits),
        }
        for step, path in sorted({*spread(files, limits.sample_steps), *(f for f in files if f[0] in limits.steps)})
    ]


def sample_rows(path: Path, limits: Limits) -> list[Row]:
    """The rows of a step's samples, cut to what a page takes."""
    return [
        {field: _shown(field, row[field], limits.sample_characters) for field in SAMPLE_FIELDS if field in row}
        | ({"tokens": row["tokens"][: limits.sample_tokens]} if isinstance(row.get("tokens"), list) else {})
        for row in list(read_samples(path))[: limits.samples_per_step]
    ]


def _shown(field: str, value: object, longest: int) -> object:
    if field == "turns" and isinstance(value, list):
        return [{name: _shown(name, part, longest) for name, part in turn.items()} for turn in value]
    return value if value is None or isinstance(value, bool | int | float) else cut_text(str(value), longest)


def read_run_config(folder: Path) -> Row:
    """config.yaml; empty if it can't be read."""
    try:
        config = yaml.safe_load((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def config_rows(config: Row) -> list[tuple[str, str, str, bool]]:
    """(key, value, default, whether they differ) of every key; secrets are masked."""
    root = root_of(config)
    defaults = dict(_flat(to_dict(root()), root))
    return [
        (key, _yaml_text(masked(key, value)), _yaml_text(defaults.get(key)), value != defaults.get(key))
        for key, value in _flat(config, root)
    ]


def _flat(tree: Mapping[str, object], root: type[AnyRunConfig], prefix: str = "") -> list[tuple[str, object]]:
    """Leaves by full name; a key that holds a dict of the user's own is one."""
    rows: list[tuple[str, object]] = []
    for name, value in tree.items():
        key = f"{prefix}{name}"
        is_leaf = key in known_keys(root) and not known_keys(root)[key].is_section
        rows += [(key, value)] if is_leaf or not isinstance(value, Mapping) else _flat(value, root, f"{key}.")
    return rows


def _yaml_text(value: object) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
    return cut_text(text, LONGEST_CONFIG_VALUE)


def read_checkpoints(folder: Path, limits: Limits) -> list[Row]:
    """The newest checkpoints, oldest first: what they hold, their size, and whether a run can go on from them."""
    found = []
    for step, path in list_checkpoints(folder / CHECKPOINTS_FOLDER).items():
        try:
            parts = sorted(part.name for part in path.iterdir() if part.is_dir() and part.name[0] != ".")
        except (FileNotFoundError, NotADirectoryError):  # a live run has just removed it, or it is none
            continue
        found.append(
            {
                "step": step,
                "parts": parts,
                "bytes": _bytes_below(path),
                "complete": can_be_resumed(path),
                "path": str(path.resolve()),
            }
        )
    return found[-limits.checkpoints :]


def _bytes_below(folder: Path) -> int:
    """Of all files in it, without those that a live run removes meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):  # unlike rglob, it passes over a folder that vanishes
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def read_alarms(folder: Path) -> list[Row]:
    """The newest steps that were far from the run, oldest first."""
    try:
        lines = (folder / ALARMS_FILE).read_bytes().splitlines()
    except OSError:
        return []
    return [row for line in lines[-MOST_ALARMS:] if (row := read_line(line)) is not None]


def read_environment(folder: Path) -> object:
    """environment.json, with the first nodes of a large cluster; None if it can't be read."""
    try:
        environment = json.loads((folder / ENVIRONMENT_FILE).read_text())
        environment["ray_nodes"] = environment["ray_nodes"][:MOST_NODES]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return masked("environment", environment)
