"""Size of the optimization problem of a request."""

from pydantic import Field

from autoshard.plan.predictions import Bytes, Document


class ProblemSize(Document):
    """Size of the optimization problem of a request, and a lower bound of its memory."""

    num_nodes: int = Field(ge=0, description="variables: inputs, operators, shared values, outputs")
    num_edges: int = Field(ge=0, description="pairs of variables, one for each use of a value")
    num_strategies: int = Field(ge=0, description="total number of strategies of all variables")
    memory_bound: Bytes = Field(
        description="lower bound of every plan's peak memory: parameters, gradients, optimizer "
        "state, buffers and inputs, each sharded as far as possible"
    )
    memory_budget: Bytes = Field(description="limit of the peak memory, bytes per device")
    feasible: bool | None = Field(
        description="false if memory_bound exceeds memory_budget, so that no plan fits; null if "
        "that is only known after solving"
    )
