"""Traces across queue and worker, by OpenTelemetry.

FastAPI makes the spans of requests; a job carries on the trace of the request that asked for
it. The extra `autoshard[otel]` has what sends spans; the usual variables
(OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER) say where to and which.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind

_NAME = "autoshard_server"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@contextmanager
def job_span(name: str, carried: Mapping[str, str]) -> Iterator[None]:
    """A span of a job's work; a part of the trace of the request that asked for it."""
    tracer = trace.get_tracer(_NAME)
    context = propagate.extract(carried)
    with tracer.start_as_current_span(name, context=context, kind=SpanKind.CONSUMER):
        yield


def carried_context() -> dict[str, str]:
    """What a job must carry so that its work becomes a part of the current trace."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier


def start_tracing() -> bool:
    """Send spans where the environment says; False where it says nothing, or cannot be done."""
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return False
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415  extra
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415  an extra
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415  an extra
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415  an extra
    except ImportError:
        return False
    name = os.environ.get("OTEL_SERVICE_NAME", "autoshard")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return True
