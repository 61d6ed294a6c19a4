"""Results of jobs that make no plan, as documents."""

from pydantic import Field

from autoshard.mesh import Mesh
from autoshard.plan import Certificate
from autoshard.plan.document import Document
from autoshard.planner import ProblemSize


class Validation(Document):
    """What a request would ask of the solver."""

    plan_id: str = Field(description="id that the plan would have")
    size: ProblemSize


class SearchedMesh(Document):
    """One mesh of a search, and what came of planning for it."""

    mesh: Mesh
    plan_id: str | None = Field(
        default=None, description="GET /v1/plans/{id} has the plan; null where none is kept"
    )
    certificate: Certificate | None = None
    peak_memory: int | None = Field(default=None, description="bytes per device at the peak")
    reason: str = Field(default="", description="why there is no plan")
    error: str = Field(default="", description="why the options do not fit this mesh")


class MeshSearch(Document):
    """Every mesh of so many devices."""

    meshes: tuple[SearchedMesh, ...] = Field(description="best first")
