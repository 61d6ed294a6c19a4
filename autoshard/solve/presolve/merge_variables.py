"""Reductions that remove links and variables.

They normalise links, merge tied and substituted variables, fix variables with one strategy, and
eliminate variables with at most two neighbours.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import prod

import numpy as np

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.solve.network import (
    Matrix,
    Network,
    NetworkLink,
    NetworkVariable,
    Term,
    fingerprint,
    joint_classes,
)
from autoshard.solve.presolve.base import Inverse, Worklist, nothing_to_undo, sequence
from autoshard.solve.settings import DEFAULT_EFFORT, Effort


@dataclass(frozen=True, slots=True)
class _NormalForm:
    matrix: Matrix
    row_shift: FloatArray
    col_shift: FloatArray
    row_class: IntArray
    col_class: IntArray


class NormalizeLinks:
    """Bring every link into normal form.

    Unused rows and columns are dropped; the least entry of each row, then of each column, is moved
    to the costs of the variables; equal rows and equal columns are merged. A link whose price
    depends on one variable only is added to the cost of that variable and removed. Links that
    differ by such costs only have equal matrices then, whose products and comparisons are computed
    once.
    """

    name = "normalize_links"

    def __init__(self) -> None:
        self._forms: dict[bytes, _NormalForm] = {}
        self._seen: dict[tuple[int, int], NetworkLink] = {}

    def apply(self, network: Network) -> Inverse:
        """Simplify every link that is not in normal form."""
        for u, v, link in list(network.pairs()):
            if self._seen.get((u, v)) is not link:
                self.simplify(network, u, v, link)
        return nothing_to_undo

    def simplify(self, network: Network, u: int, v: int, link: NetworkLink) -> None:
        """Bring one link into normal form, or remove it."""
        used_rows, rows = _compressed(link.rows, len(link.matrix.values))
        used_cols, cols = _compressed(link.cols, link.matrix.values.shape[1])
        form = self._form(link.matrix, used_rows, used_cols)
        if form.row_shift.any():
            network.add_cost(u, form.row_shift[rows])
        if form.col_shift.any():
            network.add_cost(v, form.col_shift[cols])
        if form.matrix.values.size == 1:
            network.disconnect(u, v)
            return
        new = NetworkLink(form.matrix, form.row_class[rows], form.col_class[cols])
        if new.matrix.key != link.matrix.key:
            network.put(u, v, new)
        self._seen[u, v] = network.links[u][v]

    def _form(self, matrix: Matrix, rows: IntArray | None, cols: IntArray | None) -> _NormalForm:
        kept = (b"" if kept is None else kept.tobytes() for kept in (rows, cols))
        key = fingerprint(matrix.key, *kept)
        if key not in self._forms:
            values = matrix.values if rows is None else matrix.values[rows]
            self._forms[key] = _normal_form(values if cols is None else values[:, cols])
        return self._forms[key]


def _compressed(labels: IntArray, size: int) -> tuple[IntArray | None, IntArray]:
    """Distinct labels, or None if all are used, and the labels renumbered to them."""
    used = np.zeros(size, dtype=np.bool_)
    used[labels] = True
    if used.all():
        return None, labels
    return np.flatnonzero(used), (np.cumsum(used) - 1)[labels]


def _normal_form(values: FloatArray) -> _NormalForm:
    values = np.where(np.isnan(values), np.inf, values)
    row_shift = _finite_or_zero(values.min(axis=1))
    values = values - row_shift[:, None]
    col_shift = _finite_or_zero(values.min(axis=0))
    # Adding zero turns -0.0 into 0.0, so that equal rows have equal bytes.
    values = values - col_shift + 0.0
    first_rows, row_class = _equal_rows(values)
    first_cols, col_class = _equal_rows(np.ascontiguousarray(values[first_rows].T))
    if len(first_cols) == 1:
        row_shift, first_rows, row_class = row_shift + values[:, 0], [0], np.zeros_like(row_class)
    elif len(first_rows) == 1:
        col_shift, first_cols, col_class = col_shift + values[0], [0], np.zeros_like(col_class)
    matrix = Matrix(np.ascontiguousarray(values[np.ix_(first_rows, first_cols)]))
    return _NormalForm(matrix, row_shift, col_shift, row_class, col_class)


def _finite_or_zero(values: FloatArray) -> FloatArray:
    return np.where(np.isfinite(values), values, 0.0)


def _equal_rows(values: FloatArray) -> tuple[list[int], IntArray]:
    """First row of each class of equal rows, and the class of each row."""
    data, width = values.tobytes(), values.shape[1] * values.itemsize
    firsts: dict[bytes, int] = {}
    row_class = [
        firsts.setdefault(data[start : start + width], row)
        for row, start in enumerate(range(0, len(data), width))
    ]
    first = list(firsts.values())
    return first, np.searchsorted(first, row_class)


class MergeTies:
    """Replace each group of tied variables by its first member.

    Costs and links are added. Each member keeps its own usage term, because members may be alive
    at different times. The diagonal of a link inside a group is added to the cost.
    """

    name = "merge_ties"

    def apply(self, network: Network) -> Inverse:
        """Merge every group; the inverse copies the choice to all members."""
        inverses = [_merge_group(network, group) for group in network.ties]
        network.ties = ()
        return sequence(inverses)


def _merge_group(network: Network, group: tuple[int, ...]) -> Inverse:
    head, *others = group
    for v in others:
        inner = network.links[head].get(v)
        if inner is not None:
            network.add_cost(head, inner.matrix.values[inner.rows, inner.cols])
            network.disconnect(head, v)
        old, new = network.variables[head], network.variables[v]
        terms = merged_terms((*old.terms, *new.terms))
        network.replace(head, NetworkVariable(old.labels, old.cost + new.cost, terms))
        for w, link in network.links[v].items():
            network.connect(head, w, link)
        network.remove(v)

    def invert(choice: IntArray) -> None:
        choice[others] = choice[head]

    return invert


def merged_terms(terms: tuple[Term, ...]) -> tuple[Term, ...]:
    """Merge terms of the same span."""
    spans: dict[tuple[int, int], Term] = {}
    for term in terms:
        span = (term.first, term.last)
        if span in spans:
            spans[span] = Term(*span, np.add(spans[span].usage, term.usage))
        else:
            spans[span] = term
    return tuple(spans[span] for span in sorted(spans))


class SubstituteVariables:
    """Merge a variable into a neighbour each of whose strategies allows only one of its own.

    A link that forbids all other pairs comes from an alias, or from an operator that takes its
    operand's layout. Costs, usage and links of the follower move to the leader. This removes
    forbidden pairs, which make a choice hard to repair; the contest instances have none left
    afterwards.
    """

    name = "substitute_variables"

    def apply(self, network: Network) -> Inverse:
        """Merge until no variable is determined by a neighbour."""
        inverses: list[Inverse] = []
        leaders: set[int] = set()
        queue = Worklist((u, v) for u, v, link in network.pairs() if _forbids(link))
        while queue:
            pair = queue.pop()
            if pair[1] not in network.links.get(pair[0], ()):
                continue
            # The variable with fewer links is merged into the other.
            for v, u in sorted((pair, pair[::-1]), key=lambda e: len(network.links[e[0]])):
                # Each strategy of u must allow exactly one of v; then v is a function of u, and its
                # costs and links can be stated for u.
                follows = _followed(network.links[u][v])
                if follows is not None:
                    inverses.append(_merge_follower(network, u, v, follows, queue))
                    leaders.add(u)
                    break
        _tidy(network, leaders)
        return sequence(inverses)


def _tidy(network: Network, leaders: Iterable[int]) -> None:
    """Merge the usage terms of each leader."""
    for u in sorted(leaders):
        if u in network.variables:
            variable = network.variables[u]
            terms = merged_terms(variable.terms)
            network.replace(u, NetworkVariable(variable.labels, variable.cost, terms))


def _forbids(link: NetworkLink) -> bool:
    return bool(np.isinf(link.matrix.values).any())


def _followed(link: NetworkLink) -> IntArray | None:
    """The position of the target that each strategy of the source determines, shape [S].

    None if some strategy of the source allows several positions of the target, or none.
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


