"""Variables that another variable decides become part of it."""

from collections.abc import Iterable

import numpy as np

from autoshard.arrays import IntArray
from autoshard.solve.network import Link, Network, Term, Variable
from autoshard.solve.reductions.base import Inverse, Worklist, sequence
from autoshard.solve.reductions.ties import merged_terms


class MergeFollowers:
    """Merge a variable into a neighbour whose every strategy leaves it a single one.

    This is what forbidding all other pairs of a link means: an alias, an operator that
    takes its operand's layout. The follower's costs, usage and links move to the leader,
    so that the forbidden pairs are gone, and with them what makes repairs of a choice
    hard: the contest instances have no forbidden pair left afterwards.
    """

    name = "merge_followers"

    def apply(self, network: Network) -> Inverse:
        """Merge until no variable follows another one."""
        inverses: list[Inverse] = []
        leaders: set[int] = set()
        queue = Worklist((u, v) for u, v, link in network.pairs() if _forbids(link))
        while queue:
            pair = queue.pop()
            if pair[1] not in network.links.get(pair[0], ()):
                continue
            # The one with fewer links moves.
            for v, u in sorted((pair, pair[::-1]), key=lambda e: len(network.links[e[0]])):
                follows = _followed(network.links[u][v])
                if follows is not None:
                    inverses.append(_merge(network, u, v, follows, queue))
                    leaders.add(u)
                    break
        _tidy(network, leaders)
        return sequence(inverses)


def _tidy(network: Network, leaders: Iterable[int]) -> None:
    """Write the usage of each leader with one term per span."""
    for u in sorted(leaders):
        if u in network.variables:
            variable = network.variables[u]
            terms = merged_terms(variable.terms)
            network.replace(u, Variable(variable.labels, variable.cost, terms))


def _forbids(link: Link) -> bool:
    return bool(np.isinf(link.matrix.values).any())


def _followed(link: Link) -> IntArray | None:
    """The one position that each strategy of the source leaves to the target, shape [S].

    None where some strategy leaves it a choice, or none.
    """
    allowed = np.isfinite(link.matrix.values)
    members = np.bincount(link.cols, minlength=allowed.shape[1])
    if not ((allowed @ members)[link.rows] == 1).all():
        return None
    position = np.zeros(allowed.shape[1], dtype=np.intp)
    position[link.cols] = np.arange(len(link.cols))
    partner = (allowed & (members > 0)).argmax(axis=1)
    follows: IntArray = position[partner[link.rows]]
    return follows


def _merge(
    network: Network, u: int, v: int, follows: IntArray, queue: Worklist[tuple[int, int]]
) -> Inverse:
    """Move v into u, and look again at the links that this changes."""
    leader, follower = network.variables[u], network.variables[v]
    link = network.links[v][u]
    paid = link.matrix.values[link.rows[follows], link.cols]
    moved = tuple(Term(t.first, t.last, t.usage[follows]) for t in follower.terms)
    cost = leader.cost + follower.cost[follows] + paid
    network.disconnect(u, v)
    network.replace(u, Variable(leader.labels, cost, (*leader.terms, *moved)))
    for w, other in network.links[v].items():
        network.connect(u, w, Link(other.matrix, other.rows[follows], other.cols))
        if _forbids(network.links[u][w]):
            queue.update([(u, w)])
    network.remove(v)
    labels, leads = follower.labels[follows], leader.labels

    def invert(choice: IntArray) -> None:
        choice[v] = labels[np.searchsorted(leads, choice[u])]

    return invert
