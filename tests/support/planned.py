"""A fixture that plans and checks."""

from typing import Any

import pytest
from support.models import Case, Planner, graph_of, meta, mlp

from autoshard.checker import check_plan
from autoshard.graph import Graph
from autoshard.mesh import Mesh, make_mesh
from autoshard.plan import Plan, PlanOptions
from autoshard.planner import make_plan


@pytest.fixture(scope="session")
def planned() -> Planner:
    """Plans a case or a graph, and asserts that the checker finds nothing wrong."""

    def plan(model: Case | Graph, mesh: Mesh | tuple[int, ...], **options: Any) -> Plan:
        graph = model if isinstance(model, Graph) else graph_of(model)
        mesh = mesh if isinstance(mesh, Mesh) else make_mesh(mesh)
        made = make_plan(graph, mesh, PlanOptions(**options))
        if made.found:
            assert check_plan(made, graph) == ()
        return made

    return plan


@pytest.fixture(scope="session")
def megatron(planned: Planner) -> Plan:
    """A plan with every kind of part: a tensor-parallel MLP with one token."""
    return planned(meta(mlp, 1, 8192, 32768, 8192), (2, 2))
