"""Figures for Prometheus: what processes count, and what the store says when asked."""

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from autoshard_server.answering.service import Service, versions
from autoshard_server.jobs.kinds import JobKind
from autoshard_server.solvers.workers import Workers
from autoshard_server.store import GRAPHS
from autoshard_server.telemetry.figures import counted

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(service: Service) -> bytes:
    """All figures as text; asks the store, so call it from a thread."""
    text = generate_latest(counted())
    return text + generate_latest(_asked(service))


def worker_exposition(workers: Workers) -> bytes:
    """What a worker on its own counts; what is in the store, services tell."""
    registry = CollectorRegistry()
    alive = Gauge("autoshard_worker_alive", "1 while jobs can be done here.", registry=registry)
    alive.set(int(workers.alive))
    _add_versions(registry)
    return generate_latest(counted()) + generate_latest(registry)


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
    _add_versions(registry)
    return registry


def _add_versions(registry: CollectorRegistry) -> None:
    build = Gauge("autoshard_build_info", "Always 1.", tuple(versions()), registry=registry)
    build.labels(*versions().values()).set(1)
