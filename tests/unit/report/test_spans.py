"""What a collector of OpenTelemetry gets."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from paceline.report.spans import SpanExport


@dataclass(frozen=True)
class Call:
    """A finished call, as `CallRecord` has it."""

    method: str
    start: float
    end: float
    tag: dict[str, object] = field(default_factory=dict)
    pool: str = "critic_pool"
    process_roles: str = "critic"
    role: str = "critic"
    rank: int = 0
    pid: int = 1
    node: str = "here"


def test_calls_are_within_the_span_of_their_step() -> None:
    kept = InMemorySpanExporter()
    export = SpanExport(kept, "paceline/ppo")
    export.add([Call("update_critic", 3.0, 4.0, {"step": 1}), Call("generate_sequences", 1.0, 2.5, {"step": 1})])
    export.end_step(1, 4.5)
    export.add([Call("compute_values", 5.0, 6.0, {"step": 2, "validation": True})])
    export.close(7.0)
    spans = {span.name: span for span in kept.get_finished_spans()}
    step = spans["step 1"]
    assert (step.start_time, step.end_time) == (1_000_000_000, 4_500_000_000)
    assert step.parent is None
    for name in ("update_critic", "generate_sequences"):
        assert spans[name].parent.span_id == step.context.span_id
        assert spans[name].attributes["paceline.pool"] == "critic_pool"
    assert spans["update_critic"].end_time == 4_000_000_000
    assert spans["compute_values"].parent.span_id == spans["step 2"].context.span_id
    assert spans["compute_values"].attributes["paceline.validation"] is True
    assert spans["step 2"].end_time == 7_000_000_000
    assert spans["step 2"].resource.attributes["paceline.run"] == "paceline/ppo"


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP; `posted` has paths and bodies."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Endpoint)
        self.posted: list[tuple[str, bytes]] = []


class Endpoint(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.posted.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Tests need no such lines."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_collector_gets_them_over_http(collector: Collector) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp", reason="pip install paceline[otel]")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    export = SpanExport.to(f"http://127.0.0.1:{collector.server_port}", "paceline/ppo")
    export.add([Call("update_critic", 3.0, 4.0, {"step": 1})])
    export.close(5.0)
    names = set()
    for path, body in collector.posted:
        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names |= {span.name for scope in resource.scope_spans for span in scope.spans}
    assert names == {"step 1", "update_critic"}


def test_a_collector_that_is_not_there_costs_a_run_seconds_at_most() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp", reason="pip install paceline[otel]")
    gone = Collector()
    gone.server_close()
    export = SpanExport.to(f"http://127.0.0.1:{gone.server_port}", "paceline/ppo")
    start = time.monotonic()
    export.add([Call("update_critic", 3.0, 4.0, {"step": 1})])
    assert time.monotonic() - start < 1
    export.close(5.0)
    assert time.monotonic() - start < 15  # 5 by its own limit, on a quiet machine
