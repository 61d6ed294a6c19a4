"""Tied variables become one."""

import numpy as np

from autoshard.arrays import IntArray
from autoshard.solve.network import Network, Term, Variable
from autoshard.solve.reductions.base import Inverse, sequence


class MergeTies:
    """Replace each group of tied variables by its first member.

    Costs and links add up; each member keeps its own usage term, because the members
    may live at different times. A link inside a group becomes a cost: its diagonal.
    """

    name = "merge_ties"

    def apply(self, network: Network) -> Inverse:
        """Merge every group; the inverse copies the choice to all members."""
        inverses = [_merge(network, group) for group in network.ties]
        network.ties = ()
        return sequence(inverses)


def _merge(network: Network, group: tuple[int, ...]) -> Inverse:
    head, *others = group
    for v in others:
        inner = network.links[head].get(v)
        if inner is not None:
            network.add_cost(head, inner.matrix.values[inner.rows, inner.cols])
            network.disconnect(head, v)
        old, new = network.variables[head], network.variables[v]
        terms = merged_terms((*old.terms, *new.terms))
        network.replace(head, Variable(old.labels, old.cost + new.cost, terms))
        for w, link in network.links[v].items():
            network.connect(head, w, link)
        network.remove(v)

    def invert(choice: IntArray) -> None:
        choice[others] = choice[head]

    return invert


def merged_terms(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    """The same usage with one term per span."""
    spans: dict[tuple[int, int], Term] = {}
    for term in terms:
        span = (term.first, term.last)
        if span in spans:
            term = Term(*span, np.add(spans[span].usage, term.usage))  # noqa: PLW2901 - the sum replaces it
        spans[span] = term
    return tuple(spans[span] for span in sorted(spans))
