"""How many responses per second the graders take, beside a plain way to do the same.

GSM8K and HellaSwag: one process, against a bare regular expression that finds the answer. MATH: expressions that have
to be compared symbolically, against math-verify called directly, which has no deadline and no process that can be
killed. Code: programs with one test each in the sandbox, against bare `python` processes without any isolation.

    python -m benchmarks.graders
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable

import math_verify

from benchmarks.table import report
from benchmarks.timing import take_turns
from paceline.rewards.score import code, gsm8k, hellaswag, math

FILLER = "First we add the apples and then the pears, 3 and 4 make 7. "


def gsm8k_ways(count: int) -> dict[str, Callable[[], list[float]]]:
    responses = [f"{FILLER * 5}So there are {number}.\n#### {number:,}" for number in range(count)]
    truths = [str(number + number % 2) for number in range(count)]

    def plain() -> list[float]:
        found = (re.search(r"#### (-?[\d.,]+)", response) for response in responses)
        return [
            float(bool(match) and match[1].replace(",", "") == truth)
            for match, truth in zip(found, truths, strict=True)
        ]

    return {
        "paceline": lambda: _scores(gsm8k.compute_scores(responses, truths, [None] * count)),
        "a regular expression": plain,
    }


def hellaswag_ways(count: int) -> dict[str, Callable[[], list[float]]]:
    responses = [f"{FILLER * 2}The answer is {'ABCD'[number % 4]}." for number in range(count)]
    truths = ["ABCD"[number % 3] for number in range(count)]

    def plain() -> list[float]:
        found = (re.search(r"answer is ([A-D])", response) for response in responses)
        return [float(bool(match) and match[1] == truth) for match, truth in zip(found, truths, strict=True)]

    return {
        "paceline": lambda: _scores(hellaswag.compute_scores(responses, truths, [None] * count)),
        "a regular expression": plain,
    }


def math_ways(count: int) -> dict[str, Callable[[], list[float]]]:
    truths = [rf"\frac{{x+{number}}}{{2}}" for number in range(count)]
    answers = [
        rf"\frac{{{number}+x}}{{2}}" if number % 2 else rf"\frac{{x}}{{{number + 3}}}" for number in range(count)
    ]
    responses = [rf"{FILLER}The answer is $\boxed{{{answer}}}$." for answer in answers]

    def plain() -> list[float]:
        return [
            float(math_verify.verify(math_verify.parse(f"${truth}$"), math_verify.parse(response)))
            for truth, response in zip(truths, responses, strict=True)
        ]

    return {
        "paceline": lambda: _scores(math.compute_scores(responses, truths, [None] * count)),
        "math-verify alone": plain,
    }


def code_ways(count: int) -> dict[str, Callable[[], list[float]]]:
    programs = [f"n = int(input())\nprint(n * {number})" for number in range(count)]
    responses = [f"```python\n{program}\n```" for program in programs]
    truths = [{"inputs": ["3\n"], "outputs": [f"{3 * number}\n"]} for number in range(count)]

    def plain() -> list[float]:
        scores = []
        for program, truth in zip(programs, truths, strict=True):
            command = [sys.executable, "-I", "-c", program]
            done = subprocess.run(command, input=truth["inputs"][0], capture_output=True, text=True, check=False)
            scores.append(float(done.stdout == truth["outputs"][0]))
        return scores

    return {
        "paceline": lambda: _scores(code.compute_scores(responses, truths, [None] * count)),
        "bare processes": plain,
    }


def _scores(results: list) -> list[float]:
    return [float(result["score"] if isinstance(result, dict) else result) for result in results]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    for name, ways, count in (
        ("GSM8K", gsm8k_ways, 5000),
        ("HellaSwag", hellaswag_ways, 5000),
        ("MATH", math_ways, 100),
        ("code", code_ways, 20),
    ):
        both = ways(count)
        answers = [work() for work in both.values()]
        assert answers[0] == answers[1], f"{name}: the two ways give different scores"
        taken = take_turns(both, args.repeats)
        speeds = {way: [count / value for value in seconds] for way, seconds in taken.items()}
        report(f"grading {name}", speeds, "responses/s", of="paceline")


if __name__ == "__main__":
    main()
