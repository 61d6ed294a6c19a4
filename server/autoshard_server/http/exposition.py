"""Figures for Prometheus: what processes count, and what the store says when asked."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from autoshard_server.answering.service import Service, versions
from autoshard_server.jobs.kinds import JobKind
from autoshard_server.solvers.workers import Workers
from autoshard_server.store import GRAPHS
from autoshard_server.telemetry.figures import counted

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(service: Service) -> bytes:
    """All figures as text; asks the store, so call it from a thread."""
    ending = _gauge("autoshard_draining", "1 while shutting down.", int(service.draining))
    return _text([*_asked(service), ending, _versions()])


def worker_exposition(workers: Workers) -> bytes:
    """What a worker on its own counts; what is in the store, services tell."""
    alive = _gauge("autoshard_worker_alive", "1 while jobs can be done here.", int(workers.alive))
    return _text([alive, _versions()])


def _asked(service: Service) -> Iterator[GaugeMetricFamily]:
    """What the store knows; it is the same whichever process is asked."""
    jobs = GaugeMetricFamily("autoshard_jobs", "Jobs that are remembered.", labels=["state"])
    for state, number in service.jobs.count().items():
        jobs.add_metric([state.value], number)
    entries = GaugeMetricFamily("autoshard_cache_entries", "Entries kept.", labels=["namespace"])
    room = GaugeMetricFamily(
        "autoshard_cache_stored_bytes", "Room of entries.", labels=["namespace"]
    )
    for namespace in (*(kind.namespace for kind in JobKind), GRAPHS, "blocks", "rules"):
        held = service.cache.stats(namespace)
        entries.add_metric([namespace], held.num_entries)
        room.add_metric([namespace], held.nbytes)
    yield from (jobs, entries, room)


def _versions() -> GaugeMetricFamily:
    found = versions()
    build = GaugeMetricFamily("autoshard_build_info", "Always 1.", labels=list(found))
    build.add_metric(list(found.values()), 1)
    return build


def _gauge(name: str, meaning: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, meaning, value=value)


class _Told(Collector):
    """Families that are made when somebody asks.

    Where processes count together, gauges that the client keeps would be shown once more for
    each of them, and outlive them.
    """

    def __init__(self, families: Iterable[GaugeMetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterable[GaugeMetricFamily]:
        return self._families


def _text(families: list[GaugeMetricFamily]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Told(families))
    return generate_latest(counted()) + generate_latest(registry)
