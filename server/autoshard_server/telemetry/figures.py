"""Figures for Prometheus that this process counts.

Where PROMETHEUS_MULTIPROC_DIR names a folder, the processes of one host count together.
Labels have few values: routes, never paths; kinds, never jobs.
"""

import os

from prometheus_client import CollectorRegistry, Counter, Histogram, multiprocess

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)

_LONG = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 180.0, 600.0, 1800.0, 3600.0, 7200.0)

_registry = CollectorRegistry()

requests_total = Counter(
    "autoshard_http_requests",
    "Requests that were answered.",
    ("method", "route", "status"),
    registry=_registry,
)
request_seconds = Histogram(
    "autoshard_http_request_duration_seconds",
    "From a request's first byte to its answer's last one.",
    ("method", "route"),
    buckets=_SHORT,
    registry=_registry,
)
results_total = Counter(
    "autoshard_results",
    "Requests for a result, by whether it was there before.",
    ("kind", "cache"),
    registry=_registry,
)
job_seconds = Histogram(
    "autoshard_job_duration_seconds",
    "From a worker's claim of a job to what became of it there: known, succeeded, failed, crashed, "
    "withdrawn or released.",
    ("kind", "outcome"),
    buckets=_LONG,
    registry=_registry,
)


def counted() -> CollectorRegistry:
    """What processes count: this one, or all of this host."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return _registry
    together = CollectorRegistry()
    multiprocess.MultiProcessCollector(together)  # type: ignore[no-untyped-call]
    return together
