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

from paceline.report.json_lines import finite, is_number

FAR_ABOVE = (
    "actor/grad_norm",
    "critic/grad_norm",
    "actor/ppo_kl",
    "actor/kl_loss",
    "actor/reward_kl_penalty",
    "training/rollout_probs_diff_max",
)
FAR_EITHER_WAY = ("critic/score/mean",)
COLLAPSES = "actor/entropy"
COLLAPSED = 0.1
"""Of its usual size."""
WINDOW = 50
FEWEST = 10
"""Steps that a run has before its metrics say what is usual."""
DEVIATIONS = 10.0
"""Of the usual one from the median: seldom reached by chance, also by metrics with heavy tails."""
LEAST_RATIO = 3.0
"""And so many times the median, or a metric that hardly moves would be far from it at once."""


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
        for name in (*FAR_ABOVE, *FAR_EITHER_WAY, COLLAPSES):
            number = finite(metrics.get(name))
            if number is None:
                continue
            if remark := self._remark(name, number):
                found.append(remark)
            else:
                self._seen[name].append(number)
        return found

    def _remark(self, name: str, value: float) -> str | None:
        seen = self._seen[name]
        if len(seen) < FEWEST:
            return None
        usual = statistics.median(seen)
        text = f"{name} is {value:.4g}, far from {usual:.4g} (of {len(seen)} steps)"
        if name == COLLAPSES:
            return text if value < COLLAPSED * usual else None
        deviation = statistics.median(abs(other - usual) for other in seen)
        distance = abs(value - usual) if name in FAR_EITHER_WAY else value - usual
        bound = max(DEVIATIONS * deviation, abs(usual) * (LEAST_RATIO - 1) if name in FAR_ABOVE else 0.0, 1e-3)
        return text if distance > bound else None
