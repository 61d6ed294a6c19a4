"""A mutable problem for presolve, cheap to copy.

A network has at most one link between two variables, no ties once `MergeTies` has run, and usage
as terms over checkpoints: the times at which the usage can peak. Variables, links, matrices and
terms are immutable and are replaced, so a copy of a network is a copy of its dictionaries.
"""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Self

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from autoshard.base.arrays import BoolArray, FloatArray, IntArray
from autoshard.solve.problem import Edge, Problem


def fingerprint(*parts: bytes) -> bytes:
    """Digest of a sequence of byte strings, 32 bytes, to recognise equal work."""
    digest = blake2b(digest_size=32)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


class Matrix:
    """Prices of a link, shape [R, C], immutable, comparable by `key`."""

    def __init__(self, values: FloatArray, *, key: bytes | None = None) -> None:
        self.values = values
        self._key = key

    @property
    def key(self) -> bytes:
        """Fingerprint of the content."""
        if self._key is None:
            shape = repr(self.values.shape).encode()
            self._key = fingerprint(shape, np.ascontiguousarray(self.values).tobytes())
        return self._key

    @cached_property
    def flipped(self) -> "Matrix":
        """The transpose, shape [C, R]."""
        flipped = Matrix(self.values.T)
        flipped.flipped = self
        return flipped


@dataclass(frozen=True, slots=True, eq=False)
class NetworkLink:
    """Price `matrix.values[rows[s], cols[t]]` of strategies s and t of two variables."""

    matrix: Matrix
    rows: IntArray
    cols: IntArray

    @property
    def flipped(self) -> "NetworkLink":
        """The same link seen from the other end."""
        return NetworkLink(self.matrix.flipped, self.cols, self.rows)

    def dense(self) -> FloatArray:
        """Price of every pair of strategies, shape [S, T]."""
        return self.matrix.values[np.ix_(self.rows, self.cols)]


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """Usage of each strategy, shape [S], at the checkpoints [first, last)."""

    first: int
    last: int
    usage: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class NetworkVariable:
    """A node of the problem that is not decided yet.

    Attributes:
        labels: index of each remaining strategy in the original node, ascending, shape [S].
        cost: price of each remaining strategy, shape [S].
        terms: its usage; several if tied nodes are alive at different times.
    """

    labels: IntArray
    cost: FloatArray
    terms: tuple[Term, ...] = ()

    def kept(self, keep: BoolArray | IntArray) -> "NetworkVariable":
        """The variable with only some of its strategies."""
        terms = tuple(Term(t.first, t.last, t.usage[keep]) for t in self.terms)
        return NetworkVariable(self.labels[keep], self.cost[keep], terms)


