"""Plans that a plan is compared with: usual kinds of parallelism, and no restrictions."""

from pydantic import Field

from autoshard.plan.options import Family
from autoshard.plan.predictions import (
    Bytes,
    Certificate,
    CollectiveCount,
    Costs,
    Document,
    Memory,
    Performance,
)


class RunAgain(Document):
    """Gathers of parameters, and repeated blocks, that backward runs again to save memory."""

    gathered: int = Field(ge=0, description="parameters that are gathered for use")
    gathered_again: int = Field(ge=0, description="of these, those that backward gathers again")
    blocks: int = Field(
        ge=0, description="repeated blocks, or modules that options name, that can be recomputed"
    )
    recomputed: int = Field(ge=0, description="of these, those that backward recomputes")


class Baseline(Document):
    """The fastest plan of one stage on the same devices within the pattern of a usual parallelism.

    It has the plan's mode, optimizer and memory budget, but none of its restrictions, and the mesh
    of its own that is fastest. The option `algo` on a mesh of `axes` plans it by itself. Either it
    has costs and memory, or `reason` says why there is none.
    """

    algo: Family = Field(description="value of the option `algo` that makes this plan")
    name: str = Field(description="name of the parallelism, such as 'FSDP2 (ZeRO-3)'")
    axes: tuple[tuple[str, int], ...] = Field(
        default=(), description="name and size of each axis of its mesh, outermost first"
    )
    distributed_optimizer: bool = Field(
        default=False,
        description="true if parameters and optimizer are sharded over the data-parallel axes "
        "(ZeRO-1)",
    )
    micro_batches: int = Field(
        default=1,
        ge=1,
        description="number of micro-batches of a step: that of the plan, or, beside a pipeline "
        "whose micro-batches were chosen, the one chosen for one stage",
    )
    certificate: Certificate | None = Field(
        default=None,
        description="among the plans of the pattern on these axes; null if nothing was planned",
    )
    costs: Costs | None = None
    memory: Memory | None = None
    performance: Performance | None = None
    collectives: tuple[CollectiveCount, ...] = ()
    reason: str = Field(default="", description="why there is no such plan; empty if there is one")
    needed_memory: Bytes | None = Field(
        default=None,
        description="if it does not fit the memory budget, the smallest peak of such a plan that "
        "was found",
    )
    again: RunAgain | None = Field(
        default=None, description="what backward gathers and computes again"
    )
    remarks: tuple[str, ...] = Field(
        default=(), description="where the pattern could not be followed to the letter"
    )

    @property
    def found(self) -> bool:
        """True if the pattern is possible on this mesh and fits the memory budget."""
        return self.costs is not None

    @property
    def step_time(self) -> float | None:
        """Predicted seconds of a step; None if there is no plan."""
        return None if self.costs is None else self.costs.total


class Unrestricted(Document):
    """The fastest plan without the restrictions of the options, which says what they cost."""

    restrictions: tuple[str, ...] = Field(description="the options that were left out")
    certificate: Certificate
    costs: Costs | None = None
    memory: Memory | None = None
    performance: Performance | None = None
    collectives: tuple[CollectiveCount, ...] = ()
    bubble: float | None = Field(
        default=None, description="share of the step in which ranks of a pipeline are idle"
    )

    @property
    def step_time(self) -> float | None:
        """Predicted seconds of a step; None if no plan was found."""
        return None if self.costs is None else self.costs.total
