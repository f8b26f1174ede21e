"""Word problems of one step for a chat model that has a code interpreter.

Takes the folder that examples/smollm2_gsm8k/prepare.py wrote. Each prompt begins with one solved problem, in which the
assistant calls the interpreter.

python examples/agent_interpreter/prepare.py --folder ~/smollm2
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

EXAMPLE = [
    {"role": "user", "content": "Mia has 14 pens and gets 25 more. How many pens does Mia have now?"},
    {
        "role": "assistant",
        "content": '<tool_call>{"name": "code_interpreter", "arguments": {"code": "14 + 25"}}</tool_call>',
    },
    {"role": "tool", "content": "39"},
    {"role": "assistant", "content": "#### 39"},
]
"""From a description alone, so small a model writes no call."""


def with_interpreter(rows: list[dict]) -> list[dict]:
    """The same problems behind the other example."""
    return [{**row, "prompt": [*EXAMPLE, row["prompt"][-1]]} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="what examples/smollm2_gsm8k/prepare.py wrote")
    folder = parser.parse_args().folder.expanduser()
    for split in ("train", "test"):
        rows = with_interpreter(pq.read_table(folder / f"{split}.parquet").to_pylist())
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}_interpreter.parquet")
        print(f"{len(rows)} problems in {folder / f'{split}_interpreter.parquet'}")


if __name__ == "__main__":
    main()