class Network:
    """A weighted constraint network under usage limits.

    Attributes:
        variables: undecided variables, by index of the original node.
        links: links[u][v] is the link of u and v seen from u; links[v][u] its flip.
        ties: groups of variables that must pick the same label.
        capacity: slack at each checkpoint, shape [T].
        constant: price of everything that is already decided.
        infeasible: true if a reduction has proven that no choice is allowed.
        changes: count of edits per variable, to skip what has not changed.
    """

    def __init__(self) -> None:
        self.variables: dict[int, NetworkVariable] = {}
        self.links: dict[int, dict[int, NetworkLink]] = {}
        self.ties: tuple[tuple[int, ...], ...] = ()
        self.capacity: FloatArray = np.zeros(0)
        self.constant = 0.0
        self.infeasible = False
        self.changes: dict[int, int] = {}

    @classmethod
    def from_problem(cls, problem: Problem, *, limited: bool = True) -> Self:
        """Make the network of a problem; without its usage limits if `limited` is false."""
        assert not problem.using_edges, "see `without_edge_usage`"
        network = cls()
        limits = [x for x in problem.resources if limited and np.isfinite(x.limit)]
        # Usage is whole, so all sums and differences of usage and capacity are exact.
        slacks = [np.floor(x.limit) for x in limits]
        num_times, spans = len(problem.peak_times), problem.peak_spans
        # Each limit has checkpoints of its own.
        network.capacity = np.repeat(slacks, num_times)
        for v, node in enumerate(problem.nodes):
            first, last = spans[v].tolist()
            cost, terms = node.cost, []
            for place, (limit, slack) in enumerate(zip(limits, slacks, strict=True)):
                usage = limit.nodes.get(v)
                if usage is not None and first < last:
                    # What exceeds a limit by itself is forbidden by its cost. Its usage may be inf,
                    # and must not spoil sums.
                    fits, start = usage <= slack, place * num_times
                    terms.append(Term(start + first, start + last, np.where(fits, usage, 0.0)))
                    cost = np.where(fits, cost, np.inf)
            network.add(v, NetworkVariable(np.arange(node.num_strategies), cost, tuple(terms)))
        network.connect_all(problem.edges)
        network.ties = tuple(group for group in problem.ties if len(group) > 1)
        return network

    def copy(self) -> "Network":
        """An independent copy."""
        other = copy(self)
        other.variables, other.changes = dict(self.variables), dict(self.changes)
        other.links = {v: dict(links) for v, links in self.links.items()}
        return other

    def pairs(self) -> Iterator[tuple[int, int, NetworkLink]]:
        """Every link once."""
        for u, links in self.links.items():
            for v, link in links.items():
                if u < v:
                    yield u, v, link

    @property
    def num_strategies(self) -> int:
        """Remaining strategies of all variables."""
        return sum(len(variable.cost) for variable in self.variables.values())

    @property
    def num_prices(self) -> int:
        """Entries of the matrices of all links."""
        return sum(link.matrix.values.size for _, _, link in self.pairs())

    def add(self, v: int, variable: NetworkVariable) -> None:
        """Add a variable without links."""
        self.variables[v], self.links[v], self.changes[v] = variable, {}, 0

    def touch(self, *variables: int) -> None:
        """Count an edit of each variable."""
        for v in variables:
            self.changes[v] += 1

    def replace(self, v: int, variable: NetworkVariable) -> None:
        """Replace a variable by one with the same strategies."""
        self.variables[v] = variable
        self.touch(v)

    def add_cost(self, v: int, cost: FloatArray) -> None:
        """Add to the price of each strategy."""
        variable = self.variables[v]
        self.replace(v, NetworkVariable(variable.labels, variable.cost + cost, variable.terms))

    def keep(self, v: int, mask: BoolArray) -> None:
        """Drop the strategies of a variable where a mask is false."""
        if not mask.any():
            self.infeasible = True
            return
        self.replace(v, self.variables[v].kept(mask))
        for w, link in self.links[v].items():
            self.put(v, w, NetworkLink(link.matrix, link.rows[mask], link.cols))

    def put(self, u: int, v: int, link: NetworkLink) -> None:
        """Set the link of two variables; an existing one is replaced."""
        self.links[u][v] = link
        self.links[v][u] = link.flipped
        self.touch(u, v)

    def connect(self, u: int, v: int, link: NetworkLink) -> None:
        """Add a link; parallel links are summed into one."""
        old = self.links[u].get(v)
        self.put(u, v, link if old is None else parallel_sum(old, link))

    def connect_all(self, edges: Iterable[Edge]) -> None:
        """Add a link for each edge; equal matrices are shared."""
        matrices: dict[int, Matrix] = {}
        for edge in edges:
            matrix = matrices.setdefault(id(edge.cost), Matrix(edge.cost))
            self.connect(edge.source, edge.target, NetworkLink(matrix, edge.rows, edge.cols))

    def disconnect(self, u: int, v: int) -> None:
        """Remove the link of two variables."""
        del self.links[u][v], self.links[v][u]
        self.touch(u, v)

    def remove(self, v: int) -> None:
        """Remove a variable and its links."""
        for w in list(self.links[v]):
            self.disconnect(v, w)
        del self.variables[v], self.links[v], self.changes[v]

    def usage(self, picks: dict[int, int]) -> FloatArray:
        """Usage at each checkpoint, shape [T], of a position per variable."""
        used = [(t, t.usage[picks[v]]) for v, x in self.variables.items() for t in x.terms]
        spans = np.array([(t.first, t.last) for t, _ in used], dtype=np.intp).reshape(-1, 2)
        amounts = np.array([amount for _, amount in used], dtype=np.float64)
        return spread(spans[:, 0], spans[:, 1], amounts, len(self.capacity))

    def price(self, picks: dict[int, int]) -> float:
        """Price of a position per variable, with the constant."""
        total = self.constant + sum(float(x.cost[picks[v]]) for v, x in self.variables.items())
        for u, v, link in self.pairs():
            total += float(link.matrix.values[link.rows[picks[u]], link.cols[picks[v]]])
        return total


