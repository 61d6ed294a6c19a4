"""The client: a model and a mesh in, a plan out."""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import httpx2
from pydantic import ValidationError

from autoshard.client.results import JobProgress, JobStatus, PlanResult, read_job, rejected
from autoshard.errors import (
    ArchiveError,
    GraphError,
    OptionError,
    RequestRejectedError,
    ServiceError,
    ServiceUnavailableError,
)
from autoshard.graph import ArchiveLimits, load_graph, operator_namespaces, rules_to_json
from autoshard.mesh import Mesh, mesh_to_json
from autoshard.plan import Mode, Plan, PlanOptions

if TYPE_CHECKING:
    import torch

MeshLike = Sequence[int] | Mapping[str, Any] | Mesh
OnProgress = Callable[[JobProgress], None]

_log = logging.getLogger(__name__)

_PATIENCE = 10
"""Seconds that the service may keep the first request open, to save a round of polling."""

_MAX_FAILED_POLLS = 5
"""Polls in a row that may fail before a job counts as out of reach."""

_UNAVAILABLE = frozenset({429, 502, 503})
"""Statuses that say to come back later."""


_NOT_THERE = frozenset({404, 405})
"""Statuses that say that there is no such plan, or no such route yet."""

_OF_TORCH = frozenset({"aten", "higher_order"})

_INFLATED = 1032
"""Bytes that one compressed byte may stand for at most; https://zlib.net/zlib_tech.html."""

_MOST_PLANS = 4
"""Plans that a client keeps; one of a large model takes some megabytes."""


