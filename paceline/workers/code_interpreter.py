"""A tool that runs Python in the sandbox, and remembers the names of a conversation.

    tools:
      - class_name: paceline.workers.code_interpreter.CodeInterpreter
        config: {type: native, wall_seconds: 5}

A call is a cell of a notebook: it prints what it prints, and the value of its last line. The cells before it are run
again, silently, in a new jail: so nothing of a conversation lives between two calls, and a cell that hangs or is killed
costs its own call. Random numbers begin at the same seed each time; what a cell reads from a clock may change.
"""

from __future__ import annotations

import json
from typing import Any

from paceline.agents.tools import Tool
from paceline.errors import PacelineError
from paceline.rewards.sandbox import LocalSandbox, Program, SandboxLimits, sandbox_of

MOST_CELLS = 64
NOTEBOOK = """
import ast, contextlib, io, json, random, sys

cells = json.load(sys.stdin)
random.seed(0)
names = {"__name__": "__main__"}

def run(cell):
    tree = ast.parse(cell)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        if value is not None:
            print(repr(value))

for number, cell in enumerate(cells, 1):
    is_new = number == len(cells)
    with contextlib.redirect_stdout(sys.stdout if is_new else io.StringIO()):
        try:
            run(cell)
        except BaseException as error:
            if is_new:
                print(f"{type(error).__name__}: {error}")
"""


class CodeInterpreter(Tool):
    """`{"name": "code_interpreter", "arguments": {"code": "x = 2\\nx + 3"}}`; `limits` are those of `SandboxLimits`."""

    schema = {  # noqa: RUF012 - the type of the base class is that of a mapping that nobody changes
        "type": "function",
        "function": {
            "name": "code_interpreter",
            "description": "Runs Python and gives what it prints, and the value of the last line. Names are kept.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "such as print(2+3)"}},
                "required": ["code"],
            },
        },
    }

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self._sandbox = LocalSandbox(SandboxLimits(**limits)) if limits else sandbox_of(None)
        self._sandbox.check()

    def execute(self, state: Any, arguments: dict[str, Any], memory: dict[str, Any]) -> str:
        cells = [*memory.get("cells", ()), str(arguments["code"])]
        if len(cells) > MOST_CELLS:
            raise PacelineError(f"a conversation has {MOST_CELLS} calls of the interpreter at most")
        result = self._sandbox.run(Program(NOTEBOOK, json.dumps(cells)))
        if not result.ok:
            said = result.message or result.stderr.strip().rpartition("\n")[2]
            raise PacelineError(f"{result.status}: {said}" if said else result.status)
        memory["cells"] = cells
        return result.stdout.rstrip("\n")
