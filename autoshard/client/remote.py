"""Requests sent to a planning service, over its REST API."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote
from uuid import uuid4

import httpx2
import zstandard
from httpx2 import codes
from pydantic import ValidationError

from autoshard import report
from autoshard.base.schemas import type_adapter
from autoshard.client.local import Local
from autoshard.client.transport import (
    Failures,
    Request,
    Transport,
    get,
    post,
    read_json,
    retry_after,
)
from autoshard.errors import RequestRejectedError, ServiceError, ServiceUnavailableError
from autoshard.mesh import Topology, topology_to_json
from autoshard.plan import Plan
from autoshard.requests.kept_plans import Offline, OfflinePlans, require_plan
from autoshard.requests.models import (
    GraphRequest,
    MeshSearchRequest,
    OperatorCoverageRequest,
    PlanRequest,
)
from autoshard.requests.results import (
    JobProgress,
    JobStatus,
    MeshSearch,
    OnProgress,
    PlanEntry,
    PlanResult,
    SearchResult,
    Validation,
    read_job,
)

if TYPE_CHECKING:
    from autoshard.solve import CancelToken

T = TypeVar("T")

PLANS = "/v1/plans"

_MAX_PLANS = 4
"""Number of plans kept in memory; that of a large model takes some megabytes."""

_PAGE_SIZE = 100

_PREFER_WAIT = 10
"""Seconds that the service may keep a request open until its job is done, to save polling."""

_EXPORT_WAIT = 180
"""Seconds that the service may take in addition to make the graph of a config."""

_MAX_LOST_JOBS = 2
"""Number of times that a job which the service has forgotten is requested again."""

_POLL = 1.0
"""Seconds between polls of a job, if the service sends no Retry-After."""

_MAX_BROKEN_STREAMS = 3
"""Number of event streams in a row that break before the first event; then the job is polled."""

_COMPRESSION_LIMIT = 0.9
"""Archives are compressed already: they are sent as they are unless zstd makes them smaller."""

_NOT_THERE = frozenset({404, 405})
"""Statuses of a resource, or a route, that does not exist."""

_NO_STREAMS = frozenset({404, 405, 406, 501})
"""Statuses of a service without event streams."""

_OCTETS = {"Content-Type": "application/octet-stream"}


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Submitted:
    """The outcome of a request about a graph.

    Attributes:
        response: of the service.
        job: the job that runs it; None if the response has the result.
        cached: true if the result was known before this request.
    """

    response: httpx2.Response
    job: JobStatus | None
    cached: bool

    @property
    def document(self) -> Any:
        """The result as JSON; None if the job is not done."""
        return read_json(self.response) if self.job is None else self.job.result


class Remote:
    """Sends requests to a service; has the methods of `Local`.

    Args:
        transport: to the service.
        kept: store of plans on this machine; None stores none.
        fallback: runs requests if the service cannot be reached and no plan is stored.
    """

    def __init__(
        self, transport: Transport, kept: OfflinePlans | None, fallback: Local | None
    ) -> None:
        self._transport = transport
        self._kept = kept
        self._fallback = fallback
        self._plans: dict[str, Plan] = {}
        self._accepts_zstd = True

    async def plan(
        self,
        request: PlanRequest,
        on_progress: OnProgress | None,
        *,
        offline: Offline,
        wait: bool = True,
        stop: "CancelToken | None" = None,
    ) -> PlanResult:
        """Request a plan; if the service cannot be reached, use a kept one or the fallback.

        Raises:
            RequestRejectedError: the service refused.
            ServiceUnavailableError: it cannot be reached, and nothing else has the plan.
        """
        kept = self._kept
        if offline == "only":
            return await self._transport.run(lambda: require_plan(kept, request))
        try:
            result = await self._lookup(request)
            if result is None:
                done = await self._submit(PLANS, request, on_progress, wait=wait)
                result = self._plan_result(done)
        except ServiceUnavailableError as error:
            if offline == "fallback" and kept is not None:
                plan = await self._transport.run(lambda: kept.find(request))
                if plan is not None:
                    _warn_offline(plan, error)
                    return PlanResult(plan, cached=True, source="offline")
            return await self._fall_back(error).plan(request, on_progress, stop=stop)
        await self._keep(result.plan, request)
        return result

    async def search(
        self,
        request: MeshSearchRequest,
        on_progress: OnProgress | None,
        *,
        wait: bool = True,
        stop: "CancelToken | None" = None,
    ) -> SearchResult:
        """Request the best mesh.

        Raises:
            RequestRejectedError: the service refused.
            ServiceUnavailableError: it cannot be reached, and there is no fallback.
        """
        try:
            done = await self._submit("/v1/searches", request, on_progress, wait=wait)
        except ServiceUnavailableError as error:
            return await self._fall_back(error).search(request, on_progress, stop=stop)
        search = None if done.document is None else _read(MeshSearch, done.document)
        return SearchResult(search, done.cached, done.job.id if done.job else None)

    async def validate(self, request: PlanRequest) -> Validation:
        """Request a validation; raises as `search`."""
        try:
            done = await self._submit(PLANS, request, more={"validate_only": True})
        except ServiceUnavailableError as error:
            return await self._fall_back(error).validate(request)
        return _read(Validation, done.document)

    async def coverage(self, request: OperatorCoverageRequest) -> "report.Coverage":
        """Request the operators that can be sharded; raises as `search`."""
        try:
            done = await self._submit("/v1/operators:coverage", request)
        except ServiceUnavailableError as error:
            return await self._fall_back(error).coverage(request)
        return _read(report.Coverage, done.document)

    async def get_plan(self, plan_id: str, *, offline: Offline = "fallback") -> Plan:
        """Return a plan of the service; if that cannot be reached, a kept one.

        Raises:
            RequestRejectedError: there is none.
            ServiceUnavailableError: the service cannot be reached, and the plan is not kept.
        """
        plan = self._plans.get(plan_id)
        if plan is None and offline == "only" and self._kept is not None:
            plan = await self._transport.run(partial(self._kept.get, plan_id))
            if plan is None:
                raise ServiceUnavailableError(f"no plan {plan_id} is kept on this machine")
        if plan is None:
            plan = await self._fetch_plan(plan_id, use_kept=offline != "never")
        self._remember(plan)
        return plan

    async def get_job(self, job_id: str) -> JobStatus:
        """As `Client.get_job`."""
        return read_job(read_json(await self._transport.send(get(f"/v1/jobs/{job_id}"))))

    async def wait_for_job(self, job_id: str, on_progress: OnProgress | None) -> JobStatus:
        """Wait until a job is done.

        Raises:
            RequestRejectedError: it is unknown.
            ServiceUnavailableError: the service cannot be reached.
        """
        job = await self.get_job(job_id)
        return await JobFollower(self._transport, job, on_progress).wait()

    async def cancel(self, job_id: str) -> JobStatus:
        """As `Client.cancel`."""
        response = await self._transport.send(Request("POST", f"/v1/jobs/{job_id}:cancel"))
        return read_job(read_json(response))

    async def delete_plan(self, plan_id: str) -> None:
        """As `Client.delete_plan`."""
        self._plans.pop(plan_id, None)
        kept = self._kept
        if kept is not None:
            await self._transport.run(lambda: kept.delete(plan_id))
        await self._transport.send(Request("DELETE", f"{PLANS}/{plan_id}"))

    async def delete_job(self, job_id: str) -> None:
        """As `Client.delete_job`."""
        await self._transport.send(Request("DELETE", f"/v1/jobs/{job_id}"))

    async def delete_graph(self, graph_sha256: str) -> None:
        """As `Client.delete_graph`."""
        await self._transport.send(Request("DELETE", f"/v1/graphs/{graph_sha256}"))

    async def request(self, request: Request, kind: type[T], *, waiting: bool) -> T:
        """Return the result of a request, after waiting for its job if it needs one.

        Args:
            request: an idempotent one.
            kind: type of the result; a `str` is the text of the response.
            waiting: as in `Transport.send`.

        Raises:
            RequestRejectedError: the service refused, or the job failed.
            ServiceUnavailableError: the service cannot be reached.
            ServiceError: the response has another type.
        """
        response = await self._transport.send(request, waiting=waiting)
        if response.status_code == codes.ACCEPTED:
            job = await self._follow(response, None)
            job.check()
            return _read(kind, job.result)
        result = response.content.decode() if kind is str else read_json(response)
        return _read(kind, result)

    async def list_plans(
        self, *, graph_digest: str | None = None, limit: int = 100
    ) -> tuple[PlanEntry, ...]:
        """As `Client.list_plans`."""
        return _read(
            tuple[PlanEntry, ...], await self._list("plans", limit, graph_digest=graph_digest)
        )

    async def list_jobs(
        self, *, states: Sequence[str] = (), limit: int = 100
    ) -> tuple[JobStatus, ...]:
        """As `Client.list_jobs`."""
        found = await self._list("jobs", limit, state=list(states) or None)
        return tuple(read_job(entry) for entry in found)

    async def list_topologies(self) -> tuple[str, ...]:
        """As `Client.list_topologies`."""
        document = read_json(await self._transport.send(get("/v1/topologies")))
        return _read(tuple[str, ...], document["topologies"])

    async def get_topology(self, name: str) -> Topology:
        """As `Client.get_topology`."""
        response = await self._transport.send(get(_topology_path(name)))
        return _read(Topology, read_json(response))

    async def put_topology(self, topology: Topology) -> None:
        """As `Client.put_topology`."""
        body = topology_to_json(topology, indent=None).encode()
        headers = {"Content-Type": "application/json"}
        await self._transport.send(Request("PUT", _topology_path(topology.name), headers, body))

    async def delete_topology(self, name: str) -> None:
        """As `Client.delete_topology`."""
        await self._transport.send(Request("DELETE", _topology_path(name)))

    async def health(self) -> dict[str, str]:
        """As `Client.health`."""
        await self._transport.send_once(get("/readyz"))
        response = await self._transport.send_once(get("/version"))
        return dict(read_json(response)["versions"])

    async def _lookup(self, request: PlanRequest) -> PlanResult | None:
        """Return the plan of an earlier request that was the same; the graph is not sent."""
        try:
            lookup = post(f"{PLANS}:lookup", request.named_document)
            found = read_json(await self._transport.send(lookup))
            plan = await self.get_plan(str(found["id"]), offline="never")
        except RequestRejectedError as error:
            if error.status not in _NOT_THERE:
                raise
            return None
        except (KeyError, TypeError) as error:
            raise ServiceError(f"the service's response has no 'id': {error!r}") from error
        return PlanResult(plan, cached=True)

    def _plan_result(self, done: _Submitted) -> PlanResult:
        if done.job is not None:
            return PlanResult(done.job.plan, done.cached, done.job.id)
        plan = Plan.from_json(done.response.content)
        if "ETag" in done.response.headers:
            self._remember(plan)
        return PlanResult(plan, done.cached)

    async def _submit(
        self,
        path: str,
        request: GraphRequest,
        on_progress: OnProgress | None = None,
        *,
        more: Mapping[str, Any] | None = None,
        wait: bool = True,
    ) -> _Submitted:
        """Send a request about a graph, and wait for its job.

        Args:
            path: of the route.
            request: with the graph.
            on_progress: called with the progress of the job.
            more: members of the document in addition to those of the request.
            wait: false to return immediately if the result needs a job.

        Raises:
            RequestRejectedError: the service refused, or the job failed or was cancelled.
            ServiceUnavailableError: it cannot be reached, or is too busy.
        """
        document = {**request.named_document, **(more or {})}
        # With a progress listener, the service responds immediately, so that progress is reported.
        wait_seconds = _PREFER_WAIT if wait and on_progress is None else 0
        lost = 0
        while True:
            response = await self._post(path, request, document, wait_seconds, waiting=wait)
            cached = response.headers.get("Autoshard-Cache") == "hit"
            if response.status_code != codes.ACCEPTED:
                return _Submitted(response, None, cached)
            if not wait:
                return _Submitted(response, read_job(read_json(response)), cached)
            try:
                job = await self._follow(response, on_progress)
            except RequestRejectedError as error:
                if error.status not in _NOT_THERE or lost == _MAX_LOST_JOBS:
                    raise
                # A service that keeps jobs in memory loses them when it restarts.
                _log.warning("the service has lost the job; requesting it again")
                lost += 1
            else:
                job.check()
                return _Submitted(response, job, cached)

    async def _post(
        self,
        path: str,
        request: GraphRequest,
        document: Mapping[str, Any],
        wait_seconds: int,
        *,
        waiting: bool,
    ) -> httpx2.Response:
        """Send a document that names its graph by digest; upload the graph if it is unknown."""
        headers = {"Prefer": f"wait={wait_seconds}", "Idempotency-Key": uuid4().hex}
        extra = wait_seconds + (_EXPORT_WAIT if request.of_config else 0)
        submission = post(path, document, headers=headers, extra_timeout=extra)
        try:
            return await self._transport.send(submission, waiting=waiting)
        except RequestRejectedError as error:
            if error.status != codes.NOT_FOUND or request.of_config:
                raise
        await self._upload(request, waiting=waiting)
        return await self._transport.send(submission, waiting=waiting)

    async def _upload(self, request: GraphRequest, *, waiting: bool) -> None:
        """Store a graph under its digest, compressed if that makes it smaller."""
        path, graph = f"/v1/graphs/{request.graph_sha256}", request.graph
        if self._accepts_zstd:
            small = await self._transport.run(lambda: zstandard.ZstdCompressor().compress(graph))
            if len(small) < _COMPRESSION_LIMIT * len(graph):
                headers = {**_OCTETS, "Content-Encoding": "zstd"}
                try:
                    await self._transport.send(
                        Request("PUT", path, headers, small), waiting=waiting
                    )
                except RequestRejectedError as error:
                    if error.status != codes.UNSUPPORTED_MEDIA_TYPE:
                        raise
                    self._accepts_zstd = False
                else:
                    return
        await self._transport.send(Request("PUT", path, _OCTETS, graph), waiting=waiting)

    async def _follow(self, response: httpx2.Response, on_progress: OnProgress | None) -> JobStatus:
        """Wait until the job of a response is done."""
        job = read_job(read_json(response))
        follower = JobFollower(self._transport, job, on_progress)
        return await follower.wait(retry_after(response) or 0.0)

    async def _list(self, collection: str, limit: int, **query: Any) -> list[Any]:
        """Return at most `limit` entries of a collection, from as many pages as needed."""
        found: list[Any] = []
        token: str | None = None
        while len(found) < limit:
            size = min(limit - len(found), _PAGE_SIZE)
            request = get(f"/v1/{collection}", page_size=size, page_token=token, **query)
            page = read_json(await self._transport.send(request))
            found += page[collection]
            token = page["next_page_token"]
            if not token:
                break
        return found

    def _fall_back(self, error: ServiceUnavailableError) -> Local:
        """Return the fallback; raise the error if there is none."""
        if self._fallback is None:
            raise error
        _log.warning("%s; continuing in this process", error)
        return self._fallback

    async def _fetch_plan(self, plan_id: str, *, use_kept: bool) -> Plan:
        kept = self._kept
        try:
            response = await self._transport.send(get(f"{PLANS}/{plan_id}"))
        except ServiceUnavailableError as error:
            if not use_kept or kept is None:
                raise
            found = await self._transport.run(lambda: kept.get(plan_id))
            if found is None:
                raise
            _warn_offline(found, error)
            return found
        plan = Plan.from_json(response.content)
        if plan.id != plan_id:
            raise ServiceError(f"requested the plan {plan_id}, the service sent {plan.id}")
        await self._keep(plan)
        return plan

    def _remember(self, plan: Plan) -> None:
        """Keep a plan in memory: it never changes under its id."""
        self._plans.pop(plan.id, None)
        self._plans[plan.id] = plan
        while len(self._plans) > _MAX_PLANS:
            self._plans.pop(next(iter(self._plans)), None)

    async def _keep(self, plan: Plan | None, request: PlanRequest | None = None) -> None:
        """Keep a plan on this machine."""
        kept = self._kept
        if kept is not None and plan is not None:
            await self._transport.run(lambda: kept.keep(plan, request))


class JobFollower:
    """Follows a job through lost connections and restarts of the service.

    Progress comes from the job's event stream if the service has one, else from polling.

    Args:
        transport: to the service.
        job: its latest known state.
        on_progress: called with each progress report.
    """

    def __init__(
        self, transport: Transport, job: JobStatus, on_progress: OnProgress | None
    ) -> None:
        self._transport = transport
        self._job = job
        self._on_progress = on_progress
        self._has_streams = True
        self._last_event = ""
        self._num_broken = 0
        self._started: datetime | None = None

    async def wait(self, pause: float = 0.0) -> JobStatus:
        """Wait until the job is done.

        Args:
            pause: seconds before the first poll, if there are no events.

        Raises:
            RequestRejectedError: the job is unknown to the service.
            ServiceUnavailableError: the service cannot be reached for too long.
        """
        failures = Failures(self._transport.retry, waiting=True)
        while not self._job.done:
            # A broken stream does not count as an outage: only a failed poll does.
            is_broken = await self._stream()
            try:
                if not self._has_streams:
                    await self._transport.sleep(pause)
                pause = await self._poll()
            except ServiceUnavailableError as error:
                await self._transport.sleep(failures.delay(error))
                continue
            failures.reset()
            self._num_broken += is_broken
            if self._num_broken == _MAX_BROKEN_STREAMS:
                self._has_streams = False
            if self._has_streams and not self._job.done:
                # The service ended the stream before the job was done: it is shutting down.
                await self._transport.sleep(pause)
        return self._job

    async def _poll(self) -> float:
        """Request the job's state; return the seconds until the next poll."""
        response = await self._transport.send_once(get(f"/v1/jobs/{self._job.id}"))
        self._job = read_job(read_json(response))
        if not self._has_streams:
            await self._report(self._job.progress)
        requested = retry_after(response)
        return _POLL if requested is None else requested

    async def _stream(self) -> bool:
        """Read the event stream to its end; return true if it broke instead."""
        if not self._has_streams:
            return False
        headers = {"Last-Event-ID": self._last_event} if self._last_event else {}
        path = f"/v1/jobs/{self._job.id}/events"
        try:
            async with aclosing(self._transport.events(path, headers)) as events:
                async for event in events:
                    self._last_event = event.id or self._last_event
                    self._num_broken = 0
                    progress = self._read_event(event)
                    if progress is not None:
                        await self._report(progress)
        except RequestRejectedError as error:
            if error.status not in _NO_STREAMS:
                raise
            self._has_streams = False
        except (httpx2.SSEError, httpx2.ReadTimeout):
            # The response is not an event stream, or a proxy buffers it.
            self._has_streams = False
        except (httpx2.TransportError, ServiceUnavailableError):
            return True
        return False

    def _read_event(self, event: httpx2.ServerSentEvent) -> JobProgress | None:
        """Read the progress of an event; None for events of later versions of the service."""
        try:
            document: Any = event.json()
            data, moment = document["data"], datetime.fromisoformat(document["created_at"])
            if data.get("state") == "running" or self._started is None:
                self._started = moment
            elapsed = max(0.0, (moment - self._started).total_seconds())
            return JobProgress.model_validate(
                {"phase": data.get("state", ""), **data, "elapsed": elapsed}
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    async def _report(self, progress: JobProgress) -> None:
        if self._on_progress is not None:
            await self._transport.notify(self._on_progress, progress)


def _topology_path(name: str) -> str:
    return f"/v1/topologies/{quote(name, safe='')}"


def _read(kind: type[T], document: Any) -> T:
    try:
        return type_adapter(kind).validate_python(document)
    except ValidationError as error:
        raise ServiceError(f"the service's response cannot be read: {error}") from error


def _warn_offline(plan: Plan, error: ServiceUnavailableError) -> None:
    _log.warning("%s; using the plan %s that is kept on this machine", error, plan.id)
