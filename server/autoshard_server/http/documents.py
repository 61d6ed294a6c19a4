"""JSON documents of responses, except plans."""

from datetime import datetime
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from autoshard.plan import Plan
from autoshard.planner import Explanation
from autoshard.report import Coverage
from autoshard.requests.results import JobProgress, MeshSearch, PlanEntry, Validation
from autoshard_server.store.audit import AuditEvent
from autoshard_server.store.jobs import Job, JobKind, JobState, known_kind
from autoshard_server.store.topologies import StoredTopologyEntry
from autoshard_solver_cache import EntryInfo


class FieldProblem(BaseModel):
    """A wrong field of the request."""

    pointer: str = Field(description="JSON pointer into the part 'request'")
    detail: str


class ProblemDetails(BaseModel):
    """Problem details (RFC 9457)."""

    # Names the schema in the specification, after which generated clients name their type.
    __qualname__ = "Problem"
    model_config = ConfigDict(extra="allow", title=__qualname__)

    type: str = Field(
        description="kind of problem: its section of the page /problems of the service"
    )
    title: str
    status: int
    detail: str = Field(description="the error of this request, and a remedy")
    request_id: str | None = Field(
        default=None,
        description="id of the request in the service's log, as in the header `X-Request-ID`; in a "
        "job, of the request that submitted it; absent if a connection was closed before a request "
        "was read",
    )
    errors: list[FieldProblem] | None = Field(default=None, description="each wrong field")
    accepted: list[str] | None = Field(default=None, description="media types of the route's body")
    limit: float | None = Field(default=None, description="the limit that was exceeded")
    limit_name: str | None = Field(default=None, description="the setting of the limit")


class JobEntry(BaseModel):
    """A job in a list."""

    id: str
    kind: JobKind | str = Field(
        description="of its result; another value if a newer release shares the database"
    )
    plan_id: str | None = Field(
        default=None, description="id that the plan will have; only of jobs that make one"
    )
    state: JobState
    done: bool
    caller: str | None = Field(
        default=None, description="name of the key that submitted it first; null without keys"
    )
    created_at: datetime
    started_at: datetime | None = Field(default=None, description="last start")
    finished_at: datetime | None = None
    attempts: int = Field(ge=0, description="number of starts")
    metadata: JobProgress
    error: ProblemDetails | None = None

    @classmethod
    def of(cls, job: Job) -> Self:
        """The document of a job, without its result."""
        kind = known_kind(job.kind) or job.kind
        progress = {"phase": job.state.value, **job.progress, "elapsed": round(job.elapsed, 3)}
        return cls(
            id=job.id,
            kind=kind,
            plan_id=job.plan_id if kind is JobKind.PLAN else None,
            state=job.state,
            done=job.state.done,
            caller=job.caller,
            created_at=job.created_at,
            started_at=job.started_at,
            finished_at=job.finished_at,
            attempts=job.attempts,
            metadata=JobProgress.model_validate(progress),
            error=None if job.error is None else ProblemDetails.model_validate(job.error),
        )


class JobDocument(JobEntry):
    """A job; a finished one has either a result or an error."""

    result: Plan | MeshSearch | Explanation | Validation | Coverage | None = Field(
        default=None, description="a plan, or the document of its kind"
    )


class Page(BaseModel):
    """A page of a list."""

    next_page_token: str = Field(description="for the next page; empty at the end")


class JobPage(Page):
    """Jobs, newest first."""

    jobs: list[JobEntry]


class PlanPage(Page):
    """Plans of the cache, newest first."""

    plans: list[PlanEntry]


class AuditPage(Page):
    """Changes of the project's resources, newest first."""

    events: list[AuditEvent]


class GraphDocument(BaseModel):
    """A graph that was uploaded."""

    sha256: str = Field(description="of the bytes")
    size: int = Field(ge=0, description="bytes")
    created_at: datetime
    used_at: datetime = Field(description="last use; may lag by an hour")

    @classmethod
    def of(cls, info: EntryInfo, **more: Any) -> Self:
        """The document of an entry of the cache."""
        fields = {"size": info.size, "created_at": info.created_at, "used_at": info.used_at}
        return cls(sha256=info.key, **fields, **more)


class UploadedGraph(GraphDocument):
    """A graph that was just parsed."""

    num_nodes: int = Field(ge=0)
    num_edges: int = Field(ge=0, description="uses of values by nodes")
    num_parameters: int = Field(ge=0, description="elements of all parameters together")


class KnownPlan(BaseModel):
    """The plan of an earlier request."""

    id: str = Field(description="digest of the request and versions")


class Alive(BaseModel):
    """Status of a process that is alive."""

    status: str = "ok"


class Versions(BaseModel):
    """Versions of the service."""

    versions: dict[str, str]


class Topologies(BaseModel):
    """Topologies that a mesh can name."""

    topologies: list[str] = Field(description="all names")
    stored: list[StoredTopologyEntry] = Field(description="those that are not built in")
