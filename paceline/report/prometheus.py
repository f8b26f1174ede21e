"""Metrics of a run for Prometheus, on a port of the driver's machine (`trainer.prometheus_port`).

paceline_step, paceline_total_steps, paceline_last_step_timestamp_seconds
paceline_phase_seconds{phase="gen"}            of the last step
paceline_metric{name="actor/pg_loss"}          every other number of its line, staleness and tokens/s among them
paceline_pool_call{pool="...",call="..."}      1 for the call that runs now, or for idle
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Gauge, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from paceline.errors import ResourceError
from paceline.report.json_lines import Row, finite

HOST = "127.0.0.1"
PHASE = "timing_s/"


class PoolCalls(Collector):
    """What each pool does, asked when it is read."""

    def __init__(self, running: Callable[[], dict[str, str]]) -> None:
        self._running = running

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily("paceline_pool_call", "The call that runs on a pool now", labels=["pool", "call"])
        for pool, call in self._running().items():
            family.add_metric([pool, call], 1.0)
        yield family


class PrometheusTracker:
    """Serves the newest line of metrics until `close`. Nobody outside of this machine is answered."""

    def __init__(self, port: int, running: Callable[[], dict[str, str]], total_steps: int, step: int = 0) -> None:
        registry = CollectorRegistry()
        self._step = Gauge("paceline_step", "The step that was completed last", registry=registry)
        total = Gauge("paceline_total_steps", "Steps of the run", registry=registry)
        self._time = Gauge("paceline_last_step_timestamp_seconds", "When its line was written", registry=registry)
        self._phases = Gauge("paceline_phase_seconds", "Seconds of a phase in that step", ["phase"], registry=registry)
        self._metrics = Gauge("paceline_metric", "A number of that step's line", ["name"], registry=registry)
        registry.register(PoolCalls(running))
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
