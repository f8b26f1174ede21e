"""Steps that are far from their run, by their metrics. Pure: metrics in, sentences out.

>>> watch = Anomalies()
>>> for step in range(20):
...     assert watch.look({"actor/grad_norm": 1.0 + 0.01 * (step % 3)}) == []
>>> watch.look({"actor/grad_norm": 9.0})
['actor/grad_norm is 9, far from 1.01 (of 20 steps)']
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping
from itertools import pairwise

from paceline.report.json_lines import finite, is_number

FAR_ABOVE = (
    "actor/grad_norm",
    "critic/grad_norm",
    "actor/ppo_kl",
    "actor/kl_loss",
    "actor/reward_kl_penalty",
    "training/rollout_probs_diff_max",
)
MOVES = ("critic/score/mean",)
"""It moves as the policy learns: what is unusual is a jump, up or down, from the last steps."""
RECENT = 5
COLLAPSES = "actor/entropy"
COLLAPSED = 0.1
"""Of its usual size."""
WINDOW = 50
FEWEST = 20
"""Steps that a run has before its metrics say what is usual."""
DEVIATIONS = 10.0
"""Of the usual one from the median: seldom reached by chance, also by metrics with heavy tails."""
LEAST_RATIO = 5.0
"""And so many times the median, or a metric that hardly moves would be far from it at once."""
LEAST_CHANGE = 1e-3


class Anomalies:
    """Watches the metrics of a run, step by step. What was far from the run does not become usual."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))

    def look(self, metrics: Mapping[str, object]) -> list[str]:
        """What is unusual about a step, in words."""
        found = [
            f"{name} is {value}"
            for name, value in metrics.items()
            if is_number(value) and not isinstance(value, bool) and finite(value) is None
        ]
        found += [
            f"{name.removeprefix('training/nonfinite/')} was not finite at {value:g} places"
            for name, value in metrics.items()
            if name.startswith("training/nonfinite/") and isinstance(value, int | float)
        ]
        for name in (*FAR_ABOVE, *MOVES, COLLAPSES):
            number = finite(metrics.get(name))
            if number is None:
                continue
            remark = self._remark(name, number)
            found += [remark] if remark else []
            if remark is None or name in MOVES:
                self._seen[name].append(number)
        return found

    def _remark(self, name: str, value: float) -> str | None:
        seen = list(self._seen[name])
        if len(seen) < FEWEST:
            return None
        if name in MOVES:
            usual = statistics.median(seen[-RECENT:])
            deviation = statistics.median(abs(after - before) for before, after in pairwise(seen))
            is_far = abs(value - usual) > max(DEVIATIONS * deviation, LEAST_CHANGE)
        else:
            usual = statistics.median(seen)
            deviation = statistics.median(abs(other - usual) for other in seen)
            is_far = value - usual > max(DEVIATIONS * deviation, (LEAST_RATIO - 1) * abs(usual), LEAST_CHANGE)
        if name == COLLAPSES:
            is_far = value < COLLAPSED * usual
        return f"{name} is {value:.4g}, far from {usual:.4g} (of {len(seen)} steps)" if is_far else None
