"""Variables with at most two neighbours are decided by them."""

from collections.abc import Collection

import numpy as np

from autoshard.arrays import FloatArray, IntArray
from autoshard.solve.network import Link, Matrix, Network, fingerprint
from autoshard.solve.reductions.base import Inverse, Worklist, sequence
from autoshard.solve.reductions.tables import SimplifyLinks

MOST_SUMS = 1 << 26
"""Largest number of additions for which a variable is eliminated."""
_BLOCK = 1 << 16


class FoldSingles:
    """Fold variables with one strategy left into their neighbours, their use into the room."""

    name = "fold_singles"

    def apply(self, network: Network) -> Inverse:
        """Fold every decided variable."""
        decided = [v for v, x in network.variables.items() if len(x.cost) == 1]
        inverse = sequence(_fold(network, v) for v in decided)
        if network.constant == np.inf or (network.capacity < 0).any():
            network.infeasible = True
        return inverse


def _fold(network: Network, v: int) -> Inverse:
    variable = network.variables[v]
    for w, link in network.links[v].items():
        network.add_cost(w, link.matrix.values[link.rows[0], link.cols])
    capacity = network.capacity.copy()
    for term in variable.terms:
        capacity[term.first : term.last] -= term.usage[0]
    network.capacity = capacity
    network.constant += float(variable.cost[0])
    network.remove(v)
    label = variable.labels[0]

    def invert(choice: IntArray) -> None:
        choice[v] = label

    return invert


class EliminateNeighbours:
    """Minimise out variables without usage that have at most two neighbours.

    The best price of such a variable is a function of the layouts that its neighbours
    show it: a number, a vector, or a matrix (a min-plus product). Equal products are
    computed once, so repeated layers cost one layer.

    Args:
        links: keeps new links in normal form.
        keep: variables that stay.
        products: products known from elsewhere; new ones are added.

    Attributes:
        products: min-plus products by fingerprint of their inputs.
    """

    name = "eliminate_neighbours"

    def __init__(
        self,
        links: SimplifyLinks,
        *,
        keep: Collection[int] = (),
        products: dict[bytes, Matrix] | None = None,
    ) -> None:
        self._links = links
        self._keep = keep
        self.products = {} if products is None else products

    def apply(self, network: Network) -> Inverse:
        """Eliminate until every variable without usage has three neighbours."""
        queue = Worklist(sorted(network.variables, key=lambda v: (len(network.links[v]), v)))
        inverses = []
        while queue and not network.infeasible:
            v = queue.pop()
            if not self._is_small(network, v):
                continue
            around = list(network.links[v])
            inverses.append(_decision(network, v))
            self._eliminate(network, v)
            queue.update(around)
        return sequence(inverses)

    def _is_small(self, network: Network, v: int) -> bool:
        links = list(network.links[v].values())
        if v in self._keep or network.variables[v].terms or len(links) > 2:  # noqa: PLR2004 - one or two neighbours
            return False
        shape = [link.matrix.values.shape[1] for link in links]
        return len(network.variables[v].cost) * int(np.prod(shape)) <= MOST_SUMS

    def _eliminate(self, network: Network, v: int) -> None:
        cost = network.variables[v].cost
        around = list(network.links[v].items())
        network.remove(v)
        if not around:
            network.constant += float(cost.min())
            network.infeasible = network.infeasible or not np.isfinite(cost.min())
        elif len(around) == 1:
            w, link = around[0]
            prices = cost[:, None] + link.matrix.values[link.rows]
            network.add_cost(w, prices.min(axis=0)[link.cols])
        else:
            (u, left), (w, right) = around
            product = Link(self._product(cost, left, right), left.cols, right.cols)
            network.connect(u, w, product)
            low, high = min(u, w), max(u, w)
            self._links.simplify(network, low, high, network.links[low][high])

    def _product(self, cost: FloatArray, left: Link, right: Link) -> Matrix:
        """Least price between the columns of two links of a variable, shape [C, D]."""
        key = fingerprint(
            cost.tobytes(),
            left.matrix.key,
            left.rows.tobytes(),
            right.matrix.key,
            right.rows.tobytes(),
        )
        if key not in self.products:
            self.products[key] = Matrix(
                min_plus(*_cheapest(cost, left.rows, right.rows), left.matrix, right.matrix)
            )
        return self.products[key]


def _decision(network: Network, v: int) -> Inverse:
    """The best strategy of a variable once its neighbours are chosen."""
    variable = network.variables[v]
    around = [(w, network.variables[w].labels, link) for w, link in network.links[v].items()]

    def invert(choice: IntArray) -> None:
        prices = variable.cost
        for w, labels, link in around:
            col = link.cols[np.searchsorted(labels, choice[w])]
            prices = prices + link.matrix.values[link.rows, col]
        choice[v] = variable.labels[prices.argmin()]

    return invert


def _cheapest(
    cost: FloatArray, rows: IntArray, cols: IntArray
) -> tuple[FloatArray, IntArray, IntArray]:
    """Least cost of each distinct pair of labels, with the pair."""
    width = int(cols.max()) + 1
    pairs, place = np.unique(rows * width + cols, return_inverse=True)
    least = np.full(len(pairs), np.inf)
    np.minimum.at(least, place, cost)
    return least, pairs // width, pairs % width


def min_plus(
    cost: FloatArray, rows: IntArray, cols: IntArray, left: Matrix, right: Matrix
) -> FloatArray:
    """Entry [c, d] is the least of `cost[k] + left[rows[k], c] + right[cols[k], d]` over k."""
    first = (cost[:, None] + left.values[rows]).T
    second = right.values[cols]
    out = np.empty((len(first), second.shape[1]))
    step = max(1, _BLOCK // second.size)
    for start in range(0, len(first), step):
        block = first[start : start + step]
        out[start : start + step] = (block[:, :, None] + second[None]).min(axis=1)
    return out
