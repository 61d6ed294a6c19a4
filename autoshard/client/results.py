"""What the service answers, as values."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autoshard.errors import RequestRejectedError, ServiceError
from autoshard.mesh import Mesh
from autoshard.plan import Certificate, Plan
from autoshard.planner import ProblemSize


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How far a job has come.

    Attributes:
        phase: what the solver does; the job's state before it starts.
        incumbent: price of the best plan so far in seconds; None before there is one.
        bound: proven lower bound so far in seconds; None before there is one.
        gap: (incumbent - bound) / incumbent; None before both are known.
        elapsed: seconds since the job was started.
    """

    phase: str
    incumbent: float | None
    bound: float | None
    gap: float | None
    elapsed: float


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job of the service.

    Attributes:
        id: of the job.
        plan_id: id that its plan has when it is made; empty where it makes something else.
        state: queued, running, succeeded, failed or cancelled.
        done: whether it will not change any more.
        progress: how far it has come.
        plan: where it has succeeded in making one.
        error: problem details, where it failed or was cancelled.
        result: what it made, as JSON, where that is no plan.
    """

    id: str
    plan_id: str
    state: str
    done: bool
    progress: JobProgress
    plan: Plan | None = None
    error: Mapping[str, Any] | None = None
    result: Any = None

    def get_plan(self) -> Plan:
        """The plan of a job that is done.

        Raises:
            RequestRejectedError: the job failed or was cancelled; carries the details.
            ServiceError: the job is not done.
        """
        self.check()
        if self.plan is None:
            raise ServiceError(f"the job {self.id} made something else than a plan")
        return self.plan

    def get_search(self) -> "MeshSearch":
        """The meshes of a search that is done.

        Raises:
            RequestRejectedError: the job failed or was cancelled; carries the details.
            ServiceError: the job is not done, or was no search.
        """
        self.check()
        try:
            return MeshSearch.model_validate(self.result)
        except ValidationError:
            raise ServiceError(f"the job {self.id} made something else than a search") from None

    def check(self) -> None:
        """Nothing, where the job has succeeded.

        Raises:
            RequestRejectedError: it failed or was cancelled; carries the details.
            ServiceError: it is not done.
        """
        if self.error is not None:
            raise rejected(self.error)
        if not self.done:
            raise ServiceError(f"the job {self.id} is {self.state}; wait until it is done")


@dataclass(frozen=True, slots=True)
class PlanResult:
    """The answer to a request for a plan.

    Attributes:
        plan: None where the caller did not want to wait for it.
        cached: whether it was there before anybody asked this time.
        job_id: job that makes or made it; None where the service did not say.
        source: `service`; `offline` where the service was not there and the plan was kept on
            this machine; `local` where it was made in this process.
    """

    plan: Plan | None
    cached: bool
    job_id: str | None = None
    source: Literal["service", "offline", "local"] = "service"


class _Answered(BaseModel):
    """Something that a service answers."""

    # What later versions of the service add is no reason to fail.
    model_config = ConfigDict(extra="ignore", frozen=True)


class PlanEntry(_Answered):
    """A plan in a list."""

    id: str
    created_at: datetime
    status: str = Field(description="of the certificate")
    objective: float | None = Field(description="price of a step, seconds")
    gap: float | None
    peak_memory: int | None = Field(description="bytes per device")
    mode: str
    mesh: tuple[tuple[str, int], ...] = Field(description="name and size of each axis")
    topology: str
    graph_digest: str = Field(description="of the canonical program")


class Validation(_Answered):
    """A request that would be planned, and what it would ask of the solver."""

    plan_id: str = Field(description="id that the plan would have")
    size: ProblemSize


class SearchedMesh(_Answered):
    """One mesh of a search, and what came of planning for it."""

    mesh: Mesh
    plan_id: str | None = Field(
        default=None, description="`get_plan` has the plan; None where none was kept"
    )
    certificate: Certificate | None = Field(
        default=None, description="of the plan; None where the options do not fit this mesh"
    )
    peak_memory: int | None = Field(default=None, description="bytes per device at the peak")
    reason: str = Field(default="", description="why there is no plan")
    error: str = Field(default="", description="why the options do not fit this mesh")


class MeshSearch(_Answered):
    """Every mesh of so many devices, and what came of planning for each."""

    meshes: tuple[SearchedMesh, ...] = Field(description="best first")


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The answer to a request for the best mesh.

    Attributes:
        search: None where the caller did not want to wait for it.
        cached: whether it was there before anybody asked this time.
        job_id: job that makes or made it; None where the service did not say.
        source: `service`, or `local` where it was made in this process.
    """

    search: MeshSearch | None
    cached: bool
    job_id: str | None = None
    source: Literal["service", "local"] = "service"


def rejected(problem: Mapping[str, Any], status: int = 500) -> RequestRejectedError:
    """The error that stands for problem details."""
    title = problem.get("title", "the service refused the request")
    detail = problem.get("detail", "it did not say why")
    status = int(problem.get("status", status))
    return RequestRejectedError(f"{title}: {detail}", status=status, problem=problem)


def read_job(document: Any) -> JobStatus:
    """A job from its JSON document.

    Raises:
        ServiceError: the document is not a job.
        PlanError: its result is not a plan that we understand.
    """
    try:
        metadata = document["metadata"]
        result = document.get("result")
        makes_plan = document.get("kind", "plan") == "plan"
        return JobStatus(
            id=str(document["id"]),
            plan_id=str(document.get("plan_id") or ""),
            state=str(document["state"]),
            done=bool(document["done"]),
            progress=read_progress(metadata, float(metadata["elapsed"])),
            plan=Plan.from_document(result) if makes_plan and result is not None else None,
            error=document.get("error"),
            result=None if makes_plan else result,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ServiceError(f"the service answered something that is no job: {error!r}") from error


def read_progress(document: Any, elapsed: float) -> JobProgress:
    """Progress from a JSON document that names the phase."""
    return JobProgress(
        phase=str(document["phase"]),
        incumbent=document.get("incumbent"),
        bound=document.get("bound"),
        gap=document.get("gap"),
        elapsed=elapsed,
    )
