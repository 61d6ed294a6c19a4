"""The documents of the API besides plans: for the specification, and for building answers."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from autoshard.plan import Plan
from autoshard_server.jobs import Job, JobState


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
    limit: int | None = Field(default=None, description="the limit that was exceeded, bytes")


class JobMetadata(BaseModel):
    """How far a job has come."""

    phase: str = Field(description="what the solver does; the state before it starts")
    incumbent: float | None = Field(description="price of the best plan so far, seconds")
    bound: float | None = Field(description="proven lower bound so far, seconds")
    gap: float | None = Field(description="(incumbent - bound) / incumbent")
    elapsed: float = Field(ge=0, description="seconds since the job was started; 0 before")


class JobDocument(BaseModel):
    """A planning job; when it is done it has exactly one of result and error."""

    id: str
    plan_id: str = Field(description="id that the plan has when it is made")
    state: JobState
    done: bool
    metadata: JobMetadata
    result: Plan | None = None
    error: Problem | None = None


class KnownPlan(BaseModel):
    """A plan that was asked for before."""

    id: str = Field(description="digest of the request and versions")


class Alive(BaseModel):
    """The process answers."""

    status: str = "ok"


class Versions(BaseModel):
    """What runs here."""

    versions: dict[str, str]


class Topologies(BaseModel):
    """Clusters that a mesh can name."""

    topologies: list[str]


def job_document(job: Job) -> JobDocument:
    """A job as it travels, without its result."""
    figures: dict[str, Any] = {"phase": job.state.value, "incumbent": None, "bound": None}
    figures |= {"gap": None, **job.progress, "elapsed": round(job.elapsed, 3)}
    return JobDocument(
        id=job.id,
        plan_id=job.plan_id,
        state=job.state,
        done=job.state.done,
        metadata=JobMetadata.model_validate(figures),
        error=None if job.error is None else Problem.model_validate(job.error),
    )
