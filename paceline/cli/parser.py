"""What the help of every command has: what it does, its options, and examples to copy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def make_parser(command: str, description: str, examples: Sequence[str]) -> argparse.ArgumentParser:
    """A parser of `paceline <command>`; the examples stand at the end of its help."""
    return argparse.ArgumentParser(
        prog=f"paceline {command}",
        description=description,
        epilog="\n".join(["examples:", *(f"  paceline {command} {example}".rstrip() for example in examples)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