class Client:
    """Talks to a planning service; a context manager.

    Args:
        url: of the service, such as http://127.0.0.1:8000.
        timeout: seconds that a single request may take; planning may take longer.
    """

    def __init__(self, url: str, *, timeout: float = 30.0) -> None:
        self._url = url
        self._timeout = timeout
        self._http = httpx2.Client(base_url=url, timeout=timeout)
        self._plans: dict[str, Plan] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def plan(
        self,
        model: "str | Path | bytes | torch.nn.Module",
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        mesh: MeshLike,
        options: PlanOptions | None = None,
        mode: Mode | None = None,
        memory_budget: int | None = None,
        discover: bool = True,
        on_progress: OnProgress | None = None,
    ) -> Plan:
        """Plan a model for a mesh, and wait for the plan.

        Args:
            model: a module, which is exported on the meta device; or the path or bytes of a
                `.pt2` archive or of its model.json.
            args: example arguments of the module's forward.
            kwargs: example keyword arguments of the module's forward.
            mesh: size of each axis, or the fields of `make_mesh` as a mapping, or a mesh.
            options: of planning.
            mode: replaces that of the options.
            memory_budget: bytes per device; replaces that of the options.
            discover: whether operators of the model's own are run here, on small tensors, to
                find out how they may be cut; the service never runs them. If not, all of their
                work is done on every rank.
            on_progress: called each time the service is asked how far it has come.

        Returns:
            The plan; or, where there is none, the document whose reason says why.

        Raises:
            GraphError: the model cannot be exported, or the file not be read.
            RequestRejectedError: the service refused; carries the problem details.
            ServiceUnavailableError: the service does not answer, or is too busy.
        """
        result = self.request_plan(
            model,
            args,
            kwargs,
            mesh=mesh,
            options=options,
            mode=mode,
            memory_budget=memory_budget,
            discover=discover,
            on_progress=on_progress,
        )
        if result.plan is None:
            raise ServiceError("the service ended the request without a plan")
        return result.plan

    def request_plan(
        self,
        model: "str | Path | bytes | torch.nn.Module",
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        mesh: MeshLike,
        options: PlanOptions | None = None,
        mode: Mode | None = None,
        memory_budget: int | None = None,
        discover: bool = True,
        on_progress: OnProgress | None = None,
        wait: bool = True,
    ) -> PlanResult:
        """As `plan`, and says where the plan comes from.

        Args:
            model: as in `plan`, and so on.
            args: likewise.
            kwargs: likewise.
            mesh: likewise.
            options: likewise.
            mode: likewise.
            memory_budget: likewise.
            discover: likewise.
            on_progress: likewise.
            wait: whether to wait for a plan that is not known yet; if not, ask for the job
                later with `get_job`, or wait with `wait_for_job`.
        """
        graph = _graph_bytes(model, args, kwargs)
        asked: dict[str, Any] = {
            "mesh": _mesh_document(mesh),
            "options": _options(options, mode, memory_budget).model_dump(mode="json"),
        }
        if discover and (rules := _custom_rules(graph)):
            asked["rules"] = rules
        known = self._known_plan(graph, asked)
        if known is not None:
            return PlanResult(known, cached=True)
        # With somebody watching, come back at once so as to report progress.
        patience = _PATIENCE if wait and on_progress is None else 0
        response = self._send(
            "POST",
            "/v1/plans",
            files={
                "graph": ("graph", graph, "application/octet-stream"),
                "request": (None, json.dumps(asked), "application/json"),
            },
            headers={"Prefer": f"wait={patience}"},
            timeout=httpx2.Timeout(self._timeout, read=self._timeout + patience),
        )
        cached = response.headers.get("Autoshard-Cache") == "hit"
        if response.status_code != httpx2.codes.ACCEPTED:
            plan = Plan.from_json(response.content)
            if "ETag" in response.headers:
                self._keep(plan)
            return PlanResult(plan, cached)
        job = _job(response)
        if not wait:
            return PlanResult(job.plan, cached, job.id)
        job = self._follow(job, _retry_after(response), on_progress)
        return PlanResult(job.get_plan(), cached, job.id)

    def get_plan(self, plan_id: str) -> Plan:
        """A plan that was made before.

        Raises:
            RequestRejectedError: there is none.
            ServiceUnavailableError: the service does not answer.
        """
        plan = self._plans.get(plan_id)
        if plan is None:
            plan = Plan.from_json(self._send("GET", f"/v1/plans/{plan_id}").content)
        self._keep(plan)
        return plan

    def get_job(self, job_id: str) -> JobStatus:
        """Where a job stands.

        Raises:
            RequestRejectedError: there is no such job, or no longer.
            ServiceUnavailableError: the service does not answer.
        """
        return _job(self._send("GET", f"/v1/jobs/{job_id}"))

    def wait_for_job(self, job_id: str, *, on_progress: OnProgress | None = None) -> Plan:
        """Wait for the plan of a job.

        Raises:
            RequestRejectedError: the job failed, was cancelled, or does not exist.
            ServiceUnavailableError: the service does not answer.
        """
        return self._follow(self.get_job(job_id), 0.0, on_progress).get_plan()

    def cancel(self, job_id: str) -> JobStatus:
        """Cancel a job, for everybody who waits for it; one that is done stays as it is.

        Raises:
            RequestRejectedError: there is no such job.
            ServiceUnavailableError: the service does not answer.
        """
        return _job(self._send("POST", f"/v1/jobs/{job_id}:cancel"))

    def health(self) -> dict[str, str]:
        """Versions of a service that is ready.

        Raises:
            ServiceUnavailableError: it does not answer, or is not ready.
        """
        self._send("GET", "/readyz")
        return dict(self._send("GET", "/version").json()["versions"])

    def _known_plan(self, graph: bytes, asked: Mapping[str, Any]) -> Plan | None:
        """The plan, if the service was asked for it before: the graph need not be sent then."""
        digest = hashlib.sha256(graph).hexdigest()
        try:
            found = self._send("POST", "/v1/plans:lookup", json={**asked, "graph_sha256": digest})
            return self.get_plan(_member(found, "id"))
        except RequestRejectedError as error:
            if error.status not in _NOT_THERE:
                raise
            return None

    def _keep(self, plan: Plan) -> None:
        """Keep a plan for when it is asked for again: it never changes under its id."""
        self._plans.pop(plan.id, None)
        self._plans[plan.id] = plan
        while len(self._plans) > _MOST_PLANS:
            self._plans.pop(next(iter(self._plans)))

    def _follow(self, job: JobStatus, pause: float, on_progress: OnProgress | None) -> JobStatus:
        failures = 0
        while not job.done:
            time.sleep(pause)
            try:
                response = self._send("GET", f"/v1/jobs/{job.id}")
            except ServiceUnavailableError:
                failures += 1
                if failures == _MAX_FAILED_POLLS:
                    raise
                pause = 2.0**failures / 4
                continue
            failures, pause = 0, _retry_after(response)
            job = _job(response)
            if on_progress is not None:
                on_progress(job.progress)
        return job

    def _send(self, method: str, path: str, **request: Any) -> httpx2.Response:
        try:
            response = self._http.request(method, path, **request)
        except (httpx2.TransportError, httpx2.InvalidURL) as error:
            raise ServiceUnavailableError(
                f"the planning service at {self._url} does not answer "
                f"({type(error).__name__}: {error}); is it running?"
            ) from error
        if response.is_success:
            return response
        problem = _problem(response)
        if response.status_code in _UNAVAILABLE:
            raise ServiceUnavailableError(
                f"the planning service at {self._url} asks to come back later: "
                f"{problem.get('detail', response.reason_phrase)}"
            )
        raise rejected(problem, response.status_code)


