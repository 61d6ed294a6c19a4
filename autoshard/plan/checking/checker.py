"""The independent checker: is a plan legal, and does it cost what it says?

It shares with the planner the rules, the table of steps and the prices of single things,
and nothing else: no problem, no solver, no strategy enumeration. It walks the program as a
runtime would, from layout to layout.
"""

from collections.abc import Iterator
from math import isclose

from autoshard.collection import collection_paused
from autoshard.errors import InputError
from autoshard.graph import Graph, graph_digest, graph_from_json
from autoshard.outcome import SolveStatus, relative_gap
from autoshard.plan.checking.resharding_check import TOLERANCE
from autoshard.plan.checking.stage_check import StageCheck
from autoshard.plan.document import Plan
from autoshard.plan.memory.counting import count_collectives


@collection_paused()
def check_plan(plan: Plan, graph: Graph | None = None) -> tuple[str, ...]:
    """Everything that is wrong with a plan; empty if it is right.

    Args:
        plan: the plan.
        graph: the program that it should be a plan of; the one inside the plan if None.
    """
    if not plan.found:
        return (f"there is no plan to check: {plan.reason}",)
    try:
        return tuple(_findings(plan, graph))
    except InputError as error:
        return (str(error),)


def _findings(plan: Plan, graph: Graph | None) -> Iterator[str]:
    programs = [graph_from_json(stage.program, known=graph) for stage in plan.stages]
    for stage, program in zip(plan.stages, programs, strict=True):
        if graph_digest(program) != plan.graph.digest:
            yield f"{stage.name}: the program inside is not the one the plan names"
        if graph is not None and graph_digest(graph) != plan.graph.digest:
            yield "the plan was made for another graph"
        yield from StageCheck(plan, stage, program).findings()
    if plan.collectives != count_collectives(plan.stages, programs):
        yield "the table of collectives does not add up to the reshardings"
    yield from _certificate_findings(plan)


def _certificate_findings(plan: Plan) -> Iterator[str]:
    assert plan.costs is not None
    certificate = plan.certificate
    costs = plan.costs
    spent = costs.compute + costs.communication + costs.optimizer + costs.recompute
    parts = spent - costs.overlapped
    if not isclose(plan.costs.total, parts, rel_tol=TOLERANCE):
        yield f"total cost {plan.costs.total} is not the sum of its parts {parts}"
    if certificate.objective is None:
        yield "a plan needs a certificate with an objective"
        return
    if not isclose(certificate.objective, plan.costs.total, rel_tol=TOLERANCE):
        yield f"objective {certificate.objective} is not the total cost {plan.costs.total}"
    if certificate.bound is None or certificate.gap is None:
        if certificate.bound is not certificate.gap or certificate.status is SolveStatus.OPTIMAL:
            yield "a gap needs a bound, a bound has a gap, and an optimum has both"
        return
    if certificate.bound > certificate.objective * (1 + TOLERANCE):
        yield f"bound {certificate.bound} is above the objective {certificate.objective}"
    gap = relative_gap(certificate.objective, certificate.bound)
    if abs(gap - certificate.gap) > TOLERANCE:
        yield f"gap {certificate.gap} does not follow from objective and bound ({gap})"
