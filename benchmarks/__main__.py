"""All benchmarks, one after another: `python -m benchmarks`. Each also runs alone: `python -m benchmarks.transport`."""

from __future__ import annotations

import subprocess
import sys

BENCHMARKS = ("startup", "data", "graders", "transport", "controller", "rollout", "update", "overlap", "ppo_step")


def main() -> int:
    """Run each in a process of its own, so that none inherits another's threads or memory."""
    codes = []
    for name in BENCHMARKS:
        print(f"== {name}", flush=True)
        codes.append(
            subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:]], check=False).returncode
        )
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
