"""Figures for Prometheus: what this process counts, and what the store says when asked.

Where PROMETHEUS_MULTIPROC_DIR names a folder, the processes of one host count together.
Labels have few values: routes, never paths; states, never jobs.
"""

import os

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    multiprocess,
)

from autoshard_server.kinds import JobKind
from autoshard_server.service import Service, versions
from autoshard_server.store import GRAPHS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)

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


def exposition(service: Service) -> bytes:
    """All figures as text; asks the store, so call it from a thread."""
    text = generate_latest(_counted())
    return text + generate_latest(_asked(service))


def _counted() -> CollectorRegistry:
    """What processes count: this one, or all of this host."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return _registry
    together = CollectorRegistry()
    multiprocess.MultiProcessCollector(together)  # type: ignore[no-untyped-call]
    return together


def _asked(service: Service) -> CollectorRegistry:
    """What the store knows; it is the same whichever process is asked."""
    registry = CollectorRegistry()
    jobs = Gauge("autoshard_jobs", "Jobs that are remembered.", ("state",), registry=registry)
    for state, number in service.jobs.count().items():
        jobs.labels(state.value).set(number)
    entries = Gauge("autoshard_cache_entries", "Entries kept.", ("namespace",), registry=registry)
    room = Gauge(
        "autoshard_cache_stored_bytes", "Room of entries.", ("namespace",), registry=registry
    )
    for namespace in (*(kind.namespace for kind in JobKind), GRAPHS, "blocks", "rules"):
        held = service.cache.stats(namespace)
        entries.labels(namespace).set(held.num_entries)
        room.labels(namespace).set(held.nbytes)
    ready = Gauge("autoshard_draining", "1 while shutting down.", registry=registry)
    ready.set(int(service.draining))
    build = Gauge("autoshard_build_info", "Always 1.", tuple(versions()), registry=registry)
    build.labels(*versions().values()).set(1)
    return registry
