"""Plans of stages under a memory budget in a fraction of the time of a search.

The fastest plan of a stage, and plans in which what is kept over micro-batches has a price, are
combined with as few recomputed blocks as make them fit: the same plans from which the costs of
ranges are estimated. A search under the limit finds better plans where it has the time.
"""

import time
from bisect import bisect_left
from contextlib import suppress
from dataclasses import replace

from autoshard.base.outcome import SolveStatus
from autoshard.graph import Graph
from autoshard.mesh import Mesh
from autoshard.plan.document import Plan
from autoshard.plan.options import PlanOptions
from autoshard.planner.budget.rounds import FinishedPlan, Outcome, problem_sizes
from autoshard.planner.budget.search import BudgetSearch
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.formulation.stage_builder import Decisions
from autoshard.planner.pipeline.limits import SearchLimits, Stopped
from autoshard.planner.pipeline.range_costs import SHARES_OF_TIME, frugal
from autoshard.planner.planner import plan_document, plan_id
from autoshard.solve import KeyValueStore, Solution


class QuickPlanner:
    """Makes quick plans; stages that differ in their memory only share the solves.

    Args:
        limits: of the pipeline's search.
        block_cache: as for `make_plan`.
    """

    def __init__(self, limits: SearchLimits, block_cache: KeyValueStore | None = None) -> None:
        self._limits = limits
        self._block_cache = block_cache
        self._known: dict[str, tuple[Solution, list[Decisions]]] = {}

    def plan(self, graph: Graph, mesh: Mesh, options: PlanOptions) -> Plan | None:
        """A plan of a stage that fits into its budget; None if these plans do not.

        Args:
            graph: the stage's program.
            mesh: its sub-mesh.
            options: of its plan, in training.

        Raises:
            Stopped: the search was cancelled, or a problem had no solution in time.
        """
        start = time.perf_counter()
        # Few stages need much time, and those that do may take some of that of the others.
        most = max(options.solver.time_limit, self._limits.left / 2)
        limits = SearchLimits(most, self._limits.cancel, self._limits.max_strategies)
        formulation = limits.formulated(graph, mesh, options)
        key = plan_id(graph, mesh, options.with_values(in_flight=1))
        if key not in self._known:
            self._known[key] = self._solved(formulation, options, limits)
        solution, every = self._known[key]
        search = BudgetSearch(formulation, options)
        found = [
            plan
            for decisions in every
            if (plan := _fitted(search, formulation, decisions)) is not None
        ]
        if not found:
            return None
        best = min(found, key=lambda plan: plan.costs.total)
        outcome = Outcome(
            replace(solution, status=SolveStatus.FEASIBLE, objective=best.costs.total),
            problem_sizes(formulation.problem),
            best,
            lambda variable: variable,
        )
        seconds = {"solve": round(time.perf_counter() - start, 6)}
        return plan_document(formulation, outcome, None, options, seconds)

    def _solved(
        self, formulation: Formulation, options: PlanOptions, limits: SearchLimits
    ) -> tuple[Solution, list[Decisions]]:
        solution = limits.solve(formulation.problem, options, self._block_cache)
        assert solution.choice is not None
        prices = (
            share * solution.objective / formulation.prices.memory_budget
            for share in SHARES_OF_TIME
        )
        found = [Decisions(solution.choice)]
        for price in prices:
            # What is late is left out, unless the whole request is cancelled.
            with suppress(Stopped):
                found.append(frugal(formulation, options, price, limits, self._block_cache))
        if limits.is_cancelled:
            raise limits.stopped()
        return solution, found


def _fitted(
    search: BudgetSearch, formulation: Formulation, decisions: Decisions
) -> FinishedPlan | None:
    """The plan of some decisions with as few recomputed blocks as fit; None if none fit."""
    blocks = formulation.checkpoint_units
    budget = formulation.prices.memory_budget
    made: dict[int, FinishedPlan] = {}

    def fits(number: int) -> bool:
        if number not in made:
            chosen = replace(decisions, checkpoints=blocks[:number])
            made[number] = search.build(chosen)
        return made[number].memory.peak <= budget

    if not fits(len(blocks)):
        return None
    # Log2(blocks) plans instead of one for each number. If more recomputed blocks need more memory
    # somewhere, the number may not be the least, but it is one that was tried and fits.
    number = bisect_left(range(len(blocks)), True, key=fits)
    return made[number] if number in made else made[len(blocks)]
