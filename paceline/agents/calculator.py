"""A tool that computes: + - * / // % ** and parentheses on numbers, and nothing else of Python."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from paceline.agents.tools import Tool

LONGEST = 200
LARGEST_POWER = 64
MOST_BITS = 4096
_OPERATORS: Mapping[type[ast.operator | ast.unaryop], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class Calculator(Tool):
    """`{"name": "calculator", "arguments": {"expression": "12*(3+4)"}}`."""

    schema = {  # noqa: RUF012 - the type of the base class is that of a mapping that nobody changes
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Computes an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "such as 12*(3+4)"}},
                "required": ["expression"],
            },
        },
    }

    async def execute(self, state: Any, arguments: dict[str, Any], memory: dict[str, Any]) -> str:
        """The value. Takes next to no time, so it needs no thread."""
        return evaluate(str(arguments["expression"]))


def evaluate(expression: str) -> str:
    """
    >>> evaluate("12*(3+4)"), evaluate("7/2")
    ('84', '3.5')
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters; {LONGEST} are the most.")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value)


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            first, second = _value(left), _value(right)
            if isinstance(op, ast.Pow) and abs(second) > LARGEST_POWER:
                raise ValueError(f"a power above {LARGEST_POWER}.")
            result = _OPERATORS[type(op)](first, second)
            if isinstance(result, complex) or (isinstance(result, int) and result.bit_length() > MOST_BITS):
                raise ValueError("the result is too large, or no real number.")
            return result
    raise ValueError("only numbers, + - * / // % ** and parentheses can be computed.")