def _merge_follower(
    network: Network, u: int, v: int, follows: IntArray, queue: Worklist[tuple[int, int]]
) -> Inverse:
    """Merge v into u, and queue the links that this changes."""
    leader, follower = network.variables[u], network.variables[v]
    link = network.links[v][u]
    paid = link.matrix.values[link.rows[follows], link.cols]
    moved = tuple(Term(t.first, t.last, t.usage[follows]) for t in follower.terms)
    cost = leader.cost + follower.cost[follows] + paid
    network.disconnect(u, v)
    network.replace(u, NetworkVariable(leader.labels, cost, (*leader.terms, *moved)))
    for w, other in network.links[v].items():
        network.connect(u, w, NetworkLink(other.matrix, other.rows[follows], other.cols))
        if _forbids(network.links[u][w]):
            queue.update([(u, w)])
    network.remove(v)
    labels, leads = follower.labels[follows], leader.labels

    def invert(choice: IntArray) -> None:
        choice[v] = labels[np.searchsorted(leads, choice[u])]

    return invert


_BLOCK = 1 << 16


class FixVariables:
    """Remove variables with one strategy left: add links to costs, subtract usage from capacity."""

    name = "fix_variables"

    def apply(self, network: Network) -> Inverse:
        """Fix every variable with one strategy."""
        decided = [v for v, x in network.variables.items() if len(x.cost) == 1]
        inverse = sequence(_fix(network, v) for v in decided)
        if network.constant == np.inf or (network.capacity < 0).any():
            network.infeasible = True
        return inverse


