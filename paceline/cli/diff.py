"""`paceline diff RUN RUN`: the first step, and the first value, in which two runs part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.cli import make_parser
from paceline.command_line import errors_as_exit_codes
from paceline.errors import DataError
from paceline.report.json_lines import Row

EXAMPLES = ("runs/paceline/ppo runs/paceline/ppo_again",)
OF_THE_CLOCK = ("timing_s/", "timing_per_token_ms/", "perf/")
"""Metrics that begin so depend on the machine."""
WORDS = ("first run", "second run")


def main(argv: Sequence[str]) -> int:
    """Say where they part; 0 if nowhere."""
    parser = make_parser(
        "diff",
        "Find the first step, and the first value, in which two runs part: by their metrics and, where both were "
        "recorded (trainer.record), by the columns and optimizer steps of each step.",
        EXAMPLES,
    )
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="a run's folder")
    arguments = parser.parse_args(argv)
    with errors_as_exit_codes():
        first, second = (metrics_of(run.expanduser()) for run in arguments.runs)
        steps = sorted(first.keys() & second.keys())
        if not steps:
            raise DataError("the runs have no step in common.")
        in_metrics = next(
            ((step, text) for step in steps for text in line_differences(first[step], second[step])), None
        )
        found = first_in_bundles(arguments.runs, steps[-1] if in_metrics is None else in_metrics[0]) or in_metrics
        if found is None:
            print(f"diff: equal in the steps {steps[0]} to {steps[-1]}, but for what depends on the clock")
            return 0
        if in_metrics is not None and found != in_metrics:
            print(f"the metrics part in step {in_metrics[0]}: {in_metrics[1]}")
        print(f"diff: step {found[0]}, {found[1]}")
        return 1


def metrics_of(run: Path) -> dict[int, Row]:
    """Step to line."""
    from paceline.report.trackers import read_metrics
    from paceline.run_folder import METRICS_FILE

    path = run / METRICS_FILE
    if not path.is_file():
        raise DataError(f"{run} is no folder of a run: it has no {METRICS_FILE}.")
    return {line["step"]: line for line in read_metrics(path)}


def line_differences(first: Row, second: Row) -> Iterator[str]:
    """Metrics that differ, in words."""
    for name in sorted(first.keys() | second.keys()):
        one, other = first.get(name), second.get(name)
        if one != other and not name.startswith(OF_THE_CLOCK):
            yield f"{name}: {WORDS[0]} {one!r}, {WORDS[1]} {other!r}"


def first_in_bundles(runs: Sequence[Path], last_step: int) -> tuple[int, str] | None:
    """The first difference in steps that both runs recorded, up to this one."""
    from paceline.report.bundles import list_bundles
    from paceline.run_folder import RECORDS_FOLDER

    folders = [list_bundles(run.expanduser() / RECORDS_FOLDER) for run in runs]
    for step in sorted(folders[0].keys() & folders[1].keys()):
        if step <= last_step:
            for text in bundle_differences(*(of_run[step] for of_run in folders)):
                return step, text
    return None


def bundle_differences(*folders: Path) -> Iterator[str]:
    """How two records of a step differ, in the order in which a step is made."""
    from paceline.report.bundles import read_bundle
    from paceline.report.differing import same_value, tensor_difference, update_differences

    one, other = (read_bundle(folder) for folder in folders)
    for name, column in one.columns.batch.items():
        if text := tensor_difference(name, other.columns.batch.get(name, None), column, words=WORDS):
            yield text
    updates, others = one.manifest["updates"], other.manifest["updates"]
    for role in sorted(updates.keys() & others.keys(), key=["critic", "actor"].index):
        yield from update_differences(role, others[role], updates[role], same_value, words=WORDS)
    for role in sorted(updates.keys() ^ others.keys()):
        yield f"{role}: only one of the runs has this update"
