"""In which order to eliminate variables, so that tables stay small.

The next variable is the one whose neighbours lack least of being linked to each other, each
lacking link weighted by how much the two add to a table (weighted min-fill; Kjaerulff,
Aalborg R-90-09, 1990). Orders that differ a little can differ a thousandfold in what they
cost, so a few are tried, with weights shifted at random, and the cheapest is taken. Variables
in the same surroundings are shifted alike: what repeats in a network is then eliminated in the
same way each time, and its tables are made once.
"""

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import log, prod
from random import Random

_NOISE = 0.4
_LOOKS = 3
"""How far two variables must have the same surroundings to be shifted alike."""
_MANY = 48
"""Neighbours from which on a variable waits until it has fewer."""

Neighbours = Mapping[int, set[int]]


@dataclass(frozen=True, slots=True)
class Order:
    """An order of elimination.

    Attributes:
        variables: all variables, the first one first.
        work: additions that it takes, if every strategy is told apart.
        entries: of all tables together.
    """

    variables: tuple[int, ...]
    work: float
    entries: float


def best_order(
    sizes: Mapping[int, int], neighbours: Neighbours, tries: int, *, check: Callable[[], None]
) -> Order:
    """The cheapest of some orders; the same ones for the same network.

    Args:
        sizes: number of strategies of each variable.
        neighbours: of each variable.
        tries: how many orders to compare.
        check: called now and then; raises to stop.
    """
    marks = _marks(sizes, neighbours)
    orders = []
    for number in range(tries):
        rng = Random(number)  # noqa: S311  nothing secret
        shifts = {mark: 1.0 + (_NOISE * rng.random() if number else 0.0) for mark in marks.values()}
        check()
        orders.append(_order(sizes, neighbours, {v: shifts[m] for v, m in marks.items()}))
    return min(orders, key=lambda order: order.work)


def _marks(sizes: Mapping[int, int], neighbours: Neighbours) -> dict[int, int]:
    """Numbers that are equal for variables with equal surroundings."""
    marks: dict[int, int] = dict(sizes)
    for _ in range(_LOOKS):
        known: dict[tuple[int, ...], int] = {}
        looks = {v: (marks[v], *sorted(marks[w] for w in neighbours[v])) for v in marks}
        marks = {v: known.setdefault(look, len(known)) for v, look in looks.items()}
    return marks


def _order(sizes: Mapping[int, int], neighbours: Neighbours, shifts: Mapping[int, float]) -> Order:
    around = {v: set(near) for v, near in neighbours.items()}
    weights = {v: log(size) for v, size in sizes.items()}

    def lacking(v: int) -> float:
        near = around[v]
        if len(near) > _MANY:
            return shifts[v] * len(near) ** 3
        pairs = combinations(near, 2)
        return shifts[v] * sum(weights[a] * weights[b] for a, b in pairs if b not in around[a])

    keys = {v: lacking(v) for v in around}
    heap = [(key, v) for v, key in keys.items()]
    heapq.heapify(heap)
    variables, work, entries = [], 0.0, 0.0
    while heap:
        key, v = heapq.heappop(heap)
        if keys.get(v) != key:
            continue
        near = around.pop(v)
        del keys[v]
        variables.append(v)
        entries += (size := prod((float(sizes[w]) for w in near), start=1.0))
        work += size * sizes[v]
        changed = set(near)
        for w in near:
            around[w].discard(v)
            if not near - around[w] <= {w}:
                around[w] |= near - {w}
                changed |= around[w]
        for w in changed:
            keys[w] = lacking(w)
            heapq.heappush(heap, (keys[w], w))
    return Order(tuple(variables), work, entries)
