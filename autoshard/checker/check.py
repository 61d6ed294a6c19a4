"""Independent checker: verifies that a plan is valid and that its stated costs are correct.

It shares only the operator rules, the table of resharding steps, the prices of single operators,
steps and messages, and the simulation of schedules with the planner. It builds no optimization
problem and enumerates no strategies, but follows the layouts through the program in execution
order.
"""

from collections.abc import Iterator

from autoshard.base.collection import collection_paused
from autoshard.checker.pipelines import pipeline_findings
from autoshard.checker.stages import StageCheck, certificate_findings
from autoshard.errors import InputError
from autoshard.graph import Graph, GraphLike, graph_digest, graph_from_json, to_graph
from autoshard.lowering.instructions import count_collectives
from autoshard.plan.document import Plan


@collection_paused()
def check_plan(plan: Plan, graph: "GraphLike | None" = None) -> tuple[str, ...]:
    """The errors of a plan, one message each; empty if it is valid.

    Args:
        plan: the plan.
        graph: the program that the plan should be for, or what `load_graph` reads; by default
            the one in the plan. A pipeline
            contains only the parts of its stages, which can then not be compared with the program.
    """
    if not plan.found:
        return (f"there is no plan to check: {plan.reason}",)
    return tuple(_findings_or_error(plan, None if graph is None else to_graph(graph)))


def _findings_or_error(plan: Plan, graph: Graph | None) -> Iterator[str]:
    try:
        yield from _findings(plan, graph)
    except InputError as error:
        yield str(error)


def _findings(plan: Plan, graph: Graph | None) -> Iterator[str]:
    assert plan.costs is not None
    assert plan.memory is not None
    is_same = graph is not None and graph_digest(graph) == plan.graph.digest
    if graph is not None and not is_same:
        yield "the plan was made for another graph"
    if plan.pipeline is not None:
        yield from pipeline_findings(plan, plan.pipeline, graph if is_same else None)
    else:
        (stage,) = plan.stages
        program = graph_from_json(stage.program, known=graph)
        if graph_digest(program) != plan.graph.digest:
            yield f"{stage.name}: the program inside is not the one the plan names"
        check = StageCheck(
            stage, program, plan.mesh, plan.options, costs=plan.costs, memory=plan.memory
        )
        yield from check.findings()
        if plan.collectives != count_collectives(plan.stages, [program]):
            yield "the table of collectives does not add up to the reshardings"
    yield from certificate_findings(plan.certificate, plan.costs)
