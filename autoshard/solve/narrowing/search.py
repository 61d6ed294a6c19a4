"""Solving wide problems: bounds for all strategies, tables for the few that matter.

Messages bound the price of every strategy at a cost that grows with the number of
strategies, not with its square. The strategies with the least bounds make a *core*, a
problem of the same form that is solved by tables. What the core leaves out costs at least
the least bound of a strategy left out, so the answer has a proven bound; where that is not
good enough, messages are improved and the core grows around the best choice.
"""

import numpy as np

from autoshard.solve.narrowing.folded import Folded
from autoshard.solve.narrowing.limited import LimitedCore
from autoshard.solve.narrowing.minimising import Narrowing, SolveCore
from autoshard.solve.repeats import Outcome, independent_runs
from autoshard.solve.search import Search

_WIDE = 100.0
"""Mean number of strategies of a place from which on narrowing pays."""


def solve_narrowed(search: Search, solve: SolveCore) -> Outcome:
    """Tell the search choices and bounds of a wide problem.

    Args:
        search: of the problem.
        solve: solves cores.
    """
    problem, warm_start = search.problem, search.warm_start
    if problem.ties or not (problem.repeats or problem.has_path_costs):
        return Outcome.NOTHING
    folded = Folded(problem, independent_runs(problem))
    sizes = [problem.nodes[place.nodes[0]].num_strategies for place in folded.places]
    if float(np.mean(sizes)) < _WIDE and not problem.has_path_costs:
        return Outcome.NOTHING
    narrowing = Narrowing(search, folded, solve)
    if warm_start.unlimited_bound is None:
        bound = _minimise(search, narrowing)
        if bound == np.inf:
            return Outcome.INFEASIBLE
        if search.choice is not None or not warm_start.best_choices:
            return Outcome.TOLD
        warm_start.unlimited_bound = bound
    search.raise_bound(warm_start.unlimited_bound)
    return LimitedCore(search, narrowing, solve).run()


def _minimise(search: Search, narrowing: Narrowing) -> float:
    """Tell the search the best choice without the limit; if it breaks it, the warm_start begins.

    Returns:
        a lower bound.
    """
    costs = [node.cost for node in search.problem.nodes]
    # A limit that binds makes the best choice without it worth little.
    for rough in (True, False) if search.problem.can_bind else (False,):
        bound, choice = narrowing.minimise(costs, search.gap, rough=rough, tell=search.raise_bound)
        if search.closed or search.choice is None:
            break
    if choice is not None and search.choice is None:
        search.warm_start.best_choices.append(choice)
    places = narrowing.folded.place_of
    search.warm_start.strategy_bounds = [
        narrowing.least[places[v]] for v in range(len(search.problem.nodes))
    ]
    return bound
