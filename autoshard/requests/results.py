"""Results of the client: plans, jobs, searches, validations."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autoshard.errors import RequestRejectedError, ServiceError
from autoshard.mesh import Mesh
from autoshard.plan import Certificate, Performance, Plan, ProblemSize


class _Document(BaseModel):
    """A JSON document of the service."""

    # Later versions of the service may add members.
    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)


class JobProgress(_Document):
    """Progress of a job."""

    phase: str = Field(description="step of the solver; the job's state before it starts")
    incumbent: float | None = Field(
        default=None, description="seconds of a step under the best plan so far"
    )
    bound: float | None = Field(
        default=None, description="proven lower bound on these seconds so far"
    )
    gap: float | None = Field(default=None, description="(incumbent - bound) / incumbent")
    elapsed: float = Field(ge=0, description="seconds since the job was started; 0 before")


OnProgress = Callable[[JobProgress], Awaitable[None] | None]
"""Called with each progress report of a job; `AsyncClient` awaits an awaitable result."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """State of a job.

    Attributes:
        id: of the job.
        plan_id: id of the plan that it makes; empty for other kinds of jobs.
        state: queued, running, succeeded, failed or cancelled.
        done: true in the last three states, which are final.
        progress: the latest report.
        plan: the result of a job that made a plan.
        error: problem details of a job that failed or was cancelled.
        result: the result of another kind of job, as JSON.
        caller: name of the key that submitted it first; None without keys.
        created_at: time of its submission.
        started_at: time of its last start; None before.
        finished_at: time of its end; None before.
    """

    id: str
    plan_id: str
    state: str
    done: bool
    progress: JobProgress
    plan: Plan | None = None
    error: Mapping[str, Any] | None = None
    result: Any = None
    caller: str | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None

    def get_plan(self) -> Plan:
        """Return the plan of a job that has succeeded.

        Raises:
            RequestRejectedError: the job failed or was cancelled; carries the problem details.
            ServiceError: the job is not done, or made no plan.
        """
        self.check()
        if self.plan is None:
            raise ServiceError(f"the result of the job {self.id} is not a plan")
        return self.plan

    def get_search(self) -> "MeshSearch":
        """Return the meshes of a search that has succeeded.

        Raises:
            RequestRejectedError: the job failed or was cancelled; carries the problem details.
            ServiceError: the job is not done, or was no search.
        """
        self.check()
        try:
            return MeshSearch.model_validate(self.result)
        except ValidationError:
            raise ServiceError(f"the result of the job {self.id} is not a search") from None

    def check(self) -> None:
        """Raise an error unless the job has succeeded.

        Raises:
            RequestRejectedError: it failed or was cancelled; carries the problem details.
            ServiceError: it is not done.
        """
        if self.error is not None:
            raise rejected(self.error)
        if not self.done:
            raise ServiceError(f"the job {self.id} is {self.state}; wait until it is done")


@dataclass(frozen=True, slots=True)
class PlanResult:
    """Result of a request for a plan.

    Attributes:
        plan: None if the caller did not wait for it.
        cached: true if the plan was known before this request.
        job_id: job that makes or made the plan; None if there was none.
        source: `service`; `offline` for a plan kept on this machine, because the service could
            not be reached; `local` for a plan made in this process.
    """

    plan: Plan | None
    cached: bool
    job_id: str | None = None
    source: Literal["service", "offline", "local"] = "service"


class PlanEntry(_Document):
    """A plan in a list."""

    id: str
    created_at: datetime
    status: str = Field(description="of the certificate")
    objective: float | None = Field(description="seconds of a step")
    gap: float | None
    peak_memory: int | None = Field(description="bytes per device")
    mode: str
    mesh: tuple[tuple[str, int], ...] = Field(description="name and size of each axis")
    topology: str
    graph_digest: str = Field(description="of the canonical program")
    size: int = Field(ge=0, description="bytes of the document")
    bound: float | None = Field(description="proven lower bound on a step, seconds")
    num_nodes: int
    num_parameters: int

    @classmethod
    def of(cls, plan: Plan, created_at: datetime) -> "PlanEntry":
        """The entry of a plan."""
        return cls(
            id=plan.id,
            created_at=created_at,
            status=plan.certificate.status,
            objective=plan.certificate.objective,
            gap=plan.certificate.gap,
            peak_memory=None if plan.memory is None else plan.memory.peak,
            mode=plan.options.mode,
            mesh=tuple((axis.name, axis.size) for axis in plan.mesh.axes),
            topology=plan.mesh.topology.name,
            graph_digest=plan.graph.digest,
            size=len(plan.to_json().encode()),
            bound=plan.certificate.bound,
            num_nodes=plan.graph.num_nodes,
            num_parameters=plan.graph.num_parameters,
        )


class Validation(_Document):
    """Result of a validation: the request would be planned, and how large its problem is."""

    plan_id: str = Field(description="id that the plan would have")
    size: ProblemSize


class SearchedMesh(_Document):
    """One mesh of a search, with a summary of its plan."""

    mesh: Mesh
    plan_id: str | None = Field(
        default=None, description="id for `get_plan`; None if the plan was not stored"
    )
    certificate: Certificate | None = Field(
        default=None, description="of the plan; None if `error` says why none was made"
    )
    peak_memory: int | None = Field(default=None, description="bytes per device at the peak")
    performance: Performance | None = Field(
        default=None, description="throughput, and the error of the predicted step time"
    )
    reason: str = Field(default="", description="reason why there is no plan")
    error: str = Field(
        default="",
        description="reason why no plan was made: the options do not fit this mesh, or its plans "
        "are proven to be at most `relative_gap` faster than that of another mesh",
    )
    bound: float | None = Field(
        default=None,
        description="proven lower bound of the seconds of its plans; None if none is known, or "
        "the options do not fit this mesh",
    )


class MeshSearch(_Document):
    """Every mesh of a number of devices, with a summary of its plan."""

    meshes: tuple[SearchedMesh, ...] = Field(description="best first")
    bound: float | None = Field(
        default=None,
        description="proven lower bound of the seconds of the plans of all meshes; None if a mesh "
        "has none",
    )
    statement: str = Field(
        default="",
        description="what is proven over all meshes, and which of them were not finished",
    )


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a request for the best mesh.

    Attributes:
        search: None if the caller did not wait for it.
        cached: true if the search was known before this request.
        job_id: job that makes or made it; None if there was none.
        source: `service`, or `local` for a search in this process.
    """

    search: MeshSearch | None
    cached: bool
    job_id: str | None = None
    source: Literal["service", "local"] = "service"


