"""Large-neighbourhood search over random induced forests.

A random set of variables that the links join to a forest is optimised at once, with all other
variables fixed and with prices on usage: dynamic programming from the leaves to the roots. Its
changes fall into components without links between them, so the prices of components add up, and
so do their usages. Those that lower the price most and keep the usage limits together are
chosen by a small integer program (a knapsack with one row per time). A forest has about half of the
variables of a network with a few links each, so one round takes about as long as a sweep of
messages. (Forests as neighbourhoods: Hamze and de Freitas, UAI 2004.)

A variable with dozens of links is in few forests, and its neighbours, fixed at strategies that suit
its own, keep it as it is. So the strategies of variables are tried one after the other, most links
first, and from the start after a notable gain: a variable keeps the strategy while a dozen forests
follow, each from the choice of the one before, and each choice is combined with the best one. A
choice that after two forests still exceeds the best by more than that exceeds the bound is given
up.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import sparse

from autoshard.base.arrays import BoolArray, FloatArray, IntArray
from autoshard.solve.network import Network, NetworkLink, UsageTable, component_labels
from autoshard.solve.programs.highs import integer_point
from autoshard.solve.reduced_problem import ReducedProblem
from autoshard.solve.settings import DEFAULT_EFFORT, Effort

_DESCENTS = 3
_KEPT_DESCENTS = 12
_LEAST_DESCENTS = 2
"""Forests from a choice that messages round, and while a variable keeps a strategy; forests after
which a choice may be given up."""
_KNAPSACK_NODES = 200
_KNAPSACK_ROUNDS = 12
_KNAPSACK_ROWS = 10
"""Branch-and-bound nodes of an integer program, integer programs to combine two choices, and times
added to each of them."""
_PRICE_FOLLOW = 0.05
_PRICE_SPREAD = 0.5
"""Share by which the mean logarithm of the factor of prices follows gains; its deviation."""
_STALLED_GAIN = 1e-6
"""Relative gain of a choice that is notable."""

_SIDES = (4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of strategies that variables are padded to, so that more links stack."""
_TOLERANCE = 2e-6
"""Tolerance of the integer program, with coefficients of at most one."""
_KNAPSACK_GAP = 1e-3


def search_forests(reduced: ReducedProblem, prices: FloatArray) -> None:
    """Improve the best choice until it stalls or the time is over.

    Args:
        reduced: the problem; without a known choice, nothing is done.
        prices: of usage at each checkpoint, near those of the best Lagrangian bound, shape [T].
    """
    state, settings = reduced.state, reduced.state.settings
    picks = None if state.choice is None else reduced.pick_of(state.choice)
    if picks is None or reduced.done:
        return
    state.enter("search forests")
    search = ForestSearch(reduced.network, seed=state.seed, effort=state.effort)
    current = np.array([picks[v] for v in search.variables], dtype=np.intp)
    num_forests, num_stalled, turn, shift = 0, 0, 0, 0.0
    while not state.closed and num_stalled < settings.forest_patience:
        state.check()
        # The best prices of a part differ from those of the whole.
        drawn = shift + _PRICE_SPREAD * float(search.rng.standard_normal())
        gap = state.objective - state.bound
        better = search.step(current, np.exp(drawn) * prices, turn=turn, gap=gap)
        turn += 1
        num_new = search.num_forests - num_forests
        num_forests += num_new
        state.count("forests", num_new)
        num_stalled += num_new
        if better is None:
            continue
        if not reduced.offer(dict(zip(search.variables, better.tolist(), strict=True))):
            continue
        gain = search.price(current) - search.price(better)
        current = better
        if gain > _STALLED_GAIN * state.magnitude:
            num_stalled, turn = 0, 0
        shift += _PRICE_FOLLOW * (drawn - shift)
        state.count("forests.better")


