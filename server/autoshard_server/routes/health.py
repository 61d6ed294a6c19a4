"""Health, version and Prometheus metrics of the service."""

import time
from collections.abc import Iterable
from functools import partial

import anyio.to_thread
from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from autoshard_server.http.auth import Scraper
from autoshard_server.http.documents import Alive, Versions
from autoshard_server.http.parameters import ServiceParameter
from autoshard_server.http.specification import describe, problem_answers
from autoshard_server.limits import LIMITS, limit_name
from autoshard_server.problems import ProblemType
from autoshard_server.projects import split_namespace
from autoshard_server.service import Service, versions
from autoshard_server.store.artifacts import GRAPHS
from autoshard_server.store.jobs import JobClass, JobKind
from autoshard_server.telemetry import process_metrics
from autoshard_solver_cache import Usage

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_NAMESPACES = (*(kind.namespace for kind in JobKind), GRAPHS, "blocks", "rules")

router = APIRouter(tags=["health"])


@router.get("/livez")
async def livez() -> Alive:
    """Check that the process is alive; nothing else is checked."""
    return Alive()


@router.get("/readyz", responses=problem_answers(ProblemType.UNAVAILABLE))
async def readyz(service: ServiceParameter) -> Alive:
    """Check that requests can be served: the workers, the database and its migrations."""
    await service.check()
    return Alive()


@router.get("/version")
async def get_version() -> Versions:
    """Versions of the service and of the packages that plans depend on."""
    return Versions(versions=versions())


@router.get(
    "/metrics",
    response_class=Response,
    **describe(
        answers={200: ("Metrics.",)}, content={"text/plain": {"schema": {"type": "string"}}}
    ),
)
async def get_metrics(service: ServiceParameter, _caller: Scraper) -> Response:
    """Prometheus metrics: requests, durations, jobs by state, contents of the cache."""
    text = await anyio.to_thread.run_sync(partial(service_metrics, service))
    return Response(text, media_type=METRICS_TYPE)


def service_metrics(service: Service) -> bytes:
    """All metrics of a service as text; reads the database."""
    jobs = GaugeMetricFamily("autoshard_jobs", "Stored jobs.", labels=["state"])
    for state, number in service.jobs.count().items():
        jobs.add_metric([state.value], number)
    labels = ["namespace", "project"]
    entries = GaugeMetricFamily("autoshard_cache_entries", "Entries.", labels=labels)
    nbytes = GaugeMetricFamily(
        "autoshard_cache_stored_bytes", "Stored bytes of entries.", labels=labels
    )
    for stored, usage in {**dict.fromkeys(_NAMESPACES, Usage()), **service.cache.usage()}.items():
        project, namespace = split_namespace(stored)
        entries.add_metric([namespace, project], usage.num_entries)
        nbytes.add_metric([namespace, project], usage.nbytes)
    draining = GaugeMetricFamily(
        "autoshard_draining", "1 while shutting down.", value=int(service.draining)
    )
    waiting = GaugeMetricFamily(
        "autoshard_oldest_queued_job_seconds",
        "Seconds for which the oldest queued job has waited; 0 if none is queued.",
        labels=["class"],
    )
    oldest, now = service.jobs.oldest_queued(), time.time()
    for job_class in JobClass:
        age = max(0.0, now - oldest[job_class]) if job_class in oldest else 0.0
        waiting.add_metric([job_class.value], age)
    limits = GaugeMetricFamily("autoshard_limit", "Values of the limits.", labels=["limit", "of"])
    for setting, kind in LIMITS.items():
        limits.add_metric([limit_name(setting), kind], getattr(service.settings, setting))
    return metrics_text([jobs, waiting, entries, nbytes, draining, limits])


def metrics_text(families: list[GaugeMetricFamily]) -> bytes:
    """The metrics of processes and some gauges, as text."""
    found = versions()
    build = GaugeMetricFamily("autoshard_build_info", "Always 1.", labels=list(found))
    build.add_metric(list(found.values()), 1)
    registry = CollectorRegistry()
    registry.register(_Families([*families, build]))
    return generate_latest(process_metrics()) + generate_latest(registry)


class _Families(Collector):
    """Gauges that are computed for each scrape.

    If processes share their metrics, gauges of `prometheus_client` would be exported once for each
    process, also after its end.
    """

    def __init__(self, families: Iterable[GaugeMetricFamily]) -> None:
        self._families = families

    def collect(self) -> Iterable[GaugeMetricFamily]:
        return self._families