_FIRST_OF_SERVICE = 500
"""The first of the HTTP statuses that mean an error of the service."""


def rejected(problem: Mapping[str, Any], status: int = 500) -> RequestRejectedError:
    """Make the error for problem details."""
    title = problem.get("title", "the service refused the request")
    detail = problem.get("detail", "no reason was given")
    status = int(problem.get("status", status))
    # The operator of the service finds the cause of its own errors in its log, by this id.
    is_of_service = status >= _FIRST_OF_SERVICE and "request_id" in problem
    request = f" (request {problem['request_id']})" if is_of_service else ""
    return RequestRejectedError(f"{title}: {detail}{request}", status=status, problem=problem)


_TIMES = ("created_at", "started_at", "finished_at")


def read_job(document: Any) -> JobStatus:
    """Read the JSON document of a job.

    Raises:
        ServiceError: the document is not a job.
        PlanError: its result is not a plan of a version known here.
    """
    try:
        result = document.get("result")
        makes_plan = document.get("kind", "plan") == "plan"
        return JobStatus(
            id=str(document["id"]),
            plan_id=str(document.get("plan_id") or ""),
            state=str(document["state"]),
            done=bool(document["done"]),
            progress=JobProgress.model_validate(document["metadata"]),
            plan=Plan.from_document(result) if makes_plan and result is not None else None,
            error=document.get("error"),
            result=None if makes_plan else result,
            caller=document.get("caller"),
            **{name: _time(document.get(name)) for name in _TIMES},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ServiceError(f"the service sent a document that is not a job: {error!r}") from error


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