def _fix(network: Network, v: int) -> Inverse:
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


_MAX_NEIGHBOURS = 2
"""The best price of a variable with three neighbours would be a table with three axes, and a
link has two."""


class EliminateNeighbours:
    """Eliminate variables without usage that have at most two neighbours.

    The best price of such a variable is a constant, a vector over the strategies of its neighbour,
    or a matrix over those of both neighbours (a min-plus product). Equal products are computed
    once, so repeated layers cost as much as one layer.

    Args:
        links: brings new links into normal form.
        keep: variables that are not eliminated.
        products: known products; new ones are added.
        effort: limits of work.

    Attributes:
        products: min-plus products by fingerprint of their inputs.
    """

    name = "eliminate_neighbours"

    def __init__(
        self,
        links: NormalizeLinks,
        *,
        keep: Collection[int] = (),
        products: dict[bytes, Matrix] | None = None,
        effort: Effort = DEFAULT_EFFORT,
    ) -> None:
        self._settings = effort.settings
        self._links = links
        self._keep = keep
        self.products = {} if products is None else products

    def apply(self, network: Network) -> Inverse:
        """Eliminate until every variable without usage has at least three neighbours."""
        queue = Worklist(sorted(network.variables, key=lambda v: (len(network.links[v]), v)))
        inverses = []
        while queue and not network.infeasible:
            v = queue.pop()
            if not self._is_small(network, v):
                continue
            around = list(network.links[v])
            # Before it is removed, since its links and its neighbours' strategies are needed to
            # decide it.
            inverses.append(_decision(network, v))
            self._eliminate(network, v)
            queue.update(around)
        return sequence(inverses)

    def _is_small(self, network: Network, v: int) -> bool:
        links = list(network.links[v].values())
        # With usage, the strategy that is best depends on what the limit leaves, not on the
        # neighbours alone.
        if v in self._keep or network.variables[v].terms or len(links) > _MAX_NEIGHBOURS:
            return False
        shape = [int(link.matrix.values.shape[1]) for link in links]
        return len(network.variables[v].cost) * prod(shape) <= self._settings.max_product_work

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
            product = NetworkLink(self._product(cost, left, right), left.cols, right.cols)
            network.connect(u, w, product)
            low, high = min(u, w), max(u, w)
            self._links.simplify(network, low, high, network.links[low][high])

    def _product(self, cost: FloatArray, left: NetworkLink, right: NetworkLink) -> Matrix:
        """Least price over a variable by columns of its two links, shape [C, D]."""
        key = fingerprint(
            cost.tobytes(),
            left.matrix.key,
            left.rows.tobytes(),
            right.matrix.key,
            right.rows.tobytes(),
        )
        if key not in self.products:
            # The product minimises over the strategies of the variable; equal rows in both
            # links make them one, so the work depends on its layouts, not on its strategies.
            members, classes = joint_classes(left.rows, right.rows)
            least = np.full(len(members), np.inf)
            np.minimum.at(least, classes, cost)
            first = least[:, None] + left.matrix.values[left.rows[members]]
            self.products[key] = Matrix(min_plus(first.T, right.matrix.values[right.rows[members]]))
        return self.products[key]


def _decision(network: Network, v: int) -> Inverse:
    """The inverse of an elimination: the best strategy given the neighbours' choices."""
    variable = network.variables[v]
    around = [(w, network.variables[w].labels, link) for w, link in network.links[v].items()]

    def invert(choice: IntArray) -> None:
        prices = variable.cost
        for w, labels, link in around:
            col = link.cols[np.searchsorted(labels, choice[w])]
            prices = prices + link.matrix.values[link.rows, col]
        choice[v] = variable.labels[prices.argmin()]

    return invert


def min_plus(first: FloatArray, second: FloatArray) -> FloatArray:
    """Min-plus product of two matrices, [I, K] by [K, J] to [I, J]."""
    out = np.empty((len(first), second.shape[1]))
    step = max(1, _BLOCK // max(second.size, 1))
    for start in range(0, len(first), step):
        # The sums before the minimum have I x K x J entries: in blocks they stay in the cache.
        block = first[start : start + step]
        out[start : start + step] = (block[:, :, None] + second[None]).min(axis=1)
    return out
