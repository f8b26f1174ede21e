"""Steps and calls as spans of OpenTelemetry, sent to a collector (`trainer.otlp_endpoint`).

A step is a span from its first call to its line, and the calls of workers in that step are within it. The
exporter is an extra: pip install "paceline[otel]".
"""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.util.types import AnyValue

from paceline.report.timeline import FinishedCall

TRACES = "/v1/traces"
EXPORT_SECONDS = 3
CLOSE_MILLISECONDS = 5000
"""How long a run waits at its end for a collector that does not answer."""


class SpanExport:
    """Sends what `add` is given, in the background. A collector that does not answer costs spans, never the run."""

    def __init__(self, exporter: SpanExporter, run: str) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "paceline", "paceline.run": run}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("paceline")
        self._steps: dict[int, trace.Span] = {}

    @classmethod
    def to(cls, endpoint: str, run: str) -> SpanExport:
        """To a collector that takes OTLP over HTTP, such as http://127.0.0.1:4318."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        address = endpoint if endpoint.endswith(TRACES) else endpoint.rstrip("/") + TRACES
        return cls(OTLPSpanExporter(endpoint=address, timeout=EXPORT_SECONDS), run)

    def add(self, records: Iterable[FinishedCall]) -> None:
        """Finished remote calls, in any order."""
        for record in sorted(records, key=lambda record: record.start):
            tag: dict[str, AnyValue] = {}
            for name, value in record.tag.items():
                if isinstance(value, str | bool | int):
                    tag[f"paceline.{name}"] = value
            names: dict[str, AnyValue] = {
                "paceline.pool": record.pool,
                "paceline.role": record.role,
                "paceline.rank": record.rank,
            }
            number = record.tag.get("step", 0)
            parent = self._step(number if isinstance(number, int) else 0, record.start)
            span = self._tracer.start_span(
                record.method,
                context=trace.set_span_in_context(parent),
                start_time=nanoseconds(record.start),
                attributes={**names, **tag},
            )
            span.end(nanoseconds(record.end))

    def end_step(self, step: int, end: float) -> None:
        """The line of a step was written."""
        for number in [known for known in self._steps if known <= step]:
            self._steps.pop(number).end(nanoseconds(end))

    def close(self, end: float) -> None:
        """Send what is left."""
        self.end_step(max(self._steps, default=0), end)
        self._provider.force_flush(CLOSE_MILLISECONDS)
        self._provider.shutdown()

    def _step(self, number: int, start: float) -> trace.Span:
        if number not in self._steps:
            self._steps[number] = self._tracer.start_span(
                f"step {number}", start_time=nanoseconds(start), attributes={"paceline.step": number}
            )
        return self._steps[number]


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