def component_labels(size: int, first: IntArray, second: IntArray) -> IntArray:
    """Connected component of each node, shape [size], of the graph of edges first[i]-second[i].

    Components are numbered in the order of their first nodes.
    """
    graph = coo_array((np.ones(len(first)), (first, second)), shape=(size, size))
    return connected_components(graph, directed=False)[1].astype(np.intp)


def components(size: int, pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Connected components of a graph, each ascending, in the order of their first nodes."""
    ends = np.array([*pairs], dtype=np.intp).reshape(-1, 2)
    members: dict[int, list[int]] = {}
    for v, label in enumerate(component_labels(size, ends[:, 0], ends[:, 1]).tolist()):
        members.setdefault(label, []).append(v)
    return [*members.values()]


def spread(
    first: IntArray, last: IntArray, amounts: FloatArray, num_checkpoints: int
) -> FloatArray:
    """Sum at each checkpoint, shape [T], of amounts that are each alive in a span [first, last)."""
    # Differences at starts and ends, summed once: linear in terms plus checkpoints.
    delta = np.bincount(first, amounts, num_checkpoints + 1)
    delta -= np.bincount(last, amounts, num_checkpoints + 1)
    return np.cumsum(delta[:-1])


class UsageTable:
    """The usage of a network's strategies as flat arrays.

    Args:
        network: must not change while the object is in use.
        variables: its variables by position.
        starts: number of the first strategy of each variable, in one list of the strategies of all.

    Attributes:
        spans: span [first, last) of times in which each term counts, shape [n, 2].
        owners: position of the variable of each term, shape [n].
    """

    def __init__(self, network: Network, variables: Sequence[int], starts: IntArray) -> None:
        terms = [(i, t) for i, v in enumerate(variables) for t in network.variables[v].terms]
        sizes = np.array([len(t.usage) for _, t in terms], dtype=np.intp)
        self.spans = np.array([(t.first, t.last) for _, t in terms], np.intp).reshape(-1, 2)
        self.owners = np.array([i for i, _ in terms], dtype=np.intp)
        self._first = (np.cumsum(sizes) - sizes).astype(np.intp)
        self._usage = np.concatenate([np.zeros(0), *(t.usage for _, t in terms)])
        self._term = np.repeat(np.arange(len(terms)), sizes)
        within = np.arange(len(self._usage)) - self._first[self._term]
        self._strategy = starts[self.owners[self._term]] + within

    def priced(self, cost: FloatArray, prices: FloatArray) -> FloatArray:
        """Price of each strategy with its usage, shape [K].

        Args:
            cost: price of each strategy, shape [K].
            prices: of usage at each checkpoint, shape [T].
        """
        # Prefix sums: the price of a span in one subtraction, however long the node lives.
        total = np.concatenate([[0.0], np.cumsum(prices)])
        price = total[self.spans[:, 1]] - total[self.spans[:, 0]]
        used = np.bincount(self._strategy, self._usage * price[self._term], minlength=len(cost))
        priced: FloatArray = cost + used
        return priced

    def of(self, picks: IntArray) -> FloatArray:
        """Usage of each term by a strategy per variable, shape [n]."""
        used: FloatArray = self._usage[self._first + picks[self.owners]]
        return used

    def over_time(self, picks: IntArray, num_checkpoints: int) -> FloatArray:
        """Usage at each checkpoint by a strategy per variable, shape [T]."""
        first, last = self.spans.T
        return spread(first, last, self.of(picks), num_checkpoints)


def joint_classes(first: IntArray, second: IntArray) -> tuple[IntArray, IntArray]:
    """Distinct pairs of two labellings: a member of each pair, and the pair of each member."""
    width = int(second.max(initial=0)) + 1
    _, members, classes = np.unique(first * width + second, return_index=True, return_inverse=True)
    return members, classes


def parallel_sum(first: NetworkLink, second: NetworkLink) -> NetworkLink:
    """Sum of two parallel links."""
    row_of, rows = joint_classes(first.rows, second.rows)
    col_of, cols = joint_classes(first.cols, second.cols)
    values = (
        first.matrix.values[np.ix_(first.rows[row_of], first.cols[col_of])]
        + second.matrix.values[np.ix_(second.rows[row_of], second.cols[col_of])]
    )
    return NetworkLink(Matrix(values), rows, cols)
