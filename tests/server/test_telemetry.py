"""Traces and log lines from a request through the queue to the worker."""

import logging
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import structlog
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import LogCapture

TRACE = "0af7651916cd43dd8448eb211c80319c"
JOB_PHASES = ["parse", "formulate", "solve", "store"]


@pytest.fixture(scope="module")
def exporter() -> Iterator[InMemorySpanExporter]:
    """The spans of this process; its provider can be set only once."""
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    yield spans
    provider.shutdown()


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> InMemorySpanExporter:
    exporter.clear()
    return exporter


def ours(spans: InMemorySpanExporter) -> list[ReadableSpan]:
    """The spans of the trace, in the order of their start."""
    found = [
        span
        for span in spans.get_finished_spans()
        if span.context is not None and f"{span.context.trace_id:032x}" == TRACE
    ]
    return sorted(found, key=lambda span: span.start_time or 0)


@pytest.fixture
def logged() -> Iterator[Callable[[str], list[dict[str, Any]]]]:
    """The log lines of an event, however another test of this process has set up logging."""
    before = structlog.get_config()
    capture = LogCapture()
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, capture],
        # Not the level of another test: below it, nothing comes to the processors.
        wrapper_class=structlog.make_filtering_bound_logger(logging.NOTSET),
        cache_logger_on_first_use=False,
    )
    yield lambda event: [dict(line) for line in capture.entries if line["event"] == event]
    structlog.configure(**before)


def test_a_solve_and_its_phases_belong_to_the_trace_of_its_request(
    start_service: Any,
    graph: bytes,
    spans: InMemorySpanExporter,
    logged: Callable[[str], list[dict[str, Any]]],
) -> None:
    service = start_service()
    headers = {
        "traceparent": f"00-{TRACE}-b7ad6b7169203331-01",
        "X-Request-ID": "mine",
    }
    assert service.post(graph, wait=60, headers=headers).status_code == 200
    service.app.state.service.close()
    found = ours(spans)
    (asked,) = (span for span in found if span.name == "POST /v1/plans")
    (worked,) = (span for span in found if span.name == "job plan")
    assert asked.attributes is not None
    assert asked.attributes["http.response.status_code"] == 200
    # Over the spans that the framework makes in between.
    parents = {span.context.span_id: span.parent for span in found if span.context}
    assert worked.parent is not None
    assert worked.parent.span_id in parents
    assert worked.context is not None
    phases = [
        span for span in found if span.parent and span.parent.span_id == worked.context.span_id
    ]
    assert [span.name for span in phases] == JOB_PHASES
    ends = [(span.start_time or 0, span.end_time or 0) for span in phases]
    # One after the other, from the start of the job to its end.
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    of_request = [
        span.name for span in found if span.name in ("parse", "wait") and span not in phases
    ]
    assert of_request == ["parse", "wait"]
    (request,) = logged("request")
    (job,) = logged("job_finished")
    for line in (request, job):
        assert (line["trace_id"], line["request_id"]) == (TRACE, "mine")
        assert line["project"] == "default"
    assert request["job_id"] == job["job_id"]
    assert (request["status"], job["outcome"]) == (200, "succeeded")
    assert {"parse", "store", "wait"} <= request["phases"].keys()
    assert list(job["phases"]) == JOB_PHASES
    assert sum(request["phases"].values()) <= request["seconds"] + 0.01
    assert sum(job["phases"].values()) == pytest.approx(job["seconds"], abs=0.05)


@pytest.mark.parametrize("name", ["hang", "crash"])
def test_a_job_that_does_not_end_well_has_its_phases_too(
    start_service: Any,
    graph: bytes,
    program: Any,
    name: str,
    logged: Callable[[str], list[dict[str, Any]]],
) -> None:
    service = start_service(executor=program(name), max_job_seconds=1, max_attempts=1)
    assert service.post(graph, wait=60).status_code in (500, 504)
    service.app.state.service.close()
    (job,) = logged("job_finished")
    assert job["outcome"] in ("failed", "crashed")
    assert job["phases"]["parse"] > 0
