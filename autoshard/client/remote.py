"""Conversations with a service."""

import json
import logging
from collections.abc import Sequence
from typing import Any, TypeVar
from uuid import uuid4

from httpx2 import codes
from pydantic import TypeAdapter, ValidationError

from autoshard.client.asked import Asked
from autoshard.client.effects import Answer, Conversation, OnProgress, Send, work
from autoshard.client.following import Follower, finished
from autoshard.client.link import Link, document_of, get, member, post, post_form, retry_after
from autoshard.client.local import Local
from autoshard.client.offline import OfflinePlans
from autoshard.client.packing import packed
from autoshard.client.results import JobStatus, PlanEntry, PlanResult, read_job
from autoshard.client.talk import Offline, Talk
from autoshard.errors import RequestRejectedError, ServiceError, ServiceUnavailableError
from autoshard.plan import Explanation, Plan, PlanDifference

T = TypeVar("T")

_PATIENCE = 10
"""Seconds that the service may keep a request open, to save a round of asking."""

_NOT_THERE = frozenset({404, 405})
"""Statuses that say that there is no such thing, or no such route yet."""

_MOST_PLANS = 4
"""Plans that a client keeps in memory; one of a large model takes some megabytes."""

_PAGE = 100
"""Entries of a page that are asked for at once."""

_MOST_LOSSES = 2
"""Times that a job may be lost by the service, and the plan be asked for again."""

_EXPLANATION = TypeAdapter(Explanation)
_ENTRIES = TypeAdapter(tuple[PlanEntry, ...])
_DIFFERENCE = TypeAdapter(PlanDifference)

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
        self._stores_graphs = True
        self._unpacks = True

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

    def _from_service(
        self, asked: Asked, on_progress: OnProgress | None, *, wait: bool, losses: int = 0
    ) -> Conversation[PlanResult]:
        known = yield from self._known_plan(asked)
        if known is not None:
            return PlanResult(known, cached=True)
        # With somebody watching, come back at once so as to report progress.
        patience = _PATIENCE if wait and on_progress is None else 0
        answer = yield from self._order(asked, patience, waiting=wait)
        cached = answer.headers.get("Autoshard-Cache") == "hit"
        if answer.status != codes.ACCEPTED:
            plan = Plan.from_json(answer.body)
            if "ETag" in answer.headers:
                self._keep(plan)
            return PlanResult(plan, cached)
        job = read_job(document_of(answer))
        if not wait:
            return PlanResult(job.plan, cached, job.id)
        follower = Follower(self._link, job, on_progress)
        try:
            job = yield from follower.until_done(retry_after(answer) or 0.0)
        except RequestRejectedError as error:
            if error.status not in _NOT_THERE or losses == _MOST_LOSSES:
                raise
        else:
            return PlanResult(job.get_plan(), cached, job.id)
        # The service has lost its jobs, as one that keeps them in memory does: ask anew.
        _log.warning("the service no longer knows the job %s; asking again", job.id)
        return (yield from self._from_service(asked, on_progress, wait=wait, losses=losses + 1))

    def _known_plan(self, asked: Asked) -> Conversation[Plan | None]:
        """The plan, if the service was asked for it before: the graph need not be sent then."""
        document = {**asked.document, "graph_sha256": asked.graph_sha256}
        try:
            found = yield from self._link.send(post("/v1/plans:lookup", document))
            return (yield from self.get_plan(member(found, "id"), offline="never"))
        except RequestRejectedError as error:
            if error.status not in _NOT_THERE:
                raise
            return None

    def _order(self, asked: Asked, patience: int, *, waiting: bool) -> Conversation[Answer]:
        """Ask for a plan that is not known, and send the graph if that is not known either."""
        headers = {"Prefer": f"wait={patience}", "Idempotency-Key": uuid4().hex}
        if self._stores_graphs:
            document = {**asked.document, "graph_sha256": asked.graph_sha256}
            order = post("/v1/plans", document, headers=headers, patience=patience)
            try:
                return (yield from self._link.send(order, waiting=waiting))
            except RequestRejectedError as error:
                if error.status == codes.NOT_FOUND:
                    yield from self._upload(asked, waiting=waiting)
                    return (yield from self._link.send(order, waiting=waiting))
                if error.status != codes.UNSUPPORTED_MEDIA_TYPE:
                    raise
            # A service of an earlier version, which takes graphs with the request only.
            self._stores_graphs = False
        form = {
            "graph": ("graph", asked.graph, "application/octet-stream"),
            "request": (None, json.dumps(asked.document), "application/json"),
        }
        return (
            yield from self._link.send(
                post_form("/v1/plans", form, headers=headers, patience=patience), waiting=waiting
            )
        )

    def _upload(self, asked: Asked, *, waiting: bool) -> Conversation[None]:
        """Store a graph under its digest, compressed where the service takes that."""
        path = f"/v1/graphs/{asked.graph_sha256}"
        plain = {"Content-Type": "application/octet-stream"}
        if self._unpacks:
            coding, body = yield from work(lambda: packed(asked.graph))
            coded = plain if coding == "identity" else {**plain, "Content-Encoding": coding}
            try:
                yield from self._link.send(Send("PUT", path, coded, body), waiting=waiting)
            except RequestRejectedError as error:
                if error.status != codes.UNSUPPORTED_MEDIA_TYPE or coded is plain:
                    raise
                self._unpacks = False
            else:
                return
        yield from self._link.send(Send("PUT", path, plain, asked.graph), waiting=waiting)

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


def _read(adapter: TypeAdapter[T], document: Any) -> T:
    try:
        return adapter.validate_python(document)
    except ValidationError as error:
        raise ServiceError(f"the service's answer cannot be read: {error}") from error


def _warn_offline(plan: Plan, error: ServiceUnavailableError) -> None:
    _log.warning("%s; going on with the plan %s that is kept on this machine", error, plan.id)
