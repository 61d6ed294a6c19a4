"""The documents of the API besides plans: for the specification, and for building answers."""

from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from autoshard.graph import Graph
from autoshard.plan import Coverage, Plan
from autoshard.planner import Explanation
from autoshard_server.jobs.job import Job, JobState
from autoshard_server.jobs.kinds import JobKind, known_kind
from autoshard_server.solvers.results import MeshSearch, Validation
from autoshard_server.store import EventKind, GraphInfo, PlanSummary, TopologyInfo


class FieldProblem(BaseModel):
    """One field of the request that is wrong."""

    pointer: str = Field(description="JSON pointer into the part 'request'")
    detail: str


class Problem(BaseModel):
    """Problem details (RFC 9457)."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(description="stable URI of the kind of problem")
    title: str
    status: int
    detail: str = Field(description="what is wrong this time, and the way out")
    errors: list[FieldProblem] | None = Field(default=None, description="each wrong field")
    limit: int | None = Field(default=None, description="the limit that was exceeded")
    limit_name: str | None = Field(default=None, description="the setting that decides it")


class JobMetadata(BaseModel):
    """How far a job has come."""

    phase: str = Field(description="what the solver does; the state before it starts")
    incumbent: float | None = Field(
        default=None, description="price of the best plan so far, seconds"
    )
    bound: float | None = Field(default=None, description="proven lower bound so far, seconds")
    gap: float | None = Field(default=None, description="(incumbent - bound) / incumbent")
    elapsed: float = Field(ge=0, description="seconds since the job was started; 0 before")


class JobEntry(BaseModel):
    """A job in a list."""

    id: str
    kind: JobKind | str = Field(
        description="what it makes; another word where a newer release shares the database"
    )
    plan_id: str | None = Field(
        default=None, description="id that the plan has when it is made; only where it makes one"
    )
    state: JobState
    done: bool
    created_at: datetime
    attempts: int = Field(ge=0, description="how often it was started")
    metadata: JobMetadata
    error: Problem | None = None


class JobDocument(JobEntry):
    """A job; when it is done it has exactly one of result and error."""

    result: Plan | MeshSearch | Explanation | Validation | Coverage | None = Field(
        default=None, description="a plan, or what the kind says"
    )


class JobPage(BaseModel):
    """Jobs, newest first."""

    jobs: list[JobEntry]
    next_page_token: str = Field(description="for the page that follows; empty at the end")


class JobEvent(BaseModel):
    """Something that happened to a job: the data of a server-sent event."""

    number: int = Field(ge=1, description="1, 2, 3, ... within the job; the event's id")
    kind: EventKind = Field(description="state or progress; the event's name")
    created_at: datetime
    data: dict[str, Any] = Field(description="state, or phase, incumbent, bound and gap")


class PlanEntry(BaseModel):
    """A plan in a list."""

    id: str
    created_at: datetime
    size: int = Field(ge=0, description="bytes of the document")
    status: str = Field(description="of the certificate")
    objective: float | None = Field(description="price of a step, seconds")
    bound: float | None = Field(description="proven lower bound of it, seconds")
    gap: float | None
    peak_memory: int | None = Field(description="bytes per device")
    mode: str
    mesh: list[tuple[str, int]] = Field(description="name and size of each axis")
    topology: str
    graph_digest: str = Field(description="of the canonical program")
    num_nodes: int
    num_parameters: int


class PlanPage(BaseModel):
    """Plans that are kept, newest first."""

    plans: list[PlanEntry]
    next_page_token: str = Field(description="for the page that follows; empty at the end")


class GraphDocument(BaseModel):
    """A graph that was uploaded."""

    sha256: str = Field(description="of the bytes")
    size: int = Field(ge=0, description="bytes")
    created_at: datetime
    used_at: datetime = Field(description="last use; may lag an hour behind")


class UploadedGraph(GraphDocument):
    """A graph that has just been read."""

    num_nodes: int = Field(ge=0)
    num_edges: int = Field(ge=0, description="uses of values by nodes")
    num_parameters: int = Field(ge=0, description="elements of all parameters together")


class KnownPlan(BaseModel):
    """A plan that was asked for before."""

    id: str = Field(description="digest of the request and versions")


class Alive(BaseModel):
    """The process answers."""

    status: str = "ok"


class Versions(BaseModel):
    """What runs here."""

    versions: dict[str, str]


class StoredTopologyEntry(BaseModel):
    """A topology that was stored under a name."""

    name: str
    sha256: str = Field(description="of the document; its ETag")
    created_at: datetime
    updated_at: datetime = Field(description="when this document came")


class Topologies(BaseModel):
    """Clusters that a mesh can name."""

    topologies: list[str] = Field(description="every name")
    stored: list[StoredTopologyEntry] = Field(description="those that are not built in")


def job_entry(job: Job) -> JobEntry:
    """A job as it travels in a list."""
    return JobEntry(**_fields(job))


def job_document(job: Job) -> JobDocument:
    """A job as it travels, without its result."""
    return JobDocument(**_fields(job))


def _fields(job: Job) -> dict[str, Any]:
    figures: dict[str, Any] = {"phase": job.state.value, "incumbent": None, "bound": None}
    figures |= {"gap": None, **job.progress, "elapsed": round(job.elapsed, 3)}
    kind = known_kind(job.kind) or job.kind
    return {
        "id": job.id,
        "kind": kind,
        "plan_id": job.plan_id if kind is JobKind.PLAN else None,
        "state": job.state,
        "done": job.state.done,
        "created_at": moment(job.created_at),
        "attempts": job.attempts,
        "metadata": JobMetadata.model_validate(figures),
        "error": None if job.error is None else Problem.model_validate(job.error),
    }


def plan_entry(summary: PlanSummary) -> PlanEntry:
    """A plan as it travels in a list."""
    fields = {name: getattr(summary, name) for name in PlanEntry.model_fields}
    return PlanEntry(**{**fields, "created_at": moment(summary.created_at)})


def graph_document(info: GraphInfo) -> GraphDocument:
    """What is known of an upload."""
    return GraphDocument(**_info(info))


def uploaded_graph(info: GraphInfo, graph: Graph) -> UploadedGraph:
    """What is known of an upload that was read."""
    return UploadedGraph(
        **_info(info),
        num_nodes=len(graph.nodes),
        num_edges=sum(len(node.inputs) for node in graph.nodes),
        num_parameters=sum(graph.values[p.name].numel for p in graph.parameters),
    )


def _info(info: GraphInfo) -> dict[str, Any]:
    return {
        "sha256": info.sha256,
        "size": info.size,
        "created_at": moment(info.created_at),
        "used_at": moment(info.used_at),
    }


def topology_entry(info: TopologyInfo) -> StoredTopologyEntry:
    """What a list shows of a topology."""
    return StoredTopologyEntry(
        name=info.name,
        sha256=info.sha256,
        created_at=moment(info.created_at),
        updated_at=moment(info.updated_at),
    )


def moment(seconds: float) -> datetime:
    """Seconds since 1970 as a date and time in UTC."""
    return datetime.fromtimestamp(seconds, UTC)
