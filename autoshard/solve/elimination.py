"""Exact minimisation of networks of small treewidth, by bucket elimination.

Bucket elimination (Dechter, Artif. Intell. 113:41, 1999): a variable is minimised out into a
message, a table over its neighbours. A table is indexed not by strategies but by classes of
strategies with equal prices towards the eliminated variables, so it stays small if many
strategies share a layout. The structure is compiled once and evaluated for any number of cost
vectors. A second pass computes the min-marginals: the least price of all choices with each
strategy of each variable.
"""

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from autoshard.arrays import FloatArray, IntArray
from autoshard.solve.network import Network, fingerprint, joint_classes
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
class Bucket:
    """The elimination of one variable into the table `output` over its neighbours."""

    variable: int
    classes: IntArray
    shape: tuple[int, ...]
    inputs: tuple[BucketInput, ...]
    output: int
    key: bytes


def bucket_message(bucket: Bucket, cost: FloatArray, tables: Sequence[FloatArray]) -> FloatArray:
    """The least price of a bucket's variable and inputs, by the classes of its neighbours.

    Args:
        bucket: the elimination of the variable.
        cost: of each strategy of the variable, shape [S].
        tables: of all factors, by their numbers.
    """
    least = np.full(bucket.shape[0], np.inf)
    np.minimum.at(least, bucket.classes, cost)
    batch = [_broadcast_table(bucket, seen, tables) for seen in bucket.inputs]
    out = np.full(bucket.shape[1:], np.inf)
    flat = (1,) * (len(bucket.shape) - 1)
    step = max(1, _BLOCK // max(out.size, 1))
    for start in range(0, len(least), step):
        part = slice(start, start + step)
        total = least[part].reshape(-1, *flat)
        for table in batch:
            total = total + table[part]
        np.minimum(out, total.min(axis=0), out=out)
    return out


def bucket_marginals(
    bucket: Bucket,
    cost: FloatArray,
    tables: Sequence[FloatArray],
    outside: FloatArray,
    *,
    num_given: int,
) -> tuple[FloatArray, FloatArray, list[tuple[BucketInput, FloatArray]]]:
    """Min-marginals of a bucket's variable and of its incoming messages.

    Args:
        bucket: the elimination of a variable.
        cost: of each strategy of the variable, shape [S].
        tables: of all factors, by their numbers.
        outside: least price of everything outside of the bucket's subtree, by the classes of its
            neighbours.
        num_given: number of factors of the problem; those after them are messages of buckets.

    Returns:
        the least cost in each class of the variable, shape [K]; the least price of all
        choices with each class, shape [K]; and for each incoming message, the least price by the
        bucket's classes of the message's variables.
    """
    base = np.full(bucket.shape[0], np.inf)
    np.minimum.at(base, bucket.classes, cost)
    batch = [_broadcast_table(bucket, seen, tables) for seen in bucket.inputs]
    messages = [seen for seen in bucket.inputs if seen.factor >= num_given]
    least = np.empty(bucket.shape[0])
    message_marginals = [
        (seen, np.empty([bucket.shape[i] for i in seen.axes])) for seen in messages
    ]
    step = max(1, _BLOCK // prod(bucket.shape[1:]))
    flat = (1,) * (len(bucket.shape) - 1)
    for start in range(0, len(base), step):
        part = slice(start, start + step)
        marginal = base[part].reshape(-1, *flat) + outside[None]
        for table in batch:
            marginal = marginal + table[part]
        least[part] = marginal.reshape(len(marginal), -1).min(axis=1)
        for seen, top in message_marginals:
            others = tuple(i for i in range(marginal.ndim) if i not in seen.axes)
            top[part] = marginal.min(axis=others)
    return base, least, message_marginals


def outgoing_message(
    table: FloatArray, seen: BucketInput, bucket_message: FloatArray
) -> FloatArray:
    """Message from a bucket to one of its inputs: its marginals minus the input's own message."""
    for axis, pick in enumerate(seen.picks):
        table = _grouped_min(table, axis, pick)
    # From the axis order of the bucket to that of the message.
    table = table.transpose(np.argsort(seen.order))
    with np.errstate(invalid="ignore"):
        without = table - bucket_message
    return np.where(np.isfinite(bucket_message), without, np.inf)


def _broadcast_table(bucket: Bucket, seen: BucketInput, tables: Sequence[FloatArray]) -> FloatArray:
    """An input table by the classes of the bucket, with an axis for each of its variables."""
    table = tables[seen.factor].transpose(seen.order)
    table = table[np.ix_(*seen.picks)]
    shape = [1] * len(bucket.shape)
    for axis, size in zip(seen.axes, table.shape, strict=True):
        shape[axis] = size
    return table.reshape(shape)


def _grouped_min(table: FloatArray, axis: int, classes: IntArray) -> FloatArray:
    """Least entry of each class along an axis."""
    if (classes == np.arange(len(classes))).all():
        return table
    order = np.argsort(classes, kind="stable")
    starts = np.searchsorted(classes[order], np.arange(int(classes.max()) + 1))
    return np.minimum.reduceat(table.take(order, axis=axis), starts, axis=axis)


@dataclass(frozen=True, slots=True, eq=False)
class _Factor:
    """Axes of a table: its variables, and the index of each of their strategies."""

    scope: tuple[int, ...]
    classes: tuple[IntArray, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Table:
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
        self, network: Network, extra: Sequence[Table], effort: Effort = DEFAULT_EFFORT
    ) -> None:
        self._constant = network.constant
        self._effort = effort
        self._sizes = {v: len(x.cost) for v, x in network.variables.items()}
        self._factors: list[_Factor] = []
        self._given: list[FloatArray] = []
        self._keys: list[bytes] = []
        self._buckets: list[Bucket] = []
        self.work = 0.0
        self.entries = 0
        for u, v, link in network.pairs():
            used_rows, rows = np.unique(link.rows, return_inverse=True)
            used_cols, cols = np.unique(link.cols, return_inverse=True)
            self._given.append(link.matrix.values[np.ix_(used_rows, used_cols)])
            self._factors.append(_Factor((u, v), (rows, cols), self._given[-1].shape))
            self._keys.append(
                fingerprint(link.matrix.key, used_rows.tobytes(), used_cols.tobytes())
            )
        for table in extra:
            classes = tuple(np.arange(self._sizes[v]) for v in table.scope)
            self._given.append(table.values)
            self._factors.append(_Factor(table.scope, classes, table.values.shape))
            self._keys.append(fingerprint(np.ascontiguousarray(table.values).tobytes()))

    @classmethod
    def compile(
        cls,
        network: Network,
        *,
        most_work: float | None = None,
        keep: Collection[int] = (),
        extra: Sequence[Table] = (),
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
        heap = [(self._estimate(v, member[v]), v) for v in member]
        heapq.heapify(heap)
        while member:
            estimate, v = heapq.heappop(heap)
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
                sizes[w] = min(sizes.get(w, 1) * size, self._sizes[w])
        return prod(sizes.values(), start=1.0)

    def _bucket(self, v: int, inputs: list[int]) -> Bucket:
        joint: dict[int, IntArray] = {v: np.zeros(self._sizes[v], dtype=np.intp)}
        for f in inputs:
            factor = self._factors[f]
            for w, classes in zip(factor.scope, factor.classes, strict=True):
                joint[w] = joint_classes(joint[w], classes)[1] if w in joint else classes
        scope = tuple(joint)
        sizes = {w: int(classes.max()) + 1 for w, classes in joint.items()}
        seen = tuple(self._seen_from(f, scope, joint, sizes) for f in inputs)
        around = scope[1:]
        self._factors.append(
            _Factor(around, tuple(joint[w] for w in around), tuple(sizes[w] for w in around))
        )
        shape = tuple(sizes[w] for w in scope)
        parts = [repr((shape, [(x.axes, x.order) for x in seen])).encode(), joint[v].tobytes()]
        key = fingerprint(*parts, *(pick.tobytes() for x in seen for pick in x.picks))
        return Bucket(v, joint[v], shape, seen, len(self._factors) - 1, key)

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
        tables, keys = [*self._given], [*self._keys]
        # A message depends on its inputs only, so those of repeated layers are computed once.
        known: dict[bytes, FloatArray] = {}
        value = self._constant
        for bucket in self._buckets:
            self._effort.check()
            cost = costs[bucket.variable]
            below = (keys[seen.factor] for seen in bucket.inputs)
            keys.append(fingerprint(bucket.key, cost.tobytes(), *below))
            table = known.get(keys[-1])
            if table is None:
                table = known[keys[-1]] = bucket_message(bucket, cost, tables)
            tables.append(table)
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

    def min_marginals(self, result: Evaluation) -> dict[int, FloatArray]:
        """Least price of all choices that pick each strategy of each variable, shape [S].

        This is the second pass of message passing on the tree of buckets: each bucket receives the
        prices outside of its subtree as a table over its neighbours.
        """
        outside: dict[int, FloatArray] = {}
        marginals: dict[int, FloatArray] = {}
        for bucket in reversed(self._buckets):
            self._effort.check()
            v = bucket.variable
            if len(bucket.shape) == 1:
                outside[bucket.output] = result.value - result.tables[bucket.output]
            cost, around = result.costs[v], outside.pop(bucket.output)
            base, least, message_marginals = bucket_marginals(
                bucket, cost, result.tables, around, num_given=len(self._given)
            )
            with np.errstate(invalid="ignore"):
                extra = cost - base[bucket.classes]
                total = least[bucket.classes] + extra
            marginals[v] = np.where(np.isnan(total), np.inf, total)
            for seen, top in message_marginals:
                outside[seen.factor] = outgoing_message(top, seen, result.tables[seen.factor])
        return marginals


class MinMarginals:
    """The best choices that pick a given strategy of a given node; usage limits are ignored.

    Exact, by message passing over an elimination order (see `Elimination`).

    Attributes:
        least: for each node the least objective of all choices that pick each of its
            strategies, shape [S]; inf where a strategy is impossible.
    """

    def __init__(self, network: Network, plan: Elimination) -> None:
        self._plan = plan
        self._costs: Mapping[int, FloatArray] = {v: x.cost for v, x in network.variables.items()}
        result = plan.evaluate(self._costs)
        if np.isfinite(result.value):
            found = plan.min_marginals(result)
            self.least = tuple(found[v] for v in sorted(found))
        else:
            every = (self._costs[v] for v in sorted(self._costs))
            self.least = tuple(np.full(len(cost), np.inf) for cost in every)

    @classmethod
    def of(cls, problem: Problem, *, effort: Effort = DEFAULT_EFFORT) -> "MinMarginals | None":
        """Marginals of a problem; None if it has ties or path costs, or needs too large tables.

        Args:
            problem: the problem.
            effort: limits of work, and when to stop.
        """
        if problem.ties or problem.has_path_costs:
            return None
        network = Network.from_problem(problem, limited=False)
        plan = Elimination.compile(network, effort=effort)
        return None if plan is None else cls(network, plan)

    def choice(self, node: int, strategy: int) -> IntArray:
        """A choice that attains `least[node][strategy]`, which must be finite."""
        cost = np.full(len(self._costs[node]), np.inf)
        cost[strategy] = self._costs[node][strategy]
        picks = self._plan.evaluate({**self._costs, node: cost}).picks
        return np.array([picks[v] for v in sorted(picks)], dtype=np.intp)
