"""Networks that are too wide for tables: exact on most of their links, messages on the rest.

Messages take most of the price out of the links. What they leave is nowhere negative, so a
link can be left out and what remains is a lower bound; and where messages have done well, most
links are left with little. Without the weakest ones the network is narrow enough to be solved
by elimination, which bounds every strategy as well. That drops most strategies, so that the
next time fewer links are left out, until none is and the answer is exact. With all but a
forest of links left out it is what `narrowing` does for wide problems; mini-buckets with cost
shifting (Ihler et al., UAI 2012) are near to it.
"""

from collections.abc import Callable, Iterable

import numpy as np

from autoshard.arrays import FloatArray
from autoshard.solve.ascent import Ascent
from autoshard.solve.descent import Descent
from autoshard.solve.elimination import MOST_WORK, Elimination
from autoshard.solve.network import Link, Network
from autoshard.solve.orders import Order, best_order
from autoshard.solve.stage import Stage

_LEAST_PAIRS = 20_000
"""Entries of matrices up to which a linear program is as quick."""
_FIRST_WORK, _GROWTH = 3e7, 10.0
"""Additions that a part may take at first, and how many times more where that brings little."""
_MOST_ENTRIES = 4e7
_MOST_ROUNDS = 12
_ASCENT_SHARE = 0.2
"""Share of the time that remains for the messages of one round."""
_NOTABLE = 0.1
"""Share of the strategies or of the gap that a round must drop to be as good as the next one."""
_FEW_TRIES, _MANY_TRIES = 2, 8
_LOTS = 12
"""Lots in which links are added that say less than one that did not fit."""


def thin(stage: Stage) -> None:
    """Solve a network without usage, or bound it and drop what cannot matter.

    Args:
        stage: the reduced problem.
    """
    search, work = stage.search, _FIRST_WORK
    for _ in range(_MOST_ROUNDS):
        if stage.done or search.closed or work > MOST_WORK or _num_pairs(stage) < _LEAST_PAIRS:
            return
        search.enter("pass messages")
        ascent = Ascent(stage)
        least = ascent.run(_ASCENT_SHARE * search.remaining)
        if search.closed:
            return
        search.enter("solve most links")
        before, gap = _num_strategies(stage), search.objective - search.bound
        left, slack = ascent.remaining()
        part = _Part(left, work, room=max(gap, slack), check=search.check)
        bounds = part.solve(slack)
        if bounds is None:
            return
        search.count("thinning.rounds")
        search.count("thinning.links", float(part.num_left_out))
        stage.raise_bound(part.bound)
        better = Descent(stage.network, check=search.check).improve(part.picks)
        stage.offer(better)
        if search.closed:
            return
        stage.drop_hopeless({v: np.maximum(least[v], bounds[v]) for v in bounds})
        stage.reduce()
        closed = search.objective - search.bound <= (1.0 - _NOTABLE) * gap < np.inf
        closed = closed or search.objective < np.inf == gap
        if not closed and _num_strategies(stage) > (1.0 - _NOTABLE) * before:
            work *= _GROWTH


def _num_pairs(stage: Stage) -> int:
    return sum(link.matrix.values.size for _, _, link in stage.network.pairs())


def _num_strategies(stage: Stage) -> int:
    return sum(len(variable.cost) for variable in stage.network.variables.values())


class _Part:
    """As many of a network's links as can be solved with so many additions.

    Args:
        network: no price of its links is negative, up to rounding.
        work: additions.
        room: prices beyond it are as good as infinite.
        check: called now and then; raises to stop.

    Attributes:
        bound: lower bound of all choices of the network.
        picks: a position per variable that attains it in the part.
        num_left_out: links that are not in the part.
    """

    def __init__(
        self, network: Network, work: float, *, room: float, check: Callable[[], None]
    ) -> None:
        self.bound = -float("inf")
        self.picks: dict[int, int] = {}
        self._network = network
        self._work = work
        self._check = check
        self._sizes = {v: len(x.cost) for v, x in network.variables.items()}
        weights = {(u, v): _weight(link, room) for u, v, link in network.pairs()}
        self._links = sorted(weights, key=lambda pair: (-weights[pair], pair))
        self._kept = self._most()
        self.num_left_out = len(self._links) - len(self._kept)

    def solve(self, slack: float) -> dict[int, FloatArray] | None:
        """Solve the part.

        Args:
            slack: what rounding may add.

        Returns:
            a lower bound of all choices with each strategy of each variable, shape [S]; None
            where tables would be too large after all.
        """
        part, kept = self._network.copy(), set(self._kept)
        for u, v in self._links:
            if (u, v) not in kept:
                values = part.links[u][v].dense()
                part.constant += float(values.min())
                part.disconnect(u, v)
        order = self._order(self._kept, _MANY_TRIES)
        plan = Elimination.compile(part, order=order.variables, check=self._check)
        if plan is None:
            return None
        costs = {v: x.cost for v, x in part.variables.items()}
        result = plan.evaluate(costs, check=self._check)
        self.bound, self.picks = result.value - slack, result.picks
        marginals = plan.min_marginals(result, check=self._check)
        return {v: bounds - slack for v, bounds in marginals.items()}

    def _most(self) -> list[tuple[int, int]]:
        """The links that say most, as many as fit; then others that fit beside them."""
        if self._fits(self._links, _MANY_TRIES):
            return self._links
        low, high = 0, len(self._links)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(self._links[:middle]) else (low, middle)
        kept, rest = self._links[:low], self._links[low:]
        size = max(1, -(-len(rest) // _LOTS))
        for start in range(0, len(rest), size):
            more = [*kept, *rest[start : start + size]]
            kept = more if self._fits(more) else kept
        return kept

    def _fits(self, links: Iterable[tuple[int, int]], tries: int = _FEW_TRIES) -> bool:
        order = self._order(links, tries)
        return order.work <= self._work and order.entries <= _MOST_ENTRIES

    def _order(self, links: Iterable[tuple[int, int]], tries: int) -> Order:
        neighbours: dict[int, set[int]] = {v: set() for v in self._sizes}
        for u, v in links:
            neighbours[u].add(v)
            neighbours[v].add(u)
        return best_order(self._sizes, neighbours, tries, check=self._check)


def _weight(link: Link, room: float) -> float:
    """How much a link says: the mean of its prices, as far as they matter."""
    return float(np.minimum(link.dense(), room).mean())
