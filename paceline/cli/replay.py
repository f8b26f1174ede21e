"""`paceline replay BUNDLE`: a recorded step once more, compared with what was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import make_parser
from paceline.command_line import errors_as_exit_codes
from paceline.errors import ConfigError, DataError

if TYPE_CHECKING:
    from paceline.report.bundles import Bundle
    from paceline.trainer.step_replay import Outcome

EXAMPLES = (
    "runs/paceline/ppo --step 2",
    "runs/paceline/ppo/records/step_2 --from loss        takes advantages as they were recorded",
    "runs/paceline/ppo --step 2 --row 5                  shows that response, and compares its columns alone",
    "runs/paceline/ppo --step 2 --set algorithm.gamma=0.9        what would have been",
)
STAGES = ("reward", "advantage", "loss", "gradient")
ROW_COLUMNS = ("rollout_log_probs", "old_log_probs", "ref_log_prob", "values", "token_level_rewards", "advantages")


def main(argv: Sequence[str]) -> int:
    """Replay and say what differs; 0 if nothing does."""
    parser = make_parser(
        "replay", "Make a recorded step again in this process, without Ray, and compare it with the record.", EXAMPLES
    )
    parser.add_argument("path", type=Path, metavar="BUNDLE|RUN", help="a bundle, or a run's folder with --step")
    parser.add_argument("--step", type=int, help="of a run: the step")
    parser.add_argument(
        "--from", dest="start", choices=STAGES, default="reward", help="what comes before is as recorded (reward)"
    )
    parser.add_argument("--row", type=int, help="show this response, and compare the columns of no other")
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="key=value", help="change the configuration"
    )
    parser.add_argument("--pdb", action="store_true", help="stop in the debugger before the step is made again")
    arguments = parser.parse_args(argv)
    with errors_as_exit_codes():
        folder = bundle_folder(arguments.path.expanduser(), arguments.step)
        changes = parsed_changes(arguments.changes)

        from paceline.trainer.step_replay import Replay

        replay = Replay(folder, changes)
        try:
            bundle = replay.bundle
            if arguments.row is not None and not 0 <= arguments.row < len(bundle.columns):
                raise ConfigError(f"--row {arguments.row}: the step has rows 0 to {len(bundle.columns) - 1}.")
            print(f"step {bundle.step} of {folder}")
            if arguments.pdb:
                breakpoint()
            outcome = replay.run(arguments.start, arguments.row)
        finally:
            replay.close()
        if arguments.row is not None:
            show_row(bundle, outcome, arguments.row)
        return conclude(outcome, is_question=bool(changes))


def bundle_folder(path: Path, step: int | None) -> Path:
    """The folder of a bundle, from its own or its run's."""
    from paceline.report.bundles import bundle_name, list_bundles
    from paceline.run_folder import MANIFEST, RECORDS_FOLDER

    if (path / MANIFEST).is_file() and step is None:
        return path
    there = list_bundles(path / RECORDS_FOLDER)
    if not there:
        raise DataError(f"{path} has no bundles of the flight recorder; trainer.record=every writes them.")
    if step not in there:
        asked = "--step is not set" if step is None else f"step {step} was not recorded"
        raise DataError(f"{asked}: {path} has the steps {', '.join(map(str, there))}.")
    return path / RECORDS_FOLDER / bundle_name(step)


def parsed_changes(changes: Sequence[str]) -> dict[str, Any]:
    """Key to value, as an override of a run has them."""
    import yaml

    from paceline.config.keys import known_keys
    from paceline.text import did_you_mean

    found = {}
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals or key not in known_keys():
            raise ConfigError(
                f"--set {change}: not a key of the configuration and a value.{did_you_mean(key, known_keys())}"
            )
        found[key] = yaml.safe_load(value)
    return found


def conclude(outcome: Outcome, *, is_question: bool) -> int:
    """What differs, and the last line."""
    differences = outcome.differences
    for difference in differences:
        print(f"  {difference}")
    if differences:
        what = "with other settings, the step differs" if is_question else "the step differs"
        print(f"replay: {what}, first in {differences[0]}")
        return 0 if is_question else 1
    bound = "to the last bit" if outcome.is_exact else "within rtol 1e-4, atol 1e-6, as the run had several ranks"
    print(f"replay: equal {bound}: {', '.join(outcome.compared)}")
    return 0


def show_row(bundle: Bundle, outcome: Outcome, row: int) -> None:
    """A response token by token, as recorded; where the replay has another number, both."""
    columns, now = bundle.columns.batch, outcome.batch
    mask = columns["response_mask"][row].bool()
    names = [name for name in ROW_COLUMNS if name in columns]
    print(f"row {row}, {int(mask.sum())} tokens: token id, {', '.join(names)}")
    for place in mask.nonzero().flatten().tolist():
        values = []
        for name in names:
            old = columns[name][row, place].item()
            new = now.batch[name][row, place].item() if now is not None and name in now.batch else old
            values.append(f"{old:.6g}" if old == new else f"{old:.6g} -> {new:.6g}")
        print(f"  {place:4d} {int(columns['responses'][row, place]):7d}  {'  '.join(values)}")
