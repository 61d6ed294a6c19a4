"""Traces across queue and worker, where OpenTelemetry is installed; nothing otherwise.

The extra `autoshard[otel]` has what it takes. The usual variables (OTEL_EXPORTER_OTLP_ENDPOINT,
OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER) say where spans go; without an endpoint none are made.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

try:
    from opentelemetry import propagate, trace
    from opentelemetry.trace import SpanKind, Status, StatusCode
except ImportError:  # the extra is not installed
    trace = None  # type: ignore[assignment]

_NAME = "autoshard_server"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Trace:
    """A span, or nothing where there are no traces."""

    def __init__(self, span: Any = None) -> None:
        self._span = span

    def set(self, attributes: Mapping[str, str | float]) -> None:
        """Add attributes."""
        if self._span is not None:
            self._span.set_attributes(dict(attributes))

    def fail(self, why: str) -> None:
        """Say that it went wrong."""
        if self._span is not None:
            self._span.set_status(Status(StatusCode.ERROR, why))

    def rename(self, name: str) -> None:
        """Give it the name that was not known when it began."""
        if self._span is not None:
            self._span.update_name(name)


@contextmanager
def request_span(name: str, headers: Mapping[str, str]) -> Iterator[Trace]:
    """A span of a request; a part of the caller's trace if its headers name one."""
    with _span(name, headers, server=True) as span:
        yield span


@contextmanager
def job_span(name: str, carried: Mapping[str, str]) -> Iterator[Trace]:
    """A span of a job's work; a part of the trace of the request that asked for it."""
    with _span(name, carried, server=False) as span:
        yield span


def carried_context() -> dict[str, str]:
    """What a job must carry so that its work becomes a part of the current trace."""
    carrier: dict[str, str] = {}
    if trace is not None:
        propagate.inject(carrier)
    return carrier


def start_tracing() -> bool:
    """Send spans where the environment says; False where it says nothing, or cannot be done."""
    if trace is None or not any(os.environ.get(name) for name in _ENDPOINTS):
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


@contextmanager
def _span(name: str, carried: Mapping[str, str], *, server: bool) -> Iterator[Trace]:
    if trace is None:
        yield Trace()
        return
    kind = SpanKind.SERVER if server else SpanKind.CONSUMER
    tracer = trace.get_tracer(_NAME)
    context = propagate.extract(carried)
    with tracer.start_as_current_span(name, context=context, kind=kind) as span:
        yield Trace(span)
