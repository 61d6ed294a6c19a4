"""A network as flat arrays, to sweep over all of its variables with few calls of numpy.

Variables are put in levels without links inside, so that all variables of a level can be
treated at once as if one after the other. There are two sets of levels: a colouring has
few of them and is quick; the order of the variables' indices, which is the order in which
a model runs, has many and is good to pick strategies in. Each end of a link has one
message per row (or column) of the link's matrix; links of similar shape are padded to the
same shape and stacked.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from autoshard.arrays import FloatArray, IntArray
from autoshard.solve.network import Network, spread

_SIDES = (2, 3, 4, 6, 9, 12, 16, 20, 25, 32, 40, 50, 64, 80, 100, 128, 160, 200, 256)
"""Lengths that the sides of matrices are padded to, so that more of them stack."""


@dataclass(frozen=True, slots=True, eq=False)
class Arms:
    """Links of equal shape from one level to one side, as the variables of the level see them.

    Attributes:
        values: prices, padded with inf, shape [G, R, C].
        here: messages of each link at this end, shape [G, R].
        there: messages of each link at the other end, shape [G, C].
        ends: places of the variables at this and at the other end, shape [2, G].
        shown: place in `Flat.messages` of what their first strategies show, shape [2, G].
        share: part of the price of a variable that it gives to each link, shape [G, 1].
    """

    values: FloatArray
    here: IntArray
    there: IntArray
    ends: IntArray
    shown: IntArray
    share: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Variables that are treated at once.

    Attributes:
        variables: their places, shape [L].
        strategies: their strategies, shape [K].
        sizes: number of strategies of each variable, shape [L].
        starts: first of `strategies` of each variable, shape [L].
        seen: strategies (as places in `strategies`) that see `messages`, shape [E].
        messages: what they see, shape [E].
        lower: links to lower levels.
        upper: links to higher levels.
    """

    variables: IntArray
    strategies: IntArray
    sizes: IntArray
    starts: IntArray
    seen: IntArray
    messages: IntArray
    lower: tuple[Arms, ...]
    upper: tuple[Arms, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _End:
    """One end of a link: the place of its variable, its messages, what strategies show."""

    owner: int
    first: int
    side: int
    classes: IntArray


class Flat:
    """A network without ties, with at least one variable, compiled.

    Attributes:
        variables: the network's variables by place, length V.
        starts: first strategy of each variable, shape [V + 1].
        cost: price of each strategy without its usage, shape [K].
        capacity: room at each checkpoint, shape [T].
        constant: price that nobody can avoid.
        num_messages: length of an array of messages.
        joined: each link's two variables, and where its messages to each of them start.
        seen: strategy that sees each of `messages`, shape [E].
        messages: the message, shape [E].
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
        self._load_usage(network)
        self._load_links(network)

    def _load_usage(self, network: Network) -> None:
        terms = [(i, t) for i, v in enumerate(self.variables) for t in network.variables[v].terms]
        sizes = np.array([len(t.usage) for _, t in terms], dtype=np.intp)
        self._term_span = np.array([(t.first, t.last) for _, t in terms], np.intp).reshape(-1, 2)
        self._term_owner = np.array([i for i, _ in terms], dtype=np.intp)
        self._term_start = _offsets(sizes)[:-1]
        self._use = np.concatenate([np.zeros(0), *(t.usage for _, t in terms)])
        self._use_term = np.repeat(np.arange(len(terms)), sizes)
        within = np.arange(len(self._use)) - self._term_start[self._use_term]
        self._use_strategy = self.starts[self._term_owner[self._use_term]] + within

    def _load_links(self, network: Network) -> None:
        place = {v: i for i, v in enumerate(self.variables)}
        colour = np.zeros(len(place), dtype=np.intp)
        depth = np.zeros(len(place), dtype=np.intp)
        ends: list[_End] = []
        values: list[FloatArray] = []
        first = 0
        self.joined: list[tuple[int, int, int, int]] = []
        for u in self.variables:
            taken = {int(colour[place[v]]) for v in network.links[u] if v < u}
            colour[place[u]] = next(c for c in range(len(taken) + 1) if c not in taken)
            for v, link in network.links[u].items():
                if v < u:
                    continue
                depth[place[v]] = max(depth[place[v]], depth[place[u]] + 1)
                values.append(_padded(link.matrix.values))
                rows, cols = values[-1].shape
                self.joined.append((u, v, first, first + rows))
                ends.append(_End(place[u], first, rows, link.rows))
                ends.append(_End(place[v], first + rows, cols, link.cols))
                first += rows + cols
        self.num_messages = first
        shown = self._load_ends(ends)
        self.levels = self._leveled(colour, ends, values, shown)
        self.ordered = self._leveled(depth, ends, values, shown)

    def _load_ends(self, ends: list[_End]) -> IntArray:
        """List the messages that strategies see, by variable; give the place of each end."""
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
        self, depth: IntArray, ends: list[_End], values: list[FloatArray], shown: IntArray
    ) -> tuple[Level, ...]:
        # A pass gives a variable's price away in equal shares, as many as the side with
        # more links needs: the weights of TRW-S.
        upward, downward = np.zeros(len(depth)), np.zeros(len(depth))
        groups: dict[tuple[int, bool, int, int], list[int]] = defaultdict(list)
        for e, end in enumerate(ends):
            far = ends[e ^ 1]
            up = bool(depth[far.owner] > depth[end.owner])
            (upward if up else downward)[end.owner] += 1.0
            groups[int(depth[end.owner]), up, end.side, far.side].append(e)
        share = 1.0 / np.maximum(np.maximum(upward, downward), 1.0)
        sides: dict[tuple[int, bool], list[Arms]] = defaultdict(list)
        for (level, up, _, _), members in groups.items():
            sides[level, up].append(_stacked(members, ends, values, shown, share))
        return tuple(
            self._level(np.flatnonzero(depth == d), tuple(sides[d, False]), tuple(sides[d, True]))
            for d in range(int(depth.max()) + 1)
        )

    def _level(
        self, variables: IntArray, lower: tuple[Arms, ...], upper: tuple[Arms, ...]
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
        total = np.concatenate([[0.0], np.cumsum(prices)])
        price = total[self._term_span[:, 1]] - total[self._term_span[:, 0]]
        used = np.bincount(
            self._use_strategy, self._use * price[self._use_term], minlength=len(self.cost)
        )
        return self.cost + used

    def usage(self, picks: IntArray) -> FloatArray:
        """Usage at each checkpoint, shape [T], of a position per variable, shape [V]."""
        used = self._use[self._term_start + picks[self._term_owner]]
        first, last = self._term_span.T
        return spread(first, last, used, len(self.capacity))

    def price(self, picks: IntArray) -> float:
        """Price of a position per variable, shape [V], with the constant."""
        total = self.constant + float(self.cost[self.starts[:-1] + picks].sum())
        for level in self.levels:
            for arms in level.upper:
                rows = self.messages[arms.shown[0] + picks[arms.ends[0]]] - arms.here[:, 0]
                total += float(self.facing(arms, picks)[np.arange(len(rows)), rows].sum())
        return total

    def facing(self, arms: Arms, picks: IntArray) -> FloatArray:
        """Prices of each link given what its other end picks, shape [G, R]."""
        cols = self.messages[arms.shown[1] + picks[arms.ends[1]]] - arms.there[:, 0]
        prices: FloatArray = arms.values[np.arange(len(cols)), :, cols]
        return prices


def _stacked(
    members: list[int],
    ends: list[_End],
    values: list[FloatArray],
    shown: IntArray,
    share: FloatArray,
) -> Arms:
    near, far = [ends[e] for e in members], [ends[e ^ 1] for e in members]
    here = np.array([e.first for e in near], dtype=np.intp)[:, None] + np.arange(near[0].side)
    there = np.array([e.first for e in far], dtype=np.intp)[:, None] + np.arange(far[0].side)
    stack = np.stack([values[e // 2].T if e % 2 else values[e // 2] for e in members])
    ends_of = np.array([[e.owner for e in near], [e.owner for e in far]], dtype=np.intp)
    return Arms(
        np.ascontiguousarray(stack),
        here,
        there,
        ends_of,
        shown[[members, [e ^ 1 for e in members]]],
        share[ends_of[0], None],
    )


def _padded(values: FloatArray) -> FloatArray:
    sides = [next((n for n in _SIDES if n >= side), side) for side in values.shape]
    out = np.full(sides, np.inf)
    out[: values.shape[0], : values.shape[1]] = values
    return out


def _offsets(sizes: IntArray) -> IntArray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.intp)


def _joined(parts: Iterable[IntArray]) -> IntArray:
    return np.concatenate([np.zeros(0, dtype=np.intp), *parts])
