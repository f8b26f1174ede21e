"""Metrics of a run for Prometheus, on a port of the driver's machine (`trainer.prometheus_port`).

paceline_step, paceline_total_steps, paceline_last_step_timestamp_seconds
paceline_phase_seconds{phase="gen"}            of the last step
paceline_metric{name="actor/pg_loss"}          every other number of its line, staleness and tokens/s among them
paceline_pool_call{pool="...",call="..."}      1 for the call that runs now, or for idle
paceline_queue_prompts{state="sampling"}       prompts that are ahead of the training, of a run where some are
paceline_waiting{side="training"}              1 for the side, training or rollout, that waits for the other
paceline_deaths_total                          starts of the run that failed or were killed
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Gauge, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.errors import ResourceError
from paceline.report.json_lines import Row, finite

HOST = "127.0.0.1"
PHASE = "timing_s/"


SIDES = ("training", "rollout")


class Now(Collector):
    """What each pool does and what is ahead of the training, asked when it is read; and how often the run died."""

    def __init__(
        self, running: Callable[[], dict[str, str]], more: Callable[[dict[str, str]], Row], deaths: int
    ) -> None:
        self._running = running
        self._more = more
        self._deaths = deaths

    def collect(self) -> Iterator[Metric]:
        running = self._running()
        more = self._more(running)
        calls = GaugeMetricFamily("paceline_pool_call", "The call that runs on a pool now", labels=["pool", "call"])
        for pool, call in running.items():
            calls.add_metric([pool, call], 1.0)
        yield calls
        if "queue" in more:
            queue = GaugeMetricFamily("paceline_queue_prompts", "Prompts ahead of the training", labels=["state"])
            for state, count in more["queue"].items():
                queue.add_metric([state], count)
            yield queue
            waiting = GaugeMetricFamily("paceline_waiting", "The side that waits for the other", labels=["side"])
            for side in SIDES:
                waiting.add_metric([side], float(more.get("waits") == side))
            yield waiting
        yield CounterMetricFamily("paceline_deaths", "Starts of the run that failed or were killed", self._deaths)


class PrometheusTracker:
    """Serves the newest line of metrics until `close`. Nobody outside of this machine is answered."""

    def __init__(
        self,
        port: int,
        running: Callable[[], dict[str, str]],
        more: Callable[[dict[str, str]], Row],
        total_steps: int,
        step: int = 0,
        deaths: int = 0,
    ) -> None:
        """`running` and `more` are those of the status; `deaths` were before."""
        registry = CollectorRegistry()
        self._step = Gauge("paceline_step", "The step that was completed last", registry=registry)
        total = Gauge("paceline_total_steps", "Steps of the run", registry=registry)
        self._time = Gauge("paceline_last_step_timestamp_seconds", "When its line was written", registry=registry)
        self._phases = Gauge("paceline_phase_seconds", "Seconds of a phase in that step", ["phase"], registry=registry)
        self._metrics = Gauge("paceline_metric", "A number of that step's line", ["name"], registry=registry)
        registry.register(Now(running, more, deaths))
        total.set(total_steps)
        self._step.set(step)
        try:
            self._server, self._thread = start_http_server(port, HOST, registry)
        except OSError as error:
            raise ResourceError(f"trainer.prometheus_port={port} can't be served on: {error}. Set another.") from error

    def log(self, metrics: Row, step: int) -> None:
        """The numbers of a step take the place of those before."""
        self._phases.clear()
        self._metrics.clear()
        for name, value in metrics.items():
            number = finite(value)
            if number is None or isinstance(value, bool):
                continue
            if name.startswith(PHASE):
                self._phases.labels(name.removeprefix(PHASE)).set(number)
            else:
                self._metrics.labels(name).set(number)
        self._step.set(step)
        self._time.set(time.time())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
