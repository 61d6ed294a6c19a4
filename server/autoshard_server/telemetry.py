"""Telemetry: Prometheus metrics, OpenTelemetry traces, logs in JSON.

If PROMETHEUS_MULTIPROC_DIR is set to a folder, the processes of one host share their metrics.
Labels have few values: routes, not paths; kinds, not job ids.

FastAPI makes the spans of requests; a job continues the trace of the request that submitted it.
The extra `autoshard[otel]` has the exporter; the usual variables (OTEL_EXPORTER_OTLP_ENDPOINT,
OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER) configure it.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import structlog
from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    multiprocess,
)

from autoshard_server.limits import KINDS_BY_NAME

_REQUEST_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 60.0),
)
_JOB_BUCKETS = (
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    *(180.0, 600.0, 1800.0, 3600.0, 7200.0),
)

_registry = CollectorRegistry()

requests_total = Counter(
    "autoshard_http_requests",
    "Requests that were answered.",
    ("method", "route", "status"),
    registry=_registry,
)
request_seconds = Histogram(
    "autoshard_http_request_duration_seconds",
    "From the first byte of a request to the last byte of its response.",
    ("method", "route"),
    buckets=_REQUEST_BUCKETS,
    registry=_registry,
)
results_total = Counter(
    "autoshard_results",
    "Requests for a result, by cache hit or miss.",
    ("kind", "cache"),
    registry=_registry,
)
job_seconds = Histogram(
    "autoshard_job_duration_seconds",
    "From a worker's claim of a job to its outcome there: cached, succeeded, failed, crashed, "
    "withdrawn or released.",
    ("kind", "outcome"),
    buckets=_JOB_BUCKETS,
    registry=_registry,
)

job_wait_seconds = Histogram(
    "autoshard_job_wait_seconds",
    "From the submission of a job to its first start.",
    ("class",),
    buckets=_JOB_BUCKETS,
    registry=_registry,
)
job_failures_total = Counter(
    "autoshard_job_failures",
    "Starts of jobs that ended with a problem, also of jobs that are started again.",
    ("kind", "problem"),
    registry=_registry,
)
clock_is_wrong = Gauge(
    "autoshard_clock_is_wrong",
    "1 while nothing is deleted by age, because a clock has jumped.",
    registry=_registry,
    multiprocess_mode="max",
)
limits_reached_total = Counter(
    "autoshard_limits_reached",
    "Requests, connections and jobs that a limit has refused or ended, by the name of its setting, "
    "and what it limits: one request, a caller, the service (all callers together) or a job.",
    ("limit", "of"),
    registry=_registry,
)
refused_connections_total = Counter(
    "autoshard_refused_connections",
    "Connections that were refused or closed by a limit: total, address, displaced, header, "
    "header-timeout, body-timeout, no-key, no-request, pipelined, ambiguous, malformed, body, "
    "unread-body or response.",
    ("reason",),
    registry=_registry,
)

if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
    # Memory, processor time and open files are those of one process.
    ProcessCollector(registry=_registry)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def process_metrics() -> CollectorRegistry:
    """The metrics that are counted in this process, or in all processes of this host."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return _registry
    merged = CollectorRegistry()
    multiprocess.MultiProcessCollector(merged)  # type: ignore[no-untyped-call]
    return merged


@contextmanager
def job_span(name: str, carrier: Mapping[str, str]) -> Iterator[None]:
    """A span of a job's work, in the trace of the request that submitted it."""
    tracer = trace.get_tracer("autoshard_server")
    context = propagate.extract(carrier)
    with tracer.start_as_current_span(name, context=context, kind=SpanKind.CONSUMER):
        yield


def count_limit(problem: Mapping[str, object]) -> None:
    """Count a problem, if a limit is its cause."""
    name = problem.get("limit_name")
    if name in KINDS_BY_NAME:
        limits_reached_total.labels(name, KINDS_BY_NAME[str(name)]).inc()


def trace_id() -> dict[str, str]:
    """The field `trace_id` of log lines; empty if nothing is traced."""
    context = trace.get_current_span().get_span_context()
    return {"trace_id": f"{context.trace_id:032x}"} if context.is_valid else {}


def trace_context() -> dict[str, str]:
    """The current trace context, which is stored with a job."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier


def start_tracing() -> bool:
    """Export spans if the environment configures an endpoint and the extra is installed."""
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


def configure_logging(level: str = "info") -> None:
    """Log one JSON object per line to stderr, also for the libraries.

    Args:
        level: debug, info, warning or error.

    Raises:
        ValueError: there is no such level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"unknown log level {level!r}; use debug, info, warning or error")
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=number, force=True)