@dataclass(frozen=True, slots=True, eq=False)
class _Forest:
    """A forest that some links make of some variables.

    Attributes:
        roots: a variable of each tree, shape [R].
        levels: batches of edges from children to parents, by the distance from the root.
        links: mask of the links inside of the forest, shape [L].
        inside: mask of the variables of the forest, shape [V].
    """

    roots: IntArray
    levels: tuple[tuple["_Batch", ...], ...]
    links: BoolArray
    inside: BoolArray


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Edges of a forest whose matrices have one shape.

    Attributes:
        children: shape [G].
        parents: shape [G].
        values: prices, shape [G, strategies of the child, strategies of the parent].
    """

    children: IntArray
    parents: IntArray
    values: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class _Changes:
    """Components of the difference of two choices.

    Attributes:
        variables: the variables that differ, shape [D].
        component: number of the component of each, shape [D].
        prices: change of the price by each component, shape [C].
        usage: change of the usage by each component in each span of time, shape [C, T].
        slack: unused capacity in each span of time, shape [T].
    """

    variables: IntArray
    component: IntArray
    prices: FloatArray
    usage: FloatArray
    slack: FloatArray


class ForestSearch:
    """Finds better choices of a network without ties.

    Args:
        network: must not change while the object is in use.
        seed: of random numbers.
        effort: limits of work, and when to stop.

    Attributes:
        variables: the network's variables by position, length V.
        rng: random numbers.
        num_forests: forests optimised so far.
    """

    def __init__(self, network: Network, *, seed: int = 0, effort: Effort = DEFAULT_EFFORT) -> None:
        self.variables = sorted(network.variables)
        self.rng = np.random.default_rng(seed)
        self._effort = effort
        self._capacity = network.capacity
        sizes = [len(network.variables[v].cost) for v in self.variables]
        self._sides = np.array([_side(size) for size in sizes], dtype=np.intp)
        self._starts = np.concatenate([[0], np.cumsum(self._sides)]).astype(np.intp)
        self._cost = np.full(self._starts[-1], np.inf)
        for start, v in zip(self._starts.tolist(), self.variables, strict=False):
            cost = network.variables[v].cost
            self._cost[start : start + len(cost)] = cost
        self._usage = UsageTable(network, self.variables, self._starts)
        self._load_links(network)
        self._moves = self._listed_moves()
        self._forests: list[_Forest] = []
        self.num_forests = 0

    def _load_links(self, network: Network) -> None:
        """Stack the matrices of links of one shape, one stack after the other."""
        place = {v: i for i, v in enumerate(self.variables)}
        groups: dict[tuple[int, int], list[tuple[int, int, NetworkLink]]] = defaultdict(list)
        for u, v, link in network.pairs():
            i, j = place[u], place[v]
            groups[int(self._sides[i]), int(self._sides[j])].append((i, j, link))
        members = [member for group in groups.values() for member in group]
        self._ends = np.array([(i, j) for i, j, _ in members], dtype=np.intp).reshape(-1, 2)
        self._stack_of = np.repeat(np.arange(len(groups)), [len(g) for g in groups.values()])
        self._stacks = [_stacked(shape, group) for shape, group in groups.items()]
        numbers = [np.arange(len(group)) for group in groups.values()]
        self._number = np.concatenate([np.zeros(0, dtype=np.intp), *numbers])
        self._around: list[list[tuple[int, int]]] = [[] for _ in self.variables]
        for e, (i, j) in enumerate(self._ends.tolist()):
            self._around[i].append((j, e))
            self._around[j].append((i, e))

    def _listed_moves(self) -> IntArray:
        """Variable and number of each strategy, those of variables with most links first."""
        strategies = np.flatnonzero(np.isfinite(self._cost))
        variables = np.searchsorted(self._starts, strategies, side="right") - 1
        num_links = np.array([len(around) for around in self._around], dtype=np.intp)
        order = np.lexsort((self.rng.random(len(strategies)), -num_links[variables]))
        moves = np.stack([variables, strategies - self._starts[variables]], axis=1)
        return moves[order].astype(np.intp)

    def step(
        self, picks: IntArray, prices: FloatArray, *, turn: int = 0, gap: float = np.inf
    ) -> IntArray | None:
        """Keep another strategy of one variable while forests improve the others.

        Args:
            picks: a choice within the capacity, shape [V].
            prices: of usage at each checkpoint, shape [T].
            turn: number of the strategy in the order in which they are tried.
            gap: distance of the choice's price from a lower bound.

        Returns:
            a better choice within the capacity, or None.
        """
        moves = self._moves[self._moves[:, 1] != picks[self._moves[:, 0]]]
        if not len(moves):
            return self.improved(picks, picks, prices)
        v, strategy = moves[turn % len(moves)].tolist()
        other = picks.copy()
        other[v] = strategy
        return self.improved(picks, other, prices, kept=v, gap=gap)

    def improved(
        self,
        picks: IntArray,
        other: IntArray,
        prices: FloatArray,
        *,
        kept: int | None = None,
        gap: float = np.inf,
    ) -> IntArray | None:
        """A better choice by combining a choice with another one, and with what forests make of it.

        Args:
            picks: a choice within the capacity, shape [V].
            other: any choice, shape [V].
            prices: of usage at each checkpoint, shape [T].
            kept: variable whose strategy in the other choice should stay.
            gap: priced distance of the other choice from `picks` at which it is given up.

        Returns:
            a choice within the capacity that is better than `picks`, or None.
        """
        priced = self._usage.priced(self._cost, prices)
        aim = self._total(picks, priced)
        if kept is not None:
            dearer = np.arange(self._sides[kept]) != other[kept]
            priced[self._starts[kept] : self._starts[kept + 1]][dearer] += abs(aim)
        best = self.combined(picks, other)
        for n, forest in enumerate(self._fresh(_DESCENTS if kept is None else _KEPT_DESCENTS)):
            if n >= _LEAST_DESCENTS and self._total(other, priced) - aim > gap:
                break
            other = self._optimised(forest, other, priced)
            self.num_forests += 1
            found = self.combined(picks if best is None else best, other)
            best = best if found is None else found
        return best

    def _fresh(self, number: int) -> list[_Forest]:
        """Some random forests, one of which is new."""
        drawn = [self._drawn() for _ in range(max(number - len(self._forests), 1))]
        self._forests = [*self._forests, *drawn][-_KEPT_DESCENTS:]
        return self._forests[-number:]

    def combined(self, picks: IntArray, other: IntArray) -> IntArray | None:
        """The best choice that takes each component of the difference of two from one of them.

        Args:
            picks: a choice within the capacity, shape [V].
            other: any choice, shape [V].

        Returns:
            a choice within the capacity that is better than `picks`, or None.
        """
        if (other == picks).all():
            return None
        changes = self._changes(picks, other)
        taken = _best_subset(changes, self._effort)
        if taken is None:
            return None
        better = picks.copy()
        moved = changes.variables[taken[changes.component]]
        better[moved] = other[moved]
        # A gain may be no more than the rounding of the components' prices.
        return better if self.price(better) < self.price(picks) else None

    def price(self, picks: IntArray) -> float:
        """Price of a choice, without the constant."""
        return self._total(picks, self._cost)

    def _total(self, picks: IntArray, priced: FloatArray) -> float:
        """Price of a choice at given prices of strategies, shape [K]."""
        return float(priced[self._starts[:-1] + picks].sum() + self._link_prices(picks).sum())

    def _link_prices(self, picks: IntArray, among: BoolArray | None = None) -> FloatArray:
        """Price of each link, shape [L]; 0 for links that are not among some."""
        paid = np.zeros(len(self._ends))
        for number, stack in enumerate(self._stacks):
            links = self._links_of(number, among)
            i, j = self._ends[links].T
            paid[links] = stack[self._number[links], picks[i], picks[j]]
        return paid

    def _links_of(self, stack: int, among: BoolArray | None = None) -> IntArray:
        """The links of a stack, all of them or those among some."""
        first, last = np.searchsorted(self._stack_of, (stack, stack + 1))
        links = np.arange(first, last)
        return links if among is None else links[among[first:last]]

    def _drawn(self) -> _Forest:
        """A random forest to which no variable can be added, with random roots."""
        order = self.rng.permutation(len(self.variables)).tolist()
        tree, inside = list(range(len(order))), [False] * len(order)

        def root(v: int) -> int:
            while tree[v] != v:
                tree[v] = v = tree[tree[v]]
            return v

        for v in order:
            # Union-find: two neighbours in the same tree would close a cycle.
            joined = [root(w) for w, _ in self._around[v] if inside[w]]
            if len(set(joined)) == len(joined):
                inside[v] = True
                for r in joined:
                    tree[r] = v
        return self._rooted([v for v in order if inside[v] and tree[v] == v], inside)

    def _rooted(self, roots: list[int], inside: list[bool]) -> _Forest:
        levels: list[tuple[_Batch, ...]] = []
        links: BoolArray = np.zeros(len(self._ends), dtype=np.bool_)
        seen, level = set(roots), roots
        while level:
            found: list[tuple[int, int, int]] = []
            for v in level:
                for w, e in self._around[v]:
                    if inside[w] and w not in seen:
                        seen.add(w)
                        found.append((w, v, e))
            level = [w for w, _, _ in found]
            if found:
                children, parents, joining = np.array(found, dtype=np.intp).T
                links[joining] = True
                levels.append(tuple(self._batches(children, parents, joining)))
        return _Forest(np.array(roots, dtype=np.intp), tuple(levels), links, np.array(inside))

    def _batches(self, children: IntArray, parents: IntArray, links: IntArray) -> list[_Batch]:
        is_source = self._ends[links, 0] == children
        kinds = 2 * self._stack_of[links] + is_source
        order = np.argsort(kinds, kind="stable")
        batches = []
        for part in np.split(order, np.flatnonzero(np.diff(kinds[order])) + 1):
            values = self._stacks[int(self._stack_of[links[part[0]]])][self._number[links[part]]]
            if not is_source[part[0]]:
                values = values.transpose(0, 2, 1)
            batches.append(_Batch(children[part], parents[part], values))
        return batches

    def _optimised(self, forest: _Forest, picks: IntArray, priced: FloatArray) -> IntArray:
        """The best choice of a forest's variables at given prices, with all others fixed."""
        # Exact for the forest, in time linear in it: prices below each variable are folded into it,
        # leaves first; then strategies are read off, roots first.
        total = self._conditioned(forest, picks, priced)
        for level in reversed(forest.levels):
            self._effort.check()
            for batch in level:
                below = total[self._strategies(batch.children)]
                least = (batch.values + below[:, :, None]).min(axis=1)
                np.add.at(total, self._strategies(batch.parents), least)
        best = picks.copy()
        for side in np.unique(self._sides[forest.roots]):
            roots = forest.roots[self._sides[forest.roots] == side]
            best[roots] = total[self._strategies(roots)].argmin(axis=1)
        for level in forest.levels:
            for batch in level:
                given = batch.values[np.arange(len(batch.parents)), :, best[batch.parents]]
                below = total[self._strategies(batch.children)]
                best[batch.children] = (below + given).argmin(axis=1)
        return best

    def _strategies(self, variables: IntArray) -> IntArray:
        """Padded strategies of variables that have equally many, shape [G, S]."""
        return self._starts[variables, None] + np.arange(self._sides[variables[0]])

    def _conditioned(self, forest: _Forest, picks: IntArray, priced: FloatArray) -> FloatArray:
        """Prices with the links from a forest to fixed variables, shape [K]."""
        total = priced.copy()
        outside = forest.inside[self._ends] & ~forest.links[:, None]
        for number, stack in enumerate(self._stacks):
            for end in (0, 1):
                links = self._links_of(number, outside[:, end])
                if not len(links):
                    continue
                here, there = self._ends[links, end], self._ends[links, 1 - end]
                places = self._number[links]
                paid = stack[places, picks[there]] if end else stack[places, :, picks[there]]
                np.add.at(total, self._strategies(here), paid)
        return total

    def _changes(self, picks: IntArray, best: IntArray) -> _Changes:
        differs = picks != best
        touched = differs[self._ends]
        inner, outer = touched.all(axis=1), touched.any(axis=1)
        labels = component_labels(len(picks), *self._ends[inner].T)
        variables = np.flatnonzero(differs)
        names, component = np.unique(labels[variables], return_inverse=True)
        owner = np.full(len(picks), -1)
        owner[variables] = component
        old, new = (self._cost[self._starts[variables] + x[variables]] for x in (picks, best))
        # A link to a variable that stays has the same price in every subset of the components.
        # The end of such a link that stays has no owner, -1, so the larger owner is the component.
        # A link between two components would have joined them.
        links = self._link_prices(best, outer) - self._link_prices(picks, outer)
        paid = np.bincount(owner[self._ends[outer]].max(axis=1), links[outer], len(names))
        prices = np.asarray(paid + np.bincount(component, new - old, len(names)), np.float64)
        usage, slack = self._usage_changes(picks, best, owner, len(names))
        return _Changes(variables, component, prices, usage, slack)

    def _usage_changes(
        self, picks: IntArray, best: IntArray, owner: IntArray, num_components: int
    ) -> tuple[FloatArray, FloatArray]:
        """Change of usage by component, and the slack, in spans where neither changes."""
        num_times = len(self._capacity)
        # Within a span in which no term starts or ends, all changes of usage are constant: its
        # least slack stands for all of its times.
        slack = self._capacity - self._usage.over_time(picks, num_times)
        change = self._usage.of(best) - self._usage.of(picks)
        terms = np.flatnonzero(change)
        first, last = self._usage.spans[terms].T
        starts = np.unique(np.concatenate([first, last]))
        starts = starts[starts < num_times]
        if not len(starts):
            return np.zeros((num_components, 0)), np.zeros(0)
        usage = np.zeros((num_components, len(starts) + 1))
        by = owner[self._usage.owners[terms]]
        np.add.at(usage, (by, np.searchsorted(starts, first)), change[terms])
        np.add.at(usage, (by, np.searchsorted(starts, last)), -change[terms])
        return np.cumsum(usage, axis=1)[:, :-1], np.minimum.reduceat(slack, starts)


