"""Exact minimisation of networks of small treewidth, by bucket elimination.

Bucket elimination (Dechter, Artif. Intell. 113:41, 1999): a variable is minimised out into a
message, a table over its neighbours. A table is indexed not by strategies but by classes of
strategies with equal prices towards the eliminated variables, so it stays small if many
strategies share a layout.
"""

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.solve.network import Network, joint_classes
from autoshard.solve.problem import Problem
from autoshard.solve.settings import DEFAULT_EFFORT, Effort

_MAX_AXES = 24
"""Variables of one table."""

_BLOCK = 1 << 18
"""Number of entries of a sum that are computed at once."""


@dataclass(frozen=True, slots=True, eq=False)
class BucketInput:
    """An input factor of a bucket, with the index of each bucket class along each of its axes."""

    factor: int
    order: tuple[int, ...]
    picks: tuple[IntArray, ...]
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class EliminationBucket:
    """The elimination of one variable into the table `output` over its neighbours."""

    variable: int
    classes: IntArray
    shape: tuple[int, ...]
    inputs: tuple[BucketInput, ...]
    output: int


def bucket_message(
    bucket: EliminationBucket, cost: FloatArray, tables: Sequence[FloatArray]
) -> FloatArray:
    """The least price of a bucket's variable and inputs, by the classes of its neighbours.

    Args:
        bucket: the elimination of the variable.
        cost: of each strategy of the variable, shape [S].
        tables: of all factors, by their numbers.
    """
    least = np.full(bucket.shape[0], np.inf)
    # Strategies of a class have the same price with all neighbours, so only the cheapest matters.
    np.minimum.at(least, bucket.classes, cost)
    batch = [_broadcast_table(bucket, seen, tables) for seen in bucket.inputs]
    out = np.full(bucket.shape[1:], np.inf)
    flat = (1,) * (len(bucket.shape) - 1)
    step = max(1, _BLOCK // max(out.size, 1))
    for start in range(0, len(least), step):
        part = slice(start, start + step)
        # In blocks: the sum before the minimum has an axis more than the message that is kept.
        total = least[part].reshape(-1, *flat)
        for table in batch:
            total = total + table[part]
        np.minimum(out, total.min(axis=0), out=out)
    return out


def _broadcast_table(
    bucket: EliminationBucket, seen: BucketInput, tables: Sequence[FloatArray]
) -> FloatArray:
    """An input table by the classes of the bucket, with an axis for each of its variables."""
    table = tables[seen.factor].transpose(seen.order)
    table = table[np.ix_(*seen.picks)]
    shape = [1] * len(bucket.shape)
    for axis, size in zip(seen.axes, table.shape, strict=True):
        shape[axis] = size
    return table.reshape(shape)


@dataclass(frozen=True, slots=True, eq=False)
class _Factor:
    """Axes of a table: its variables, and the index of each of their strategies."""

    scope: tuple[int, ...]
    classes: tuple[IntArray, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class JointTable:
    """Prices of the joint strategies of any number of variables.

    Attributes:
        scope: the variables.
        values: prices, one axis per variable of the scope.
    """

    scope: tuple[int, ...]
    values: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """Result of one evaluation: the least price, a best position per variable, all tables."""

    value: float
    picks: dict[int, int]
    tables: list[FloatArray]
    costs: Mapping[int, FloatArray]


class Elimination:
    """A compiled elimination order of a network.

    Attributes:
        work: additions of one evaluation.
        entries: entries of all tables together.
    """

    def __init__(
        self, network: Network, extra: Sequence[JointTable], effort: Effort = DEFAULT_EFFORT
    ) -> None:
        self._constant = network.constant
        self._effort = effort
        self._sizes = {v: len(x.cost) for v, x in network.variables.items()}
        self._factors: list[_Factor] = []
        self._given: list[FloatArray] = []
        self._buckets: list[EliminationBucket] = []
        self.work = 0.0
        self.entries = 0
        for u, v, link in network.pairs():
            used_rows, rows = np.unique(link.rows, return_inverse=True)
            used_cols, cols = np.unique(link.cols, return_inverse=True)
            self._given.append(link.matrix.values[np.ix_(used_rows, used_cols)])
            self._factors.append(_Factor((u, v), (rows, cols), self._given[-1].shape))
        for table in extra:
            classes = tuple(np.arange(self._sizes[v]) for v in table.scope)
            self._given.append(table.values)
            self._factors.append(_Factor(table.scope, classes, table.values.shape))

    @classmethod
    def compile(
        cls,
        network: Network,
        *,
        most_work: float | None = None,
        keep: Collection[int] = (),
        extra: Sequence[JointTable] = (),
        effort: Effort = DEFAULT_EFFORT,
    ) -> "Elimination | None":
        """Find an order, cheapest variable first, and its tables; None if they would be too large.

        Args:
            network: its usage terms are ignored.
            most_work: largest number of additions of one evaluation; that of the settings if None.
            keep: variables that are not eliminated; `joint_table` is over them.
            extra: prices added to those of the network.
            effort: limits of work, and when to stop.
        """
        plan = cls(network, extra, effort)
        if most_work is None:
            most_work = effort.settings.max_elimination_work
        return plan if plan._order(most_work, frozenset(keep)) else None

    def _order(self, most_work: float, keep: frozenset[int]) -> bool:
        """Eliminate the cheapest variable first; return false if that exceeds a limit."""
        member: dict[int, set[int]] = {v: set() for v in self._sizes if v not in keep}
        for f, factor in enumerate(self._factors):
            for v in factor.scope:
                if v not in keep:
                    member[v].add(f)
        # The best order is NP-hard to find (Arnborg, Corneil and Proskurowski 1987); taking the
        # cheapest variable next is the usual heuristic.
        heap = [(self._estimate(v, member[v]), v) for v in member]
        heapq.heapify(heap)
        while member:
            estimate, v = heapq.heappop(heap)
            # An entry from before the last elimination around v; the newer one is in the heap, too.
            if v not in member or estimate != self._estimate(v, member[v]):
                continue
            around = self._remove(v, member, most_work)
            if around is None:
                return False
            for w in around:
                heapq.heappush(heap, (self._estimate(w, member[w]), w))
        return True

    def _remove(self, v: int, member: dict[int, set[int]], most_work: float) -> list[int] | None:
        """Eliminate a variable; return its neighbours, or None if that exceeds a limit."""
        self._effort.check()
        settings, inputs = self._effort.settings, member.pop(v)
        if len({w for f in inputs for w in self._factors[f].scope}) > _MAX_AXES:
            return None
        bucket = self._bucket(v, sorted(inputs))
        size = prod(bucket.shape[1:])
        self.work += size * bucket.shape[0] * len(inputs)
        self.entries += size
        if (
            size > settings.max_table_entries
            or self.entries > settings.max_total_entries
            or self.work > most_work
        ):
            return None
        self._buckets.append(bucket)
        around = [w for w in self._factors[bucket.output].scope if w in member]
        for w in around:
            member[w] -= inputs
            member[w].add(bucket.output)
        return around

    def _estimate(self, v: int, inputs: set[int]) -> float:
        """Upper bound of the additions of eliminating a variable now."""
        sizes: dict[int, int] = {v: 1}
        for f in inputs:
            factor = self._factors[f]
            for w, size in zip(factor.scope, factor.sizes, strict=True):
                # Exact joint classes need the labels of all inputs; they are at most this many.
                sizes[w] = min(sizes.get(w, 1) * size, self._sizes[w])
        return prod(sizes.values(), start=1.0)

    def _bucket(self, v: int, inputs: list[int]) -> EliminationBucket:
        joint: dict[int, IntArray] = {v: np.zeros(self._sizes[v], dtype=np.intp)}
        for f in inputs:
            factor = self._factors[f]
            for w, classes in zip(factor.scope, factor.classes, strict=True):
                # Two strategies are one only if every input takes them for one: the classes of all
                # inputs are intersected.
                joint[w] = joint_classes(joint[w], classes)[1] if w in joint else classes
        scope = tuple(joint)
        sizes = {w: int(classes.max()) + 1 for w, classes in joint.items()}
        seen = tuple(self._seen_from(f, scope, joint, sizes) for f in inputs)
        around = scope[1:]
        self._factors.append(
            _Factor(around, tuple(joint[w] for w in around), tuple(sizes[w] for w in around))
        )
        shape = tuple(sizes[w] for w in scope)
        return EliminationBucket(v, joint[v], shape, seen, len(self._factors) - 1)

    def _seen_from(
        self,
        f: int,
        scope: tuple[int, ...],
        joint: Mapping[int, IntArray],
        sizes: Mapping[int, int],
    ) -> BucketInput:
        factor = self._factors[f]
        order = tuple(sorted(range(len(factor.scope)), key=lambda i: scope.index(factor.scope[i])))
        picks = []
        for i in order:
            w = factor.scope[i]
            pick = np.zeros(sizes[w], dtype=np.intp)
            pick[joint[w]] = factor.classes[i]
            picks.append(pick)
        axes = tuple(scope.index(factor.scope[i]) for i in order)
        return BucketInput(f, order, tuple(picks), axes)

    def evaluate(self, costs: Mapping[int, FloatArray]) -> Evaluation:
        """Minimise for given costs per strategy of each variable.

        Returns:
            the least price, inf if no choice is allowed, with a choice that attains it.
        """
        tables, value = [*self._given], self._constant
        for bucket in self._buckets:
            self._effort.check()
            table = bucket_message(bucket, costs[bucket.variable], tables)
            tables.append(table)
            # Nothing is linked to what was eliminated: a whole component is decided.
            if table.ndim == 0:
                value += float(table)
        result = Evaluation(value, {}, tables, costs)
        kept = {v for b in self._buckets for v in self._factors[b.output].scope}
        if kept <= {b.variable for b in self._buckets}:
            result.picks.update(self.complete(result, {}))
        return result

    def complete(self, result: Evaluation, kept: Mapping[int, int]) -> dict[int, int]:
        """Best position of every eliminated variable, given the positions of the kept ones."""
        picks = dict(kept)
        # Last to first: the neighbours that a message depends on were eliminated after it.
        for bucket in reversed(self._buckets):
            prices = result.costs[bucket.variable]
            for seen in bucket.inputs:
                prices = prices + self._column(seen.factor, bucket.variable, result.tables, picks)
            picks[bucket.variable] = int(prices.argmin())
        return picks

    def joint_table(self, result: Evaluation, scope: Sequence[int]) -> FloatArray:
        """Least total price by strategy of each kept variable, in the order of `scope`.

        It includes the constant and the components without a kept variable.
        """
        used = {seen.factor for bucket in self._buckets for seen in bucket.inputs}
        axis = {v: i for i, v in enumerate(scope)}
        total = np.full([self._sizes[v] for v in scope], result.value)
        for v in scope:
            shape = [1] * len(scope)
            shape[axis[v]] = -1
            total += result.costs[v].reshape(shape)
        for f, factor in enumerate(self._factors):
            if f in used or not factor.scope:
                continue
            table = result.tables[f][np.ix_(*factor.classes)]
            order = sorted(range(len(factor.scope)), key=lambda i: axis[factor.scope[i]])
            shape = [1] * len(scope)
            for i in order:
                shape[axis[factor.scope[i]]] = table.shape[i]
            total += table.transpose(order).reshape(shape)
        return total

    def _column(
        self, f: int, v: int, tables: list[FloatArray], picks: Mapping[int, int]
    ) -> FloatArray:
        """Entries of a table for each strategy of one variable, with the others fixed."""
        factor = self._factors[f]
        index = tuple(
            classes if w == v else classes[picks[w]]
            for w, classes in zip(factor.scope, factor.classes, strict=True)
        )
        column: FloatArray = tables[f][index]
        return column


class MinMarginals:
    """The best choices that pick each joint strategy of some variables; usage limits are ignored.

    Args:
        network: the variables.
        plan: an elimination of the others.
        kept: the variables whose strategies are picked.

    Attributes:
        least: the least objective of all choices that pick each of their joint strategies, one
            axis for each of them; inf where that is impossible.
    """

    def __init__(self, network: Network, plan: Elimination, kept: Sequence[int]) -> None:
        self._plan, self._kept = plan, kept
        self._result = plan.evaluate({v: x.cost for v, x in network.variables.items()})
        self.least = plan.joint_table(self._result, kept)

    @classmethod
    def of(
        cls, problem: Problem, node: int, *, effort: Effort = DEFAULT_EFFORT
    ) -> "MinMarginals | None":
        """Marginals of a node; None with ties or large path costs, or if tables are too large.

        Args:
            problem: the problem.
            node: number of the node.
            effort: limits of work, and when to stop.
        """
        if problem.ties or problem.needs_paths(effort.settings):
            return None
        network = Network.from_problem(problem, limited=False)
        return cls.of_network(network, (node,), effort=effort)

    @classmethod
    def of_network(
        cls,
        network: Network,
        kept: Sequence[int],
        *,
        extra: Sequence[JointTable] = (),
        effort: Effort = DEFAULT_EFFORT,
    ) -> "MinMarginals | None":
        """Marginals of some variables; None if tables would be too large.

        Args:
            network: its usage terms are ignored.
            kept: the variables.
            extra: prices added to those of the network.
            effort: limits of work, and when to stop.
        """
        plan = Elimination.compile(network, keep=kept, extra=extra, effort=effort)
        return None if plan is None else cls(network, plan, kept)

    def picks(self, strategies: Sequence[int]) -> dict[int, int]:
        """Positions of all variables that attain an entry of `least`, which must be finite."""
        kept = dict(zip(self._kept, strategies, strict=True))
        return self._plan.complete(self._result, kept)

    def choice(self, strategy: int) -> IntArray:
        """A choice that attains `least[strategy]` of a problem's node, which must be finite."""
        picks = self.picks((strategy,))
        return np.array([picks[v] for v in sorted(picks)], dtype=np.intp)
