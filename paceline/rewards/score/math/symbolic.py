"""Symbolic equality, by math-verify and sympy. It runs in processes that can be killed: some questions take for ever.

`rewards/killable_side.py` imports this file by its path. It imports no other module of paceline, so that its process
starts fast and has no threads.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy.core.random
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{?(\d+)\}?")
_LATEX = LatexExtractionConfig(
    # math-verify's units are letters, too: it would read 5t as 5.
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
)
LONGEST_TEXT = 10_000
"""Characters, the last of a response, in which a formula is looked for."""
CLOSE = 1e-4
"""Share by which a number and its decimals may differ; math-verify alone rounds to six decimals, and so 1e-9 to 0."""


def make_grader() -> Callable[[tuple[str, str] | str], bool | list[str] | str | None]:
    """`answer`, ready to be forked: workers inherit the parser's tables, which are filled by use."""
    logging.disable(logging.CRITICAL)
    for gold, found in [(r"\frac{1}{2}+x", "x+0.5"), (r"(1,2]", r"\{1,\sqrt{2}\}"), ("x^2+2x+1", "(x+1)^2")]:
        equivalent(gold, found)
    return answer


def answer(question: tuple[str, str] | str) -> bool | list[str] | str | None:
    """Whether the two are equal; of a text, its last formula. None if it takes too much memory; a message if it fails.

    The answer to a question depends on nothing but the question.
    """
    sympy.core.random.seed(0)
    try:
        return last_formula(question) if isinstance(question, str) else equivalent(*question)
    except MemoryError:
        return None
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def equivalent(gold: str, answer: str) -> bool:
    """Whether two expressions in LaTeX are mathematically equal. What sympy cannot compare is not equal."""
    for expected, found in itertools.product(_parsed(gold), _parsed(answer)):
        try:
            if verify(expected, found, timeout_seconds=None, raise_on_error=True, allow_set_relation_comp=True):
                return _is_close(expected, found)
        except MemoryError:
            raise
        except Exception:  # such as a division by zero
            continue
    return False


def last_formula(text: str) -> list[str]:
    """The last formula or number of a text, by math-verify's rules; none if there is none."""
    found = parse(
        text[-LONGEST_TEXT:],
        extraction_config=[_LATEX, ExprExtractionConfig()],
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return [formula for formula in found if isinstance(formula, str)]


def _is_close(expected: Any, found: Any) -> bool:
    numbers = [getattr(side, "is_number", False) for side in (expected, found)]
    if not all(numbers) or not (expected.has(sympy.Float) or found.has(sympy.Float)):
        return True
    return bool(abs(expected - found).evalf() <= CLOSE * abs(expected).evalf())


@lru_cache(maxsize=4096)
def _parsed(latex: str) -> tuple[object, ...]:
    """What math-verify reads: an expression if it can, and always the text."""
    latex = _REPEATING.sub(_fraction_of_repeating, latex)
    return tuple(parse(f"${latex}$", extraction_config=[_LATEX], parsing_timeout=None))


def _fraction_of_repeating(match: re.Match[str]) -> str:
    """0.1\\overline{6} is 1/6; the parser would read it as 0."""
    whole, fixed, repeated = match.groups()
    start = Fraction(f"{whole or 0}.{fixed or 0}")
    value = start + Fraction(int(repeated), (10 ** len(repeated) - 1) * 10 ** len(fixed))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
