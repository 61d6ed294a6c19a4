"""Plans of stages under a memory budget in a fraction of the time of a search.

The fastest plan of a stage, and plans in which what is kept over micro-batches has a price, are
combined with as few recomputed blocks as make them fit: the same plans from which the costs of
ranges are estimated. A search under the limit finds better plans where it has the time.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

from autoshard.graph import Graph
from autoshard.mesh import Mesh
from autoshard.outcome import SolveStatus
from autoshard.plan.document import Plan
from autoshard.plan.options import PlanOptions
from autoshard.planner.budget_rounds import StagePlan
from autoshard.planner.budget_search import BudgetSearch, Outcome
from autoshard.planner.formulation import Formulation
from autoshard.planner.pipeline.limits import SearchLimits
from autoshard.planner.pipeline.range_costs import SHARES_OF_TIME, fastest, frugal
from autoshard.planner.planner import plan_document
from autoshard.planner.stage_builder import Decisions
from autoshard.solve import KeyValueStore, Solution

_LEAST_TIME_LIMIT = 30.0
"""Least time limit of a quick plan, seconds; few need so much."""


def quick_plan(
    graph: Graph,
    mesh: Mesh,
    options: PlanOptions,
    limits: SearchLimits,
    block_cache: KeyValueStore | None = None,
) -> Plan | None:
    """A plan of a stage that fits into its budget; None if these plans do not.

    Args:
        graph: the stage's program.
        mesh: its sub-mesh.
        options: of its plan, in training.
        limits: of the pipeline's search.
        block_cache: as for `make_plan`.

    Raises:
        Stopped: the search was cancelled, or a problem had no solution in time.
    """
    start = time.perf_counter()
    # The search of the pipeline may have used its time.
    seconds = max(options.time_limit, _LEAST_TIME_LIMIT)
    limits = SearchLimits(seconds, limits.cancel, limits.max_strategies)
    formulation = Formulation.of(graph, mesh, options)
    solution = fastest(formulation, options, limits, block_cache)
    search = BudgetSearch(formulation, options)
    best: StagePlan | None = None
    for decisions in _decisions(formulation, options, solution, limits, block_cache):
        found = _fitted(search, formulation, decisions)
        if found is not None and (best is None or found.costs.total < best.costs.total):
            best = found
    if best is None:
        return None
    status = SolveStatus.FEASIBLE
    outcome = Outcome(
        replace(solution, status=status, objective=best.costs.total),
        formulation.problem,
        best,
        lambda variable: variable,
    )
    spent = {"solve": round(time.perf_counter() - start, 6)}
    return plan_document(formulation, outcome, None, options, spent)


def _decisions(
    formulation: Formulation,
    options: PlanOptions,
    solution: Solution,
    limits: SearchLimits,
    block_cache: KeyValueStore | None,
) -> Iterator[Decisions]:
    assert solution.choice is not None
    yield Decisions(solution.choice)
    for share in SHARES_OF_TIME:
        price = share * solution.objective / formulation.prices.memory_budget
        yield frugal(formulation, options, price, limits, block_cache)


def _fitted(
    search: BudgetSearch, formulation: Formulation, decisions: Decisions
) -> StagePlan | None:
    """The plan of some decisions with as few recomputed blocks as fit; None if none fit."""
    blocks = [nodes for block in formulation.blocks for nodes in block.instances()]
    budget = formulation.prices.memory_budget
    made: dict[int, StagePlan] = {}

    def fits(number: int) -> bool:
        if number not in made:
            chosen = replace(decisions, checkpoints=tuple(blocks[:number]))
            made[number] = search.build(chosen)
        return made[number].memory.peak <= budget

    if not fits(len(blocks)):
        return None
    number = bisect_left(range(len(blocks)), True, key=fits)
    return made[number] if number in made else made[len(blocks)]
