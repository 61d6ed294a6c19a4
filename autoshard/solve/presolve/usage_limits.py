"""Reductions of usage and its limits: terms with disjoint spans, limits that cannot bind."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autoshard.base.arrays import BoolArray, FloatArray, IntArray
from autoshard.solve.network import Network, NetworkVariable, Term, spread
from autoshard.solve.presolve.base import Inverse, nothing_to_undo
from autoshard.solve.presolve.merge_variables import merged_terms


class SeparateTerms:
    """Rewrite the usage of each variable as terms with disjoint spans.

    Terms of merged variables overlap if their members are alive at the same time. `DropDominated`
    and `SimplifyLimits` compare strategies term by term, so after adding overlapping terms they
    compare the total usage of all members.
    """

    name = "separate_terms"

    def apply(self, network: Network) -> Inverse:
        """Add the overlapping terms of each variable, between consecutive starts and ends."""
        for v, variable in _users(network):
            terms = sorted(variable.terms, key=lambda term: term.first)
            if any(after.first < before.last for before, after in pairwise(terms)):
                separate = tuple(_separated(terms))
                network.replace(v, NetworkVariable(variable.labels, variable.cost, separate))
        return nothing_to_undo


def _separated(terms: Collection[Term]) -> Iterator[Term]:
    places = sorted({place for term in terms for place in (term.first, term.last)})
    for first, last in pairwise(places):
        alive = [term.usage for term in terms if term.first <= first and last <= term.last]
        if alive:
            yield Term(first, last, np.add.reduce(alive))


class SimplifyLimits:
    """Drop limits that cannot bind, and strategies that cannot fit.

    The least usage of each variable is subtracted from the capacity. A checkpoint is dropped if its
    capacity is enough for the largest usage of all variables, or if all variables alive there are
    also alive at a neighbouring checkpoint with less capacity. A strategy is dropped if it does not
    fit when all other variables use their least.
    """

    name = "simplify_limits"

    def apply(self, network: Network) -> Inverse:
        """Simplify until no strategy is dropped; then drop checkpoints."""
        while not network.infeasible:
            subtract_least(network)
            if (network.capacity < 0).any():
                network.infeasible = True
            # After a strategy with the least usage is gone, the others subtract more, so that is
            # repeated.
            elif not _drop_unfit(network):
                _drop_checkpoints(network, _needed(network))
                break
        return nothing_to_undo


@dataclass(frozen=True, slots=True, eq=False)
class _Terms:
    """All terms of a network.

    Attributes:
        first: first checkpoint of each, shape [N].
        last: end of each, shape [N].
        least: least usage of each, shape [N].
        largest: largest usage of each, shape [N].
    """

    first: IntArray
    last: IntArray
    least: FloatArray
    largest: FloatArray

    @classmethod
    def of(cls, network: Network) -> "_Terms":
        terms = [term for variable in network.variables.values() for term in variable.terms]
        if not terms:
            nowhere, nothing = np.zeros(0, dtype=np.intp), np.zeros(0)
            return cls(nowhere, nowhere, nothing, nothing)
        usage = np.concatenate([term.usage for term in terms])
        sizes = np.array([len(term.usage) for term in terms])
        starts = np.cumsum(sizes) - sizes
        return cls(
            np.array([term.first for term in terms], dtype=np.intp),
            np.array([term.last for term in terms], dtype=np.intp),
            np.minimum.reduceat(usage, starts),
            np.maximum.reduceat(usage, starts),
        )


def _users(network: Network) -> list[tuple[int, NetworkVariable]]:
    return [(v, x) for v, x in network.variables.items() if x.terms]


def subtract_least(network: Network) -> None:
    """Subtract the least usage of each variable from its usage and from the capacity."""
    terms = _Terms.of(network)
    settled = (terms.least == 0) & (terms.largest > 0)
    if settled.all():
        return
    taken = spread(terms.first, terms.last, terms.least, len(network.capacity))
    network.capacity = network.capacity - taken
    place = 0
    for v, variable in _users(network):
        span = slice(place, place + len(variable.terms))
        place = span.stop
        if settled[span].all():
            continue
        bounds = zip(terms.least[span], terms.largest[span], strict=True)
        left = tuple(
            Term(t.first, t.last, t.usage - least) if least > 0 else t
            for t, (least, most) in zip(variable.terms, bounds, strict=True)
            if most > least
        )
        network.replace(v, NetworkVariable(variable.labels, variable.cost, left))


def _drop_unfit(network: Network) -> bool:
    """Drop strategies that do not fit if all others use their least; return True if any was."""
    largest = _Terms.of(network).largest
    least_capacity = float(network.capacity.min(initial=np.inf))
    place, dropped = 0, False
    for v, variable in _users(network):
        span = slice(place, place + len(variable.terms))
        place = span.stop
        fits: BoolArray = np.ones(len(variable.cost), dtype=np.bool_)
        for i in np.flatnonzero(largest[span] > least_capacity):
            term = variable.terms[i]
            fits &= term.usage <= network.capacity[term.first : term.last].min()
        if not fits.all():
            network.keep(v, fits)
            dropped = True
    return dropped


def _needed(network: Network) -> BoolArray:
    """Mask of checkpoints that can bind, shape [T]."""
    terms, num = _Terms.of(network), len(network.capacity)
    largest_usage = spread(terms.first, terms.last, terms.largest, num)
    needed: BoolArray = (largest_usage > network.capacity) & (
        spread(terms.first, terms.last, np.ones(len(terms.first)), num) > 0
    )
    while True:
        # Terms that began or ended between two checkpoints may be gone with a dropped one, so more
        # can be implied now.
        kept = np.flatnonzero(needed)
        place = np.concatenate([[0], np.cumsum(needed)])
        covered = _covered(place[terms.first], place[terms.last], network.capacity[kept])
        if not covered.any():
            return needed
        needed[kept[covered]] = False


def _covered(first: IntArray, last: IntArray, capacity: FloatArray) -> BoolArray:
    """Mask of checkpoints implied by the next or the previous one, which has less capacity."""
    starts = np.zeros(len(capacity) + 1, dtype=np.bool_)
    ends = np.zeros(len(capacity) + 1, dtype=np.bool_)
    alive = first < last
    starts[first[alive]] = ends[last[alive]] = True
    # Usage is not negative. If nothing ends before the next checkpoint, what is alive here is alive
    # there, so usage here is at most usage there, which is at most the smaller capacity.
    inside_next = ~ends[1:-1] & (capacity[1:] <= capacity[:-1])
    inside_previous = ~starts[1:-1] & (capacity[:-1] <= capacity[1:])
    covered: BoolArray = np.zeros(len(capacity), dtype=np.bool_)
    for t in (np.flatnonzero(inside_next | inside_previous) + 1).tolist():
        # Two with equal capacity imply each other, so one of two neighbours stays in each round.
        if covered[t - 1]:
            continue
        covered[t - 1 if inside_next[t - 1] else t] = True
    return covered


def _drop_checkpoints(network: Network, needed: BoolArray) -> None:
    if needed.all():
        return
    place = np.concatenate([[0], np.cumsum(needed)]).tolist()
    for v, variable in _users(network):
        moved = [Term(place[t.first], place[t.last], t.usage) for t in variable.terms]
        terms = merged_terms(tuple(t for t in moved if t.first < t.last))
        network.replace(v, NetworkVariable(variable.labels, variable.cost, terms))
    network.capacity = network.capacity[needed]


def term_prices(variable: NetworkVariable, prices: FloatArray) -> FloatArray:
    """Price of the usage of each strategy, shape [S], at prices per checkpoint, shape [T]."""
    total = np.zeros(len(variable.cost))
    for term in variable.terms:
        total += float(prices[term.first : term.last].sum()) * term.usage
    return total
