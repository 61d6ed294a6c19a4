"""Traces from a request through the queue to the worker."""

from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_a_solve_belongs_to_the_trace_of_its_request(start_service: Any, graph: bytes) -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    service = start_service()
    service.http.headers["traceparent"] = f"00-{TRACE}-b7ad6b7169203331-01"
    assert service.post(graph, wait=60).status_code == 200
    provider.force_flush()
    ours = {
        span.name: span
        for span in spans.get_finished_spans()
        if span.context is not None and f"{span.context.trace_id:032x}" == TRACE
    }
    asked, worked = ours["POST /v1/plans"], ours["job plan"]
    assert asked.attributes is not None
    assert asked.attributes["http.response.status_code"] == 200
    # Over the spans that the framework makes in between.
    parents = {span.context.span_id: span.parent for span in ours.values() if span.context}
    assert worked.parent is not None
    assert worked.parent.span_id in parents
