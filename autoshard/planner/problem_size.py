"""How large a request is, and whether memory rules it out, without solving it."""

import numpy as np
from pydantic import Field

from autoshard.collection import collection_paused
from autoshard.graph import Graph
from autoshard.mesh import Mesh
from autoshard.plan.constraints import plan_constraints
from autoshard.plan.document import Bytes, Document
from autoshard.plan.nontrivial_axes import NontrivialAxes
from autoshard.plan.options import PlanOptions
from autoshard.plan.pricing import Prices
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.formulation.variables import Role, Variable
from autoshard.planner.planner import check_mode, check_size


class ProblemSize(Document):
    """What there is to choose from, and the least that any choice holds."""

    num_nodes: int = Field(ge=0, description="choices: inputs, operators, shared values, outputs")
    num_edges: int = Field(ge=0, description="pairs of choices that meet in a use of a value")
    num_strategies: int = Field(ge=0, description="strategies of all choices together")
    memory_bound: Bytes = Field(
        description="what every plan holds at once at least: parameters, gradients, optimizer "
        "state, buffers and inputs, each cut as far as it can be"
    )
    memory_budget: Bytes = Field(description="what a plan must fit in")
    feasible: bool | None = Field(
        description="false where memory_bound exceeds memory_budget, so that no plan fits; null "
        "where only solving would tell"
    )


@collection_paused()
def problem_size(
    graph: Graph,
    mesh: Mesh,
    options: PlanOptions | None = None,
    *,
    max_strategies: int | None = None,
) -> ProblemSize:
    """Formulate a request, and say how large it is.

    Args:
        graph: the normalised program.
        mesh: the devices and what communication over them costs.
        options: as for `make_plan`.
        max_strategies: of all choices together; a larger problem is refused.

    Raises:
        GraphError: the graph cannot be planned in the mode asked for.
        OptionError: an option makes no sense, or leaves something nothing to choose from, or
            the problem is larger than allowed.
    """
    options = options or PlanOptions()
    check_mode(graph, options)
    prices = Prices(mesh, options)
    constraints = plan_constraints(graph, mesh, options)
    formulation = Formulation(graph, NontrivialAxes.of(mesh), prices, constraints=constraints)
    check_size(formulation, max_strategies)
    inputs = (v for v in formulation.variables if v.role is Role.INPUT)
    bound = sum(_least_bytes(variable) for variable in inputs)
    return ProblemSize(
        num_nodes=len(formulation.variables),
        num_edges=len(formulation.arcs),
        num_strategies=sum(len(v.strategies) for v in formulation.variables),
        memory_bound=bound,
        memory_budget=prices.memory_budget,
        feasible=False if bound > prices.memory_budget else None,
    )


def _least_bytes(variable: Variable) -> int:
    """Bytes per device of the strategy that holds least, of those that are allowed."""
    held = sum(variable.usage.values(), np.zeros(len(variable.strategies)))
    allowed = held[np.isfinite(variable.time)]
    return int(allowed.min()) if allowed.size else 0