def _side(size: int) -> int:
    return next((side for side in _SIDES if side >= size), size)


def _stacked(shape: tuple[int, int], links: Sequence[tuple[int, int, NetworkLink]]) -> FloatArray:
    """Prices of some links by strategy, padded with inf to one shape, shape [G, S, T]."""
    stack = np.full((len(links), *shape), np.inf)
    for values, (_, _, link) in zip(stack, links, strict=True):
        dense = link.dense()
        values[: dense.shape[0], : dense.shape[1]] = dense
    return stack


def _best_subset(changes: _Changes, effort: Effort) -> BoolArray | None:
    """Mask of the components that lower the price most within the capacity, shape [C].

    None if no subset lowers the price.
    """
    prices, usage = changes.prices, changes.usage
    # With a limit on usage, a component that lowers the price may fit only together with one that
    # raises it and uses less.
    frees = (usage < 0).any(axis=1)
    useful = np.flatnonzero(np.isfinite(prices) & ((prices < 0) | frees))
    if not (prices[useful] < 0).any():
        return None
    prices, usage = prices[useful], usage[useful]
    taken, rows, margin = prices < 0, np.zeros(0, dtype=np.intp), 0.0
    for _ in range(_KNAPSACK_ROUNDS):
        effort.check()
        # Few of the many times bind, so only those that the last subset exceeds get a row. Without
        # rows, the best subset is every component that gains.
        over = usage[taken].sum(axis=0) - changes.slack
        if not (over > 0).any():
            break
        if (over[rows] > 0).any():
            # The subset exceeds a row that it was subject to: by the tolerance of HiGHS.
            margin = _TOLERANCE
        worst = np.argsort(-over)[:_KNAPSACK_ROWS]
        rows = np.union1d(rows, worst[over[worst] > 0])
        found = _knapsack(prices, usage[:, rows].T, changes.slack[rows], margin)
        if found is None:
            return None
        taken = found
    exceeds = (usage[taken].sum(axis=0) > changes.slack).any()
    if exceeds or prices[taken].sum() >= 0:
        return None
    mask: BoolArray = np.zeros(len(changes.prices), dtype=np.bool_)
    mask[useful[taken]] = True
    return mask


def _knapsack(
    prices: FloatArray, usage: FloatArray, slack: FloatArray, margin: float
) -> BoolArray | None:
    """The items of least price within the slack, shape [C]; None if the search ends before.

    Args:
        prices: of each item, shape [C].
        usage: of each item, shape [T, C].
        slack: not negative, shape [T].
        margin: of the slack, relative to the largest usage of an item.
    """
    num_rows, num_items = usage.shape
    unit = np.abs(usage).max(axis=1)
    rows = sparse.csr_array(usage / unit[:, None])
    found = integer_point(
        prices / np.abs(prices).max(),
        rows,
        np.full(num_rows, -np.inf),
        np.maximum(slack / unit - margin, 0.0),
        np.ones(num_items),
        max_nodes=_KNAPSACK_NODES,
        relative_gap=_KNAPSACK_GAP,
    )
    return None if found is None else found > 0
