"""TRW-S on a reduced network, under usage limits: every link has messages, a level at a time.

`quotient_bounds` has TRW-S on classes of equal nodes, for problems with runs or path costs. It
shares no step with this one: all edges of a class have one message, weighted by their number,
classes are visited one by one, and sweeps have momentum in place of prices on usage.

Messages move prices between links and variables without changing the price of any choice; the
sum of all least prices is then a lower bound, which sequential tree-reweighted message passing
(TRW-S; Kolmogorov, IEEE TPAMI 28:1568, 2006) never lowers. Usage limits are priced too; prices
follow the usage of the choice of each sweep (the volume algorithm, Barahona and Anbil, Math.
Program. 87:385, 2000, with the step of Polyak).

The network is compiled to flat arrays. Variables are grouped in levels without links inside, so
that a level is processed at once. There are two sets of levels: a colouring has few levels and is
fast; levels in the order of the variables' indices, in which a model runs, give better rounding.
Each end of a link has one message per row (or column) of the link's matrix; links of similar
shape are padded to the same shape and stacked.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.solve.bounds.forest_search import ForestSearch
from autoshard.solve.local_search import CoordinateDescent
from autoshard.solve.network import Network, UsageTable
from autoshard.solve.reduced_problem import ReducedProblem
from autoshard.solve.settings import SolverSettings

_FEW_DROPPED = 0.2
"""Share of the strategies that a run must drop to be followed by another."""
_COMBINING_PERIOD = 25
_ROUNDING_PERIOD = 5
"""Sweeps from one choice to the next that is combined with the best one, or rounded."""
_FIRST_STEP = 0.5
_LAST_STEP = 1e-4
"""First and smallest step of usage prices, relative to the step of Polyak."""
_MAX_SWEEPS = 1500
_MIN_PRUNED = 0.02
"""Least share of the strategies ruled out for which they are dropped."""
_MOMENTUM = 0.7
"""Weight of earlier directions in a step."""
_PATIENCE = 10
"""Sweeps without gain after which the step is halved."""
_PROMISING = 1.5
"""Ratio to the best price up to which a choice over the limit is repaired."""
_REPAIR_VISITS = 0.2
"""Visits of each variable by repairs, per sweep and on average."""
_REPORT_GAIN = 1e-3
_STALLED_GAIN = 1e-5
"""Relative gains of the bound that are reported, and that are notable."""
_SHARE = 0.75
"""Share of time of one run."""
_UNLIMITED_ENTRIES = 20_000
"""Entries of matrices from which on TRW-S comes first without a limit."""
_TARGET = 0.15
"""Relative distance from the best bound to the target of a step."""

_SIDES = (2, 3, 4, 6, 9, 12, 16, 20, 25, 32, 40, 50, 64, 80, 100, 128, 160, 200, 256)
"""Lengths that the sides of matrices are padded to, so that more of them stack."""


@dataclass(frozen=True, slots=True, eq=False)
class LinkBatch:
    """Links of equal shape from the variables of a level to lower or to higher levels.

    Attributes:
        values: prices, padded with inf, shape [G, R, C].
        here: indices of the messages of each link at this end, shape [G, R].
        there: indices of the messages of each link at the other end, shape [G, C].
        ends: positions of the variables at this and at the other end, shape [2, G].
        shown: offset of the variables' strategies in `FlatNetwork.messages`, shape [2, G].
        share: share of a variable's price that is moved to each link, shape [G, 1].
    """

    values: FloatArray
    here: IntArray
    there: IntArray
    ends: IntArray
    shown: IntArray
    share: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Variables that are processed at once.

    Attributes:
        variables: their positions, shape [L].
        strategies: their strategies, shape [K].
        sizes: number of strategies of each variable, shape [L].
        starts: offset of each variable in `strategies`, shape [L].
        seen: index in `strategies` of the receiver of each of `messages`, shape [E].
        messages: index of each message that a strategy receives, shape [E].
        lower: links to lower levels.
        upper: links to higher levels.
    """

    variables: IntArray
    strategies: IntArray
    sizes: IntArray
    starts: IntArray
    seen: IntArray
    messages: IntArray
    lower: tuple[LinkBatch, ...]
    upper: tuple[LinkBatch, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _LinkEnd:
    """One end of a link: position of its variable, its messages, class of each strategy."""

    owner: int
    first: int
    side: int
    classes: IntArray


class FlatNetwork:
    """A network compiled to flat arrays; it has no ties and at least one variable.

    Attributes:
        variables: the network's variables by position, length V.
        starts: offset of the strategies of each variable, shape [V + 1].
        cost: price of each strategy without its usage, shape [K].
        capacity: slack at each checkpoint, shape [T].
        constant: price of every choice.
        num_messages: length of an array of messages.
        seen: strategy that receives each of `messages`, shape [E].
        messages: index of each message that a strategy receives, shape [E].
        levels: all variables by colour.
        ordered: all variables in levels that follow the order of their indices.
    """

    def __init__(self, network: Network) -> None:
        self.variables = sorted(network.variables)
        self.capacity = network.capacity
        self.constant = network.constant
        sizes = np.array([len(network.variables[v].cost) for v in self.variables], dtype=np.intp)
        self.starts = _offsets(sizes)
        self.cost = np.concatenate([network.variables[v].cost for v in self.variables])
        self._usage = UsageTable(network, self.variables, self.starts)
        self._load_links(network)

    def _load_links(self, network: Network) -> None:
        place = {v: i for i, v in enumerate(self.variables)}
        colour = np.zeros(len(place), dtype=np.intp)
        depth = np.zeros(len(place), dtype=np.intp)
        ends: list[_LinkEnd] = []
        values: list[FloatArray] = []
        first = 0
        for u in self.variables:
            # Greedy colouring: as few colours as levels, since a level is one step of vector
            # operations.
            taken = {int(colour[place[v]]) for v in network.links[u] if v < u}
            colour[place[u]] = next(c for c in range(len(taken) + 1) if c not in taken)
            for v, link in network.links[u].items():
                if v < u:
                    continue
                depth[place[v]] = max(depth[place[v]], depth[place[u]] + 1)
                values.append(_padded(link.matrix.values))
                rows, cols = values[-1].shape
                ends.append(_LinkEnd(place[u], first, rows, link.rows))
                ends.append(_LinkEnd(place[v], first + rows, cols, link.cols))
                first += rows + cols
        self.num_messages = first
        shown = self._load_ends(ends)
        self.levels = self._leveled(colour, ends, values, shown)
        self.ordered = self._leveled(depth, ends, values, shown)

    def _load_ends(self, ends: list[_LinkEnd]) -> IntArray:
        """List the messages that strategies receive, by variable; return the offset of each end."""
        owners = np.array([end.owner for end in ends], dtype=np.intp)
        sizes = np.diff(self.starts)[owners]
        order = np.argsort(owners, kind="stable")
        shown = np.empty(len(ends), dtype=np.intp)
        shown[order] = _offsets(sizes[order])[:-1]
        self.messages = _joined(ends[e].first + ends[e].classes for e in order)
        self.seen = _joined(np.arange(*self.starts[[o, o + 1]]) for o in owners[order])
        self._seen_starts = _offsets(
            np.bincount(owners, sizes, len(self.variables)).astype(np.intp)
        )
        return shown

    def _leveled(
        self, depth: IntArray, ends: list[_LinkEnd], values: list[FloatArray], shown: IntArray
    ) -> tuple[Level, ...]:
        # The weights of TRW-S: a variable's price is divided by its number of links to lower or to
        # higher levels, whichever is larger. So many monotonic chains go through it (Kolmogorov's
        # n_s), and each of them gets an equal part.
        upward, downward = np.zeros(len(depth)), np.zeros(len(depth))
        groups: dict[tuple[int, bool, int, int], list[int]] = defaultdict(list)
        for e, end in enumerate(ends):
            far = ends[e ^ 1]
            up = bool(depth[far.owner] > depth[end.owner])
            (upward if up else downward)[end.owner] += 1.0
            groups[int(depth[end.owner]), up, end.side, far.side].append(e)
        share = 1.0 / np.maximum(np.maximum(upward, downward), 1.0)
        sides: dict[tuple[int, bool], list[LinkBatch]] = defaultdict(list)
        for (level, up, _, _), members in groups.items():
            sides[level, up].append(_stacked(members, ends, values, shown, share))
        return tuple(
            self._level(np.flatnonzero(depth == d), tuple(sides[d, False]), tuple(sides[d, True]))
            for d in range(int(depth.max()) + 1)
        )

    def _level(
        self, variables: IntArray, lower: tuple[LinkBatch, ...], upper: tuple[LinkBatch, ...]
    ) -> Level:
        sizes = np.diff(self.starts)[variables]
        starts = _offsets(sizes)[:-1]
        strategies = _joined(np.arange(*self.starts[[i, i + 1]]) for i in variables)
        spans = [slice(*self._seen_starts[[i, i + 1]]) for i in variables]
        shifts = starts - self.starts[variables]
        seen = _joined(self.seen[s] + shift for s, shift in zip(spans, shifts, strict=True))
        messages = _joined(self.messages[s] for s in spans)
        return Level(variables, strategies, sizes, starts, seen, messages, lower, upper)

    def priced(self, prices: FloatArray) -> FloatArray:
        """Price of each strategy, shape [K], with its usage at prices per checkpoint."""
        return self._usage.priced(self.cost, prices)

    def usage(self, picks: IntArray) -> FloatArray:
        """Usage at each checkpoint, shape [T], of a position per variable, shape [V]."""
        return self._usage.over_time(picks, len(self.capacity))

    def price(self, picks: IntArray) -> float:
        """Price of a position per variable, shape [V], with the constant."""
        total = self.constant + float(self.cost[self.starts[:-1] + picks].sum())
        for level in self.levels:
            for batch in level.upper:
                rows = self.messages[batch.shown[0] + picks[batch.ends[0]]] - batch.here[:, 0]
                total += float(self.facing(batch, picks)[np.arange(len(rows)), rows].sum())
        return total

    def facing(self, batch: LinkBatch, picks: IntArray) -> FloatArray:
        """Prices of each link given the pick of its other end, shape [G, R]."""
        cols = self.messages[batch.shown[1] + picks[batch.ends[1]]] - batch.there[:, 0]
        prices: FloatArray = batch.values[np.arange(len(cols)), :, cols]
        return prices


def _stacked(
    members: list[int],
    ends: list[_LinkEnd],
    values: list[FloatArray],
    shown: IntArray,
    share: FloatArray,
) -> LinkBatch:
    near, far = [ends[e] for e in members], [ends[e ^ 1] for e in members]
    here = np.array([e.first for e in near], dtype=np.intp)[:, None] + np.arange(near[0].side)
    there = np.array([e.first for e in far], dtype=np.intp)[:, None] + np.arange(far[0].side)
    stack = np.stack([values[e // 2].T if e % 2 else values[e // 2] for e in members])
    ends_of = np.array([[e.owner for e in near], [e.owner for e in far]], dtype=np.intp)
    return LinkBatch(
        np.ascontiguousarray(stack),
        here,
        there,
        ends_of,
        shown[[members, [e ^ 1 for e in members]]],
        share[ends_of[0], None],
    )


def _padded(values: FloatArray) -> FloatArray:
    sides = [next((n for n in _SIDES if n >= side), side) for side in values.shape]
    # inf is never a minimum, and no strategy has a padded row, so padding changes no message.
    out = np.full(sides, np.inf)
    out[: values.shape[0], : values.shape[1]] = values
    return out


def _offsets(sizes: IntArray) -> IntArray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.intp)


def _joined(parts: Iterable[IntArray]) -> IntArray:
    return np.concatenate([np.zeros(0, dtype=np.intp), *parts])


_EPSILON = 2.0**-50
"""Rounding errors of a bound, relative to the sum of the absolute values that it is made of."""


@dataclass(frozen=True, slots=True, eq=False)
class _Point:
    """Usage prices with messages, and the bound that they prove."""

    bound: float
    prices: FloatArray
    messages: FloatArray


class TRWS:
    """Improves messages and usage prices, and offers the choices that it finds.

    Args:
        reduced: the reduced problem.
    """

    def __init__(self, reduced: ReducedProblem) -> None:
        self._reduced = reduced
        self._state = reduced.state
        self._settings = reduced.state.settings
        self._flat = FlatNetwork(reduced.network)
        self._messages = np.zeros(self._flat.num_messages)
        self._scratch = np.zeros(self._flat.num_messages)
        self._picks: IntArray = np.zeros(len(self._flat.variables), dtype=np.intp)
        unpriced = np.zeros(len(self._flat.capacity))
        self._best = _Point(-float("inf"), unpriced, self._messages.copy())
        self._descent = CoordinateDescent(reduced.network, effort=self._state.effort)
        self._sweeps = 0
        self._known: set[bytes] = set()

    def run(self) -> dict[int, FloatArray]:
        """Improve until the bound stalls, the gap is closed or the limit of work is reached.

        Returns:
            for each variable, a lower bound of the price of all choices with each
            strategy, shape [S].
        """
        try:
            self._maximise_bound(self._state.deadline(_SHARE))
        finally:
            # Also when the time is over: the bound that was reached counts.
            least = self._proven(self._best)
        return least

    def _maximise_bound(self, deadline: float) -> None:
        flat, state = self._flat, self._state
        prices, best = self._best.prices, self._best
        direction = np.zeros_like(prices)
        step, without_gain, stalled = _FIRST_STEP, 0, 0
        while (
            stalled < self._settings.trws_max_stalled
            and self._sweeps < _MAX_SWEEPS
            and not (state.closed or state.is_late(deadline))
        ):
            bound = self._sweep(prices)
            self._sweeps += 1
            state.count("trws.sweeps")
            gain = bound - best.bound
            stalled = 0 if gain > _STALLED_GAIN * self._scale(best.bound) else stalled + 1
            if gain > 0:
                self._best = best = _Point(bound, prices, self._messages.copy())
                without_gain = 0
                if bound > state.bound + _REPORT_GAIN * self._scale(bound):
                    self._proven(best)
            else:
                without_gain += 1
            # A subgradient would be the excess of a minimiser of the relaxation. The choice of the
            # sweep stands for it: prices only have to be good, since every price of at least 0
            # proves a bound.
            excess = flat.usage(self._picks) - flat.capacity
            if self._sweeps % _ROUNDING_PERIOD == 0:
                self._offer_rounded(self._rounded(prices), prices)
            if without_gain > _PATIENCE and step > _LAST_STEP:
                step, without_gain = max(0.5 * step, _LAST_STEP), 0
                # Messages belong to their prices: at others they would start from a worse bound.
                prices, self._messages = best.prices, best.messages.copy()
                direction = np.zeros_like(prices)
                continue
            direction = _MOMENTUM * direction + (1.0 - _MOMENTUM) * excess
            prices = self._moved(prices, direction, step, bound, best.bound)

    def _scale(self, bound: float) -> float:
        return max(abs(bound), 1e-300) if np.isfinite(bound) else 1e-300

    def _moved(
        self, prices: FloatArray, direction: FloatArray, step: float, bound: float, best: float
    ) -> FloatArray:
        """Prices after one step of Polyak towards the target."""
        # Prices of 0 cannot fall. If the norm counted them, the others would move too little.
        towards = np.where((prices <= 0) & (direction < 0), 0.0, direction)
        norm = float(towards @ towards)
        if norm == 0.0:
            return prices
        # Polyak's step needs the optimum, which is not known: the target is a little above the best
        # bound, and at most the price of a known choice.
        reach = min(self._state.objective, best + _TARGET * self._scale(best)) - bound
        moved: FloatArray = np.maximum(prices + step * max(reach, 0.0) / norm * towards, 0.0)
        return moved

    def _sweep(self, prices: FloatArray) -> float:
        """Pass messages forward and backward; return the bound that they prove, up to rounding."""
        priced = self._flat.priced(prices)
        for level in self._flat.levels:
            self._state.check()
            self._pass(level, priced, behind=level.lower, ahead=level.upper)
        total = 0.0
        for level in reversed(self._flat.levels):
            self._state.check()
            total += self._pass(level, priced, behind=level.upper, ahead=level.lower)
        # The least price of every link is zero after the pass over either of its ends. A choice
        # that fits pays at most `prices @ capacity` for its usage, so without it the bound is one
        # of its own price.
        return total + self._flat.constant - float(prices @ self._flat.capacity)

    def _pass(
        self,
        level: Level,
        priced: FloatArray,
        *,
        behind: tuple[LinkBatch, ...],
        ahead: tuple[LinkBatch, ...],
    ) -> float:
        """Receive messages from the links behind, pick strategies, send messages to links ahead.

        Returns:
            the sum of the least prices of the level's variables.
        """
        # First, scratch has prices by which a strategy is picked: links behind at the picks of
        # their other ends, links ahead by their messages (Kolmogorov's rounding).
        messages, scratch = self._messages, self._scratch
        for batch in behind:
            messages[batch.here] = _given(batch, messages)
            scratch[batch.here] = self._flat.facing(batch, self._picks)
        for batch in ahead:
            scratch[batch.here] = messages[batch.here]
        own, size = priced[level.strategies], len(level.strategies)
        total = own + np.bincount(level.seen, messages[level.messages], size)
        least = np.minimum.reduceat(total, level.starts)
        score = own + np.bincount(level.seen, scratch[level.messages], size)
        self._picks[level.variables] = _cheapest(level, score)
        if ahead:
            # Then it has what each row can give away: what its cheapest strategy costs above the
            # least. The shares of the links ahead add up to at most one, so no strategy falls below
            # the least price, which counts in the bound.
            total -= np.repeat(least, level.sizes)
            scratch[level.messages] = np.inf
            np.minimum.at(scratch, level.messages, total[level.seen])
            for batch in ahead:
                spare = scratch[batch.here]
                messages[batch.here] -= batch.share * np.where(np.isfinite(spare), spare, 0.0)
        return float(least.sum())

    def _rounded(self, prices: FloatArray) -> IntArray:
        """Pick strategies in the order of the variables, alternately ascending and descending.

        Neighbours behind are fixed at their picks; neighbours ahead are estimated by messages.
        """
        flat, scratch = self._flat, self._scratch
        priced = flat.priced(prices)
        picks: IntArray = np.zeros(len(flat.variables), dtype=np.intp)
        upwards = self._sweeps % (2 * _ROUNDING_PERIOD) == 0
        for level in flat.ordered if upwards else reversed(flat.ordered):
            self._state.check()
            behind, ahead = level.lower, level.upper
            if not upwards:
                behind, ahead = ahead, behind
            for batch in behind:
                scratch[batch.here] = flat.facing(batch, picks)
            for batch in ahead:
                scratch[batch.here] = _given(batch, self._messages)
            picked = priced[level.strategies]
            picked = picked + np.bincount(level.seen, scratch[level.messages], len(picked))
            picks[level.variables] = _cheapest(level, picked)
        return picks

    @property
    def prices(self) -> FloatArray:
        """Price of usage at each checkpoint at the best bound, shape [T]."""
        return self._best.prices

    @cached_property
    def _forests(self) -> ForestSearch:
        return ForestSearch(self._reduced.network, seed=self._state.seed, effort=self._state.effort)

    def _offer_rounded(self, picks: IntArray, prices: FloatArray) -> None:
        """Offer a choice; repair it if it is promising; combine it with the best one at times."""
        if self._sweeps % _COMBINING_PERIOD == 0:
            self._improve(picks, prices)
        flat, state = self._flat, self._state
        price = flat.price(picks)
        fits = bool((flat.usage(picks) <= flat.capacity).all())
        by_variable = dict(zip(flat.variables, picks.tolist(), strict=True))
        if fits and price < state.objective:
            self._reduced.offer(by_variable)
        promising = price < state.objective * (1.0 if fits else _PROMISING)
        key = picks.tobytes()
        if key in self._known or not (promising or state.choice is None):
            return
        # Repairs visit variables one by one in Python; without a limit they would take longer than
        # sweeps.
        allowed = _REPAIR_VISITS * self._sweeps * len(flat.variables)
        if self._descent.visits > allowed:
            return
        self._known.add(key)
        repaired = self._descent.repair(by_variable, prices)
        if repaired is not None:
            self._reduced.offer(repaired)

    def _improve(self, picks: IntArray, prices: FloatArray) -> None:
        """Combine the best choice of a huge problem with another one, and offer the result."""
        network, choice = self._reduced.network, self._state.choice
        if choice is None or not is_huge(network, self._settings):
            return
        best = self._reduced.pick_of(choice)
        if best is None:
            return
        variables = self._flat.variables
        current = np.array([best[v] for v in variables], dtype=np.intp)
        better = self._forests.improved(current, picks, prices)
        if better is not None:
            self._reduced.offer(dict(zip(variables, better.tolist(), strict=True)))

    def _proven(self, best: _Point) -> dict[int, FloatArray]:
        """Record the bound of a point minus its rounding errors; bound each strategy."""
        flat, messages = self._flat, best.messages
        # From prices and messages alone: whatever they are, no choice changes its price, so the
        # bound holds even if a sweep was interrupted or rounded.
        total = flat.priced(best.prices) + np.bincount(
            flat.seen, messages[flat.messages], len(flat.cost)
        )
        least = np.minimum.reduceat(total, flat.starts[:-1])
        paid = float(best.prices @ flat.capacity)
        bound, volume = flat.constant - paid + float(least.sum()), abs(flat.constant) + paid
        for level in flat.levels:
            for batch in level.upper:
                left = batch.values - messages[batch.here][:, :, None]
                bound += float((left - messages[batch.there][:, None, :]).min(axis=(1, 2)).sum())
        volume += float(np.abs(least).sum() + np.abs(messages[flat.messages]).sum())
        bound -= _EPSILON * volume
        self._reduced.raise_bound(bound)
        # A choice with this strategy pays its price instead of the variable's least one; everything
        # else costs at least its part of the bound.
        spare = bound + total - np.repeat(least, np.diff(flat.starts))
        return dict(zip(flat.variables, np.split(spare, flat.starts[1:-1]), strict=True))


def _given(batch: LinkBatch, messages: FloatArray) -> FloatArray:
    """Least price of each row of a link, shape [G, R]."""
    given = (batch.values - messages[batch.there][:, None, :]).min(axis=2)
    return np.where(np.isfinite(given), given, 0.0)


def _cheapest(level: Level, score: FloatArray) -> IntArray:
    """The first strategy of least price of each variable of a level, shape [L]."""
    best = np.minimum.reduceat(score, level.starts)
    hits = np.flatnonzero(score <= np.repeat(best, level.sizes))
    owner = np.searchsorted(level.starts, hits, side="right") - 1
    picks: IntArray = np.empty(len(level.starts), dtype=np.intp)
    # The last assignment stays, so of equal strategies the first one is picked.
    picks[owner[::-1]] = (hits - level.starts[owner])[::-1]
    return picks


def _is_large(network: Network, settings: SolverSettings) -> bool:
    """True if TRW-S should run before a linear program."""
    if not len(network.capacity):
        return network.num_prices >= min(settings.large_entries, _UNLIMITED_ENTRIES)
    usage = sum(
        (term.last - term.first) * len(term.usage)
        for variable in network.variables.values()
        for term in variable.terms
    )
    return network.num_prices + usage >= settings.large_entries


def is_huge(network: Network, settings: SolverSettings) -> bool:
    """True if a linear program would take too long to be of use."""
    return network.num_prices >= settings.huge_entries


def ascend(reduced: ReducedProblem) -> FloatArray:
    """Bound a large problem by TRW-S, and drop strategies that no better choice has.

    Returns:
        price of usage at each checkpoint of the network at the best bound, shape [T].
    """
    state, settings = reduced.state, reduced.state.settings
    for _ in range(settings.trws_rounds):
        if reduced.done or state.closed or not _is_large(reduced.network, settings):
            break
        state.enter("pass messages")
        trws = TRWS(reduced)
        least = trws.run()
        bounds = np.concatenate(list(least.values()))
        pruned_share = float((bounds >= state.cutoff).mean())
        # Reductions after a few drops cost more than they gain. They may also drop a strategy of
        # the best choice for an equally good one; then no search could start from that choice.
        if pruned_share < _MIN_PRUNED:
            return trws.prices
        reduced.prune(least)
        few = pruned_share < _FEW_DROPPED
        if few and is_huge(reduced.network, settings):
            return trws.prices
        reduced.reduce()
        if few:
            break
    # The reductions dropped checkpoints, so the prices from before have no place any more.
    return np.zeros(len(reduced.network.capacity))
