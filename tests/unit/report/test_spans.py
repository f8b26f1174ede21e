"""What a collector of OpenTelemetry gets."""

from __future__ import annotations

from dataclasses import dataclass, field

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