def _member(response: httpx2.Response, name: str) -> str:
    try:
        return str(response.json()[name])
    except (ValueError, KeyError, TypeError) as error:
        raise ServiceError(f"the service's answer has no {name!r}: {error!r}") from error


def _job(response: httpx2.Response) -> JobStatus:
    try:
        return read_job(response.json())
    except ValueError as error:
        raise ServiceError(f"the service answered something that is no JSON: {error}") from error


def _problem(response: httpx2.Response) -> dict[str, Any]:
    """Problem details of an answer; from its status alone where a proxy has answered."""
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if isinstance(problem, dict) and "title" in problem:
        return problem
    return {"title": response.reason_phrase, "status": response.status_code}


def _retry_after(response: httpx2.Response) -> float:
    given = response.headers.get("Retry-After", "1")
    return float(given) if given.isdecimal() else 1.0


def _graph_bytes(
    model: "str | Path | bytes | torch.nn.Module",
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
) -> bytes:
    if isinstance(model, bytes):
        return model
    if isinstance(model, str | Path):
        try:
            return Path(model).read_bytes()
        except OSError as error:
            raise ArchiveError(f"{model} cannot be read: {error.strerror or error}") from error
    from autoshard.graph import export_model  # noqa: PLC0415  torch is slow to import

    return export_model(model, args, dict(kwargs or {}))


def _custom_rules(graph: bytes) -> list[dict[str, Any]]:
    """Rules of the graph's operators that are not torch's, if they are registered here."""
    limits = _own_limits(graph)
    if operator_namespaces(graph, limits=limits) <= _OF_TORCH:
        return []
    try:
        program = load_graph(graph, limits=limits)
    except GraphError:
        return []  # the service says what is wrong with it
    from autoshard.discovery import discover  # noqa: PLC0415  torch is slow to import

    found = discover(program, aten=False)
    for finding in found.findings:
        if finding.rule is None:
            _log.warning("%s runs whole on every rank: %s", finding.operator, finding.reason)
    return rules_to_json(found.graph.rules)


def _own_limits(graph: bytes) -> ArchiveLimits:
    """Limits that no archive of so many bytes exceeds: the caller's own is no attack."""
    most = _INFLATED * len(graph)
    return ArchiveLimits(
        archive_bytes=len(graph), model_bytes=most, compression_ratio=_INFLATED, nodes=most
    )


def _mesh_document(mesh: MeshLike) -> dict[str, Any]:
    if isinstance(mesh, Mesh):
        document: dict[str, Any] = json.loads(mesh_to_json(mesh))
        return document
    return dict(mesh) if isinstance(mesh, Mapping) else {"shape": list(mesh)}


def _options(
    options: PlanOptions | None, mode: Mode | None, memory_budget: int | None
) -> PlanOptions:
    given = {"mode": mode, "memory_budget": memory_budget}
    changed = {name: value for name, value in given.items() if value is not None}
    try:
        return PlanOptions.model_validate((options or PlanOptions()).model_dump() | changed)
    except ValidationError as error:
        first = error.errors()[0]
        raise OptionError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
