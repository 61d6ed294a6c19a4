"""A usage limit that binds in a wide problem: tables find the prices, messages the bound.

A core of strategies that are good at some prices of usage is solved under the limit, by the
same means as any problem with runs. The prices that are best for it are then put to all
strategies: messages at these prices prove a bound, and show which strategies the core lacks.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from autoshard.arrays import BoolArray
from autoshard.solve.narrowing.core import Core, one_per_run
from autoshard.solve.narrowing.minimising import Narrowing, SolveCore, cheapest
from autoshard.solve.problem import USAGE_TOLERANCE
from autoshard.solve.repeats import Outcome, Pricing, Watch
from autoshard.solve.search import Search
from autoshard.solve.warm_start import WarmStart

_ELASTICITIES = (0.4, 3.0)
"""Guesses of the price of all usage that is allowed, in terms of the least price of a choice."""
_ROUGH = 0.01
"""Relative difference that may be left between choice and bound at a guess."""
_WIDTH = 12
"""Strategies of a place that are added to a core at once."""
_FIRST_SWEEPS, _MORE_SWEEPS = 12, 6
_MOST_CORES = 3
_CORE_SHARE = 0.6
"""Share of the time there is that a core may take."""
_NEWS = 0.2
"""Share of the gap that a core and its bound must close to be followed by another one."""
_STEEP = 1e6
"""Price of all usage that is allowed, in terms of the most that a choice can cost."""


class LimitedCore:
    """Tell the search bounds and choices of a wide problem whose limit binds.

    Args:
        search: of the problem.
        narrowing: minimises the problem for other costs, its limit aside.
        solve: solves cores.
    """

    def __init__(self, search: Search, narrowing: Narrowing, solve: SolveCore) -> None:
        self._search = search
        self._problem = search.problem
        self._narrowing = narrowing
        self._folded = narrowing.folded
        self._solve = solve
        self._watch = Watch(search.problem, self._folded.runs)
        self._pricing = Pricing(search, self._watch, partial(narrowing.minimise, rough=True))
        for choice in search.warm_start.best_choices:
            self._pricing.see(choice)

    def run(self) -> Outcome:
        """Solve cores until a choice is proven good enough, or another one brings little.

        Returns:
            INFEASIBLE where no choice keeps the limit; the statistic `minimum_usage` is then
            a limit that one keeps.
        """
        search, warm_start = self._search, self._search.warm_start
        follows = warm_start.restricted is not None
        if not follows:
            self._set_core(self._first_masks())
        if self._problem.usage_limit <= warm_start.proven[0]:
            search.raise_bound(warm_start.proven[1])
        for _ in range(_MOST_CORES):
            gap = search.objective - search.bound
            self._solve_core()
            if search.choice is None:
                if not self._is_possible():
                    return Outcome.INFEASIBLE
                self._set_core(self._narrowing.tried)
                continue
            if search.closed or follows:
                break
            self._prove()
            closed = gap - (search.objective - search.bound)
            if search.closed or closed <= _NEWS * gap < np.inf:
                break
        return Outcome.TOLD

    def _first_masks(self) -> list[BoolArray]:
        """Strategies that others think likely, or that are good at some prices of usage."""
        likely = self._search.warm_start.candidates
        if likely:
            return [likely[place.nodes[0]].copy() for place in self._folded.places]
        self._watch_most()
        price = max(self._search.bound, USAGE_TOLERANCE)
        price /= max(self._problem.usage_limit, USAGE_TOLERANCE)
        for elasticity in _ELASTICITIES:
            self._pricing.ask(np.array([elasticity * price]), slack=_ROUGH)
        return self._narrowing.tried

    def _watch_most(self) -> None:
        """Watch the time at which most can be used, where no other one is watched."""
        if not self._watch.weights:
            self._watch.add(np.array([usage.max() for usage in self._watch.usage]))

    def _set_core(self, masks: Sequence[BoolArray]) -> None:
        """Make some strategies of each place the core; those that it has already stay."""
        warm_start, inner = self._search.warm_start, WarmStart()
        if warm_start.restricted is not None:
            masks = [mask.copy() for mask in masks]
            for place, mask in zip(self._folded.places, masks, strict=True):
                mask[warm_start.restricted[0].kept[place.nodes[0]]] = True
        costs = [self._problem.nodes[place.nodes[0]].cost for place in self._folded.places]
        core = Core.of(self._problem, self._folded, one_per_run(self._folded, masks), costs=costs)
        if warm_start.restricted is not None:
            old, seen = warm_start.restricted
            inner.best_choices = [core.part(old.whole(choice)) for choice in seen.best_choices]
            inner.swap_options = [
                tuple(core.part(old.whole(choice)) for choice in some) for some in seen.swap_options
            ]
        warm_start.restricted = core, inner

    def _solve_core(self) -> None:
        """Solve the core under the limit, and see the choices that were best at prices."""
        search, warm_start = self._search, self._search.warm_start
        search.enter("solve a core")
        search.count("narrowing.cores")
        assert warm_start.restricted is not None
        core, inner = warm_start.restricted
        limited = replace(core.problem, usage_limit=self._problem.usage_limit)
        seconds = _CORE_SHARE * search.remaining
        solution = self._solve(
            limited, seconds, gap=search.gap, bound=search.bound, warm_start=inner
        )
        if solution.choice is not None:
            search.offer(core.whole(solution.choice))
        known = {choice.tobytes() for choice in warm_start.best_choices}
        for choice in map(core.whole, inner.best_choices):
            if choice.tobytes() not in known:
                self._pricing.see(choice)
                warm_start.best_choices.append(choice)
        search.check()

    def _prove(self) -> None:
        """Bound all choices at the prices that are best for those seen, and let the core grow."""
        warm_start, limit = self._search.warm_start, self._problem.usage_limit
        if not warm_start.best_choices or not self._watch.weights:
            return
        prices = self._pricing.best_prices(limit)
        if not prices.any():
            return
        sweeps = _FIRST_SWEEPS if np.isinf(warm_start.proven[0]) else _MORE_SWEEPS
        bound, least = self._narrowing.bounds(self._pricing.priced(prices), sweeps)
        self._search.raise_bound(self._pricing.proven(bound, prices))
        warm_start.proven = limit, self._search.bound
        if not self._search.closed and warm_start.restricted is not None:
            self._set_core([cheapest(bounds, _WIDTH) for bounds in least])

    def _is_possible(self) -> bool:
        """Look for a choice that keeps the limit; False if it is proven that none does.

        At a price of usage beyond all other costs, the least total shows the least usage.
        """
        search, problem, limit = self._search, self._problem, self._problem.usage_limit
        search.enter("find the least usage")
        self._watch_most()
        most = problem.most
        steep = _STEEP * max(most, USAGE_TOLERANCE) / max(limit, USAGE_TOLERANCE)
        with self._narrowing.aside():
            excess = self._pricing.ask(np.array([steep]), slack=USAGE_TOLERANCE)
        if excess is None or excess <= most + steep * limit * USAGE_TOLERANCE:
            return True
        peaks = [problem.peak_usage(point.choice) for point in self._pricing.points]
        search.statistics["minimum_usage"] = min(peaks)
        return False
