"""Conversations with a service."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

from httpx2 import codes
from pydantic import TypeAdapter, ValidationError

from autoshard.client.asked import Asked, AskedCoverage, AskedSearch
from autoshard.client.effects import Conversation, OnProgress, Send, work
from autoshard.client.following import Follower, finished
from autoshard.client.link import Link, document_of, get, member, post
from autoshard.client.local import Local
from autoshard.client.offline import OfflinePlans
from autoshard.client.orders import NOT_THERE, PLANS, Orders
from autoshard.client.results import (
    JobStatus,
    MeshSearch,
    PlanEntry,
    PlanResult,
    SearchResult,
    Validation,
    read_job,
)
from autoshard.client.talk import Offline, Talk
from autoshard.errors import RequestRejectedError, ServiceError, ServiceUnavailableError
from autoshard.mesh import Topology, topology_to_json
from autoshard.plan import Coverage, Plan, PlanDifference
from autoshard.planner import Explanation

T = TypeVar("T")

_MOST_PLANS = 4
"""Plans that a client keeps in memory; one of a large model takes some megabytes."""

_PAGE = 100
"""Entries of a page that are asked for at once."""

_EXPLANATION = TypeAdapter(Explanation)
_ENTRIES = TypeAdapter(tuple[PlanEntry, ...])
_DIFFERENCE = TypeAdapter(PlanDifference)
_SEARCH = TypeAdapter(MeshSearch)
_VALIDATION = TypeAdapter(Validation)
_COVERAGE = TypeAdapter(Coverage)
_NAMES = TypeAdapter(tuple[str, ...])
_TOPOLOGY = TypeAdapter(Topology)

_log = logging.getLogger(__name__)


class Remote(Talk):
    """Asks a service.

    Args:
        link: to the service.
        kept: plans on this machine; None where none are kept.
        fallback: who answers where the service is not there and no plan is kept.
    """

    def __init__(
        self, link: Link, kept: OfflinePlans | None = None, fallback: Local | None = None
    ) -> None:
        super().__init__(kept)
        self._link = link
        self._fallback = fallback
        self._plans: dict[str, Plan] = {}
        self._orders = Orders(link)

    def answer(
        self,
        asked: Asked,
        on_progress: OnProgress | None = None,
        *,
        offline: Offline = "never",
        wait: bool = True,
    ) -> Conversation[PlanResult]:
        """As `Talk.answer`."""
        try:
            result = yield from self._from_service(asked, on_progress, wait=wait)
        except ServiceUnavailableError as error:
            if offline == "fallback" and (plan := (yield from self._find_kept(asked))) is not None:
                _warn_offline(plan, error)
                return PlanResult(plan, cached=True, source="offline")
            if self._fallback is None:
                raise
            _log.warning("%s; planning in this process", error)
            return (yield from self._fallback.answer(asked, on_progress))
        yield from self._keep_offline(result.plan, asked)
        return result

    def answer_search(
        self, asked: AskedSearch, on_progress: OnProgress | None = None, *, wait: bool = True
    ) -> Conversation[SearchResult]:
        """As `Talk.answer_search`."""

        def ask() -> Conversation[SearchResult]:
            placed = yield from self._orders.place("/v1/searches", asked, on_progress, wait=wait)
            found = None if placed.document is None else _read(_SEARCH, placed.document)
            return SearchResult(found, placed.cached, placed.job.id if placed.job else None)

        return (yield from self._or_here(ask, lambda here: here.answer_search(asked, on_progress)))

    def answer_validation(self, asked: Asked) -> Conversation[Validation]:
        """As `Talk.answer_validation`."""

        def ask() -> Conversation[Validation]:
            placed = yield from self._orders.place(PLANS, asked, more={"validate_only": True})
            return _read(_VALIDATION, placed.document)

        return (yield from self._or_here(ask, lambda here: here.answer_validation(asked)))

    def answer_coverage(self, asked: AskedCoverage) -> Conversation[Coverage]:
        """As `Talk.answer_coverage`."""

        def ask() -> Conversation[Coverage]:
            placed = yield from self._orders.place("/v1/operators:coverage", asked)
            return _read(_COVERAGE, placed.document)

        return (yield from self._or_here(ask, lambda here: here.answer_coverage(asked)))

    def get_plan(self, plan_id: str, *, offline: Offline = "fallback") -> Conversation[Plan]:
        """As `Talk.get_plan`."""
        plan = self._plans.get(plan_id)
        if plan is None:
            plan = yield from self._read_plan(plan_id, offline)
        self._keep(plan)
        return plan

    def get_job(self, job_id: str) -> Conversation[JobStatus]:
        """As `Talk.get_job`."""
        answer = yield from self._link.send(get(f"/v1/jobs/{job_id}"))
        return read_job(document_of(answer))

    def wait_for_job(
        self, job_id: str, *, on_progress: OnProgress | None = None
    ) -> Conversation[Plan]:
        """As `Talk.wait_for_job`."""
        job = yield from self.get_job(job_id)
        job = yield from Follower(self._link, job, on_progress).until_done()
        return job.get_plan()

    def wait_for_search(
        self, job_id: str, *, on_progress: OnProgress | None = None
    ) -> Conversation[MeshSearch]:
        """As `Talk.wait_for_search`."""
        job = yield from self.get_job(job_id)
        job = yield from Follower(self._link, job, on_progress).until_done()
        return job.get_search()

    def cancel(self, job_id: str) -> Conversation[JobStatus]:
        """As `Talk.cancel`."""
        answer = yield from self._link.send(Send("POST", f"/v1/jobs/{job_id}:cancel"))
        return read_job(document_of(answer))

    def explain(
        self, plan_id: str, name: str, *, value: bool = False, time_limit: float = 60.0
    ) -> Conversation[Explanation]:
        """As `Talk.explain`."""
        request = get(
            f"/v1/plans/{plan_id}/explain",
            name=name,
            value="true" if value else None,
            time_limit=time_limit,
        )
        document = yield from self._made(request)
        return _read(_EXPLANATION, document)

    def compare(self, before: str, after: str) -> Conversation[PlanDifference]:
        """As `Talk.compare`."""
        answer = yield from self._link.send(
            post("/v1/plans:diff", {"before": before, "after": after})
        )
        return _read(_DIFFERENCE, document_of(answer))

    def export(self, plan_id: str, target: str) -> Conversation[str]:
        """As `Talk.export`."""
        answer = yield from self._link.send(get(f"/v1/plans/{plan_id}/export", to=target))
        return answer.body.decode()

    def list_plans(
        self, *, graph_digest: str | None = None, most: int = 100
    ) -> Conversation[tuple[PlanEntry, ...]]:
        """As `Talk.list_plans`."""
        found = yield from self._listed("plans", most, graph_digest=graph_digest)
        return _read(_ENTRIES, found)

    def list_jobs(
        self, *, states: Sequence[str] = (), most: int = 100
    ) -> Conversation[tuple[JobStatus, ...]]:
        """As `Talk.list_jobs`."""
        found = yield from self._listed("jobs", most, state=list(states) or None)
        return tuple(read_job(entry) for entry in found)

    def list_topologies(self) -> Conversation[tuple[str, ...]]:
        """As `Talk.list_topologies`."""
        answer = yield from self._link.send(get("/v1/topologies"))
        return _read(_NAMES, document_of(answer)["topologies"])

    def get_topology(self, name: str) -> Conversation[Topology]:
        """As `Talk.get_topology`."""
        answer = yield from self._link.send(get(_topology(name)))
        return _read(_TOPOLOGY, document_of(answer))

    def put_topology(self, topology: Topology) -> Conversation[None]:
        """As `Talk.put_topology`."""
        document = topology_to_json(topology, indent=None).encode()
        headers = {"Content-Type": "application/json"}
        yield from self._link.send(Send("PUT", _topology(topology.name), headers, document))

    def delete_topology(self, name: str) -> Conversation[None]:
        """As `Talk.delete_topology`."""
        attempts = 0

        def attempt() -> Conversation[None]:
            nonlocal attempts
            attempts += 1
            try:
                yield from self._link.once(Send("DELETE", _topology(name)))
            except RequestRejectedError as error:
                # An earlier attempt was heard, though its answer was lost.
                if attempts == 1 or error.status != codes.NOT_FOUND:
                    raise

        yield from self._link.patiently(attempt, waiting=False)

    def health(self) -> Conversation[dict[str, str]]:
        """As `Talk.health`."""
        yield from self._link.once(get("/readyz"))
        answer = yield from self._link.once(get("/version"))
        return dict(document_of(answer)["versions"])

    def _listed(self, what: str, most: int, **query: Any) -> Conversation[list[Any]]:
        """At most so many entries of a list, over as many pages as that takes."""
        found: list[Any] = []
        token: str | None = None
        while len(found) < most:
            size = min(most - len(found), _PAGE)
            request = get(f"/v1/{what}", page_size=size, page_token=token, **query)
            answer = yield from self._link.send(request)
            page = document_of(answer)
            found += page[what]
            token = page["next_page_token"]
            if not token:
                break
        return found

    def _made(self, request: Send) -> Conversation[Any]:
        """What a request makes, as JSON: at once, or by a job."""
        answer = yield from self._link.send(request, waiting=True)
        job = yield from finished(self._link, answer)
        return document_of(answer) if job is None else job.result

    def _or_here(
        self,
        ask: Callable[[], Conversation[T]],
        answer: Callable[[Local], Conversation[T]],
    ) -> Conversation[T]:
        """What the service answers, or who answers where it is not there.

        Raises:
            ServiceUnavailableError: it is not there, and nobody else is to answer.
        """
        try:
            return (yield from ask())
        except ServiceUnavailableError as error:
            if self._fallback is None:
                raise
            _log.warning("%s; answering in this process", error)
            return (yield from answer(self._fallback))

    def _from_service(
        self, asked: Asked, on_progress: OnProgress | None, *, wait: bool
    ) -> Conversation[PlanResult]:
        known = yield from self._known_plan(asked)
        if known is not None:
            return PlanResult(known, cached=True)
        placed = yield from self._orders.place(PLANS, asked, on_progress, wait=wait)
        if placed.job is not None:
            return PlanResult(placed.job.plan, placed.cached, placed.job.id)
        plan = Plan.from_json(placed.answer.body)
        if "ETag" in placed.answer.headers:
            self._keep(plan)
        return PlanResult(plan, placed.cached)

    def _known_plan(self, asked: Asked) -> Conversation[Plan | None]:
        """The plan, if the service was asked for it before: the graph need not be sent then."""
        document = {**asked.document, "graph_sha256": asked.graph_sha256}
        try:
            found = yield from self._link.send(post("/v1/plans:lookup", document))
            return (yield from self.get_plan(member(found, "id"), offline="never"))
        except RequestRejectedError as error:
            if error.status not in NOT_THERE:
                raise
            return None

    def _read_plan(self, plan_id: str, offline: Offline) -> Conversation[Plan]:
        kept = self._kept
        if offline == "only" and kept is not None:
            found = yield from work(lambda: kept.get(plan_id))
            if found is None:
                raise ServiceUnavailableError(f"no plan {plan_id} is kept on this machine")
            return found
        try:
            answer = yield from self._link.send(get(f"/v1/plans/{plan_id}"))
        except ServiceUnavailableError as error:
            if offline == "never" or kept is None:
                raise
            found = yield from work(lambda: kept.get(plan_id))
            if found is None:
                raise
            _warn_offline(found, error)
            return found
        plan = Plan.from_json(answer.body)
        if plan.id != plan_id:
            raise ServiceError(f"asked for the plan {plan_id}, the service sent {plan.id}")
        yield from self._keep_offline(plan)
        return plan

    def _keep(self, plan: Plan) -> None:
        """Keep a plan for when it is asked for again: it never changes under its id."""
        self._plans.pop(plan.id, None)
        self._plans[plan.id] = plan
        while len(self._plans) > _MOST_PLANS:
            self._plans.pop(next(iter(self._plans)), None)

    def _keep_offline(self, plan: Plan | None, asked: Asked | None = None) -> Conversation[None]:
        kept = self._kept
        if kept is not None and plan is not None:
            yield from work(lambda: kept.keep(plan, asked))


def _topology(name: str) -> str:
    return f"/v1/topologies/{quote(name, safe='')}"


def _read(adapter: TypeAdapter[T], document: Any) -> T:
    try:
        return adapter.validate_python(document)
    except ValidationError as error:
        raise ServiceError(f"the service's answer cannot be read: {error}") from error


def _warn_offline(plan: Plan, error: ServiceUnavailableError) -> None:
    _log.warning("%s; going on with the plan %s that is kept on this machine", error, plan.id)
