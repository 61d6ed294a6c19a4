"""Usage limits in their simplest form."""

import numpy as np

from autoshard.solve.network import Network, Term, Variable
from autoshard.solve.problem import BoolArray, FloatArray, IntArray
from autoshard.solve.reductions.base import Inverse, nothing_to_undo
from autoshard.solve.reductions.ties import merged_terms


class SimplifyLimits:
    """Drop limits that cannot bind, and strategies that cannot fit.

    What a variable uses in any case is taken off the room. A checkpoint whose room is
    enough for the largest use of everybody is forgotten, and so is one whose users all
    meet a neighbouring checkpoint with less room. Strategies that do not fit even when
    all others use their least are dropped.
    """

    name = "simplify_limits"

    def apply(self, network: Network) -> Inverse:
        """Simplify until nothing changes."""
        before = None
        while before != (before := _signature(network)) and not network.infeasible:
            _take_least(network)
            if (network.capacity < 0).any():
                network.infeasible = True
                break
            _drop_unfit(network)
            _forget(network, _slack(network) | _covered(network))
        return nothing_to_undo


def _signature(network: Network) -> tuple[int, int, int]:
    terms = sum(len(x.terms) for x in network.variables.values())
    strategies = sum(len(x.cost) for x in network.variables.values() if x.terms)
    return len(network.capacity), terms, strategies


def _users(network: Network) -> list[tuple[int, Variable]]:
    return [(v, x) for v, x in network.variables.items() if x.terms]


def _take_least(network: Network) -> None:
    delta = np.zeros(len(network.capacity) + 1)
    for v, variable in _users(network):
        terms = []
        for term in variable.terms:
            least = float(term.usage.min())
            delta[term.first] += least
            delta[term.last] -= least
            if term.usage.max() > least:
                terms.append(Term(term.first, term.last, term.usage - least))
        if len(terms) != len(variable.terms) or any(t.usage.min() > 0 for t in variable.terms):
            network.replace(v, Variable(variable.labels, variable.cost, tuple(terms)))
    network.capacity = network.capacity - np.cumsum(delta[:-1])


def _drop_unfit(network: Network) -> None:
    for v, variable in _users(network):
        fits: BoolArray = np.ones(len(variable.cost), dtype=np.bool_)
        for term in variable.terms:
            fits &= term.usage <= network.capacity[term.first : term.last].min()
        if not fits.all():
            network.keep(v, fits)


def _slack(network: Network) -> BoolArray:
    delta = np.zeros(len(network.capacity) + 1)
    for _, variable in _users(network):
        for term in variable.terms:
            most = float(term.usage.max())
            delta[term.first] += most
            delta[term.last] -= most
    # The running sum rounds; a limit is forgotten only where it is clear of the rounding.
    most_use = np.cumsum(delta[:-1])
    rounding = 1e-12 * np.abs(delta).sum()
    slack: BoolArray = most_use + rounding <= network.capacity
    slack[_idle(network)] = True
    return slack


def _idle(network: Network) -> BoolArray:
    """Checkpoints that nobody uses."""
    return np.equal(_alive_counts(network), 0)


def _alive_counts(network: Network) -> IntArray:
    delta = np.zeros(len(network.capacity) + 1, dtype=np.intp)
    for _, variable in _users(network):
        for term in variable.terms:
            delta[term.first] += 1
            delta[term.last] -= 1
    return np.cumsum(delta[:-1])


def _covered(network: Network) -> BoolArray:
    """Checkpoints whose users are all users of the next or the previous one, with less room."""
    capacity = network.capacity
    covered: BoolArray = np.zeros(len(capacity), dtype=np.bool_)
    starts = np.zeros(len(capacity) + 1, dtype=np.bool_)
    ends = np.zeros(len(capacity) + 1, dtype=np.bool_)
    for _, variable in _users(network):
        for term in variable.terms:
            starts[term.first] = ends[term.last] = True
    for t in range(1, len(capacity)):
        inside_previous = not starts[t] and capacity[t - 1] <= capacity[t]
        inside_next = not ends[t] and capacity[t] <= capacity[t - 1]
        if inside_next and not covered[t - 1]:
            covered[t - 1] = True
        elif inside_previous and not covered[t - 1]:
            covered[t] = True
    return covered


def _forget(network: Network, forgotten: BoolArray) -> None:
    if not forgotten.any():
        return
    place = np.concatenate([[0], np.cumsum(~forgotten)])
    for v, variable in _users(network):
        moved = [Term(int(place[t.first]), int(place[t.last]), t.usage) for t in variable.terms]
        terms = merged_terms(tuple(t for t in moved if t.first < t.last))
        network.replace(v, Variable(variable.labels, variable.cost, terms))
    network.capacity = network.capacity[~forgotten]


def term_prices(variable: Variable, prices: FloatArray) -> FloatArray:
    """Price of the usage of each strategy, shape [S], at prices per checkpoint, shape [T]."""
    total = np.zeros(len(variable.cost))
    for term in variable.terms:
        total += float(prices[term.first : term.last].sum()) * term.usage
    return total
