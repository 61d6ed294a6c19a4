"""The integer program of a problem as it is given, without reductions; HiGHS solves it.

`linear_program` states it. Tied nodes share their columns, and equal edges between the same columns
share theirs.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autoshard.base.arrays import BoolArray, FloatArray, IntArray
from autoshard.errors import OptionError
from autoshard.solve.bounds.path_costs import ShortestPathCost
from autoshard.solve.problem import Edge, Problem, UsageLimit
from autoshard.solve.programs.highs import HighsSolver, RunStatus
from autoshard.solve.programs.linear_program import LinearModel, ModelBuilder
from autoshard.solve.state import Interrupted, SolveState

MAX_COLUMNS = 4_000_000
"""Maximum number of columns of an integer program; HiGHS takes about 1 kB of memory for each."""


class ProgramTooLargeError(OptionError):
    """The integer program of a problem has too many columns."""


@dataclass(frozen=True, slots=True)
class ProgramSize:
    """The size of the integer program of a problem.

    Attributes:
        binaries: number of binary columns.
        columns: number of all columns.
    """

    binaries: int
    columns: int

    def __str__(self) -> str:
        return f"{self.columns:,} columns, {self.binaries:,} of them binary"

    @property
    def is_small(self) -> bool:
        """True if the integer program can be solved with the memory of usual machines."""
        return self.columns <= MAX_COLUMNS


class IntegerProgram:
    """The integer program of a problem.

    Args:
        problem: the problem, whose edges use no resource (see `without_edge_usage`).

    Attributes:
        model: its columns and rows; the binary columns come first.

    Raises:
        ProgramTooLargeError: it has more than `MAX_COLUMNS` columns.
    """

    def __init__(self, problem: Problem) -> None:
        size = program_size(problem)
        if not size.is_small:
            raise ProgramTooLargeError(
                f"the integer program has {size.columns:,} columns, more than the {MAX_COLUMNS:,} "
                f"that a plain solver may get; use the solver 'autoshard', or a mesh of fewer axes"
            )
        self._problem = problem
        self._heads = problem.tie_heads
        self._allowed = _allowed(problem, self._heads)
        self._place = {v: i for i, v in enumerate(self._allowed)}
        self._terms, self._capacity = self._count_usage()
        self.model = self._model()

    @property
    def has_choices(self) -> bool:
        """False if a node has no allowed strategy."""
        return all(mask.any() for mask in self._allowed.values())

    def choice(self, x: FloatArray) -> IntArray:
        """The choice of a point whose binary columns are integral up to rounding."""
        picks = self.model.rounded(x)
        labels = [np.flatnonzero(mask) for mask in self._allowed.values()]
        chosen = {v: labels[i][picks[v]] for v, i in self._place.items()}
        return np.array([chosen[int(head)] for head in self._heads], dtype=np.intp)

    def exceeded(self, choice: IntArray) -> BoolArray:
        """Mask of the rows of usage that a choice exceeds, shape [T]."""
        use: FloatArray = np.zeros(len(self.model.capacity))
        for term in self._terms:
            use[term.first : term.last] += term.usage[choice[term.node]]
        return use > self.model.capacity

    def covers(self, x: FloatArray) -> list[FloatArray]:
        """Masks of binary columns that cannot all be chosen, from the rows that a point exceeds."""
        binaries = self.model.num_strategies
        rows = np.flatnonzero(self.exceeded(self.choice(x)))
        used = self.model.usage[rows].toarray()[:, :binaries] > 0
        return [*(used & (np.rint(x[:binaries]) > 0)).astype(np.float64)]

    def _model(self) -> LinearModel:
        problem, heads, place = self._problem, self._heads, self._place
        costs = [np.zeros(int(mask.sum())) for mask in self._allowed.values()]
        for v, node in enumerate(problem.nodes):
            costs[place[int(heads[v])]] += node.cost[self._mask(v)]
        builder = ModelBuilder(costs)

        def columns(v: int) -> IntArray:
            return builder.columns(place[int(heads[v])])

        for edge, number in _distinct(problem, heads):
            source = columns(edge.source), edge.rows[self._mask(edge.source)]
            target = columns(edge.target), edge.cols[self._mask(edge.target)]
            builder.add_flow(edge.prices, source, target, number)
        for term in self._terms:
            usage = term.usage[self._mask(term.node)]
            builder.add_usage(term.first, term.last, columns(term.node), usage)
        return builder.model(self._capacity, tuple(self._allowed))

    def _count_usage(self) -> tuple[list["_Term"], FloatArray]:
        """The usage of each node at the rows in which it counts, and what the rows allow.

        The least usage of each node is subtracted from both: large numbers that differ in the last
        digits only would be equal within the tolerances of a solver.
        """
        problem, num_times = self._problem, len(self._problem.peak_times)
        limits, spans = _binding(problem), problem.peak_spans.tolist()
        capacity: FloatArray = np.repeat([limit.limit for limit in limits], num_times)
        terms = []
        for number, limit in enumerate(limits):
            for v, usage in limit.nodes.items():
                first, last = (number * num_times + t for t in spans[v])
                if first < last and self._mask(v).any():
                    least = float(usage[self._mask(v)].min())
                    capacity[first:last] -= least
                    terms.append(_Term(v, first, last, usage - least))
        return terms, capacity

    def _mask(self, v: int) -> BoolArray:
        return self._allowed[int(self._heads[v])]


class _Term(NamedTuple):
    """Usage of a node by strategy, shape [S], at the rows [first, last)."""

    node: int
    first: int
    last: int
    usage: FloatArray


def program_size(problem: Problem) -> ProgramSize:
    """The size of the integer program of a problem, without building it."""
    heads = problem.tie_heads
    binaries = sum(int(mask.sum()) for mask in _allowed(problem, heads).values())
    finite: dict[int, int] = {}
    columns = binaries
    for edge, _ in _distinct(problem, heads):
        key = id(edge.prices)
        if key not in finite:
            given = edge.prices
            prices = given.steps[2] if isinstance(given, ShortestPathCost) else given
            finite[key] = int(np.isfinite(prices).sum())
        columns += finite[key]
    return ProgramSize(binaries, columns)


def solve_integer_program(state: SolveState) -> bool:
    """State the integer program of a problem, and let HiGHS solve it.

    Args:
        state: of the solve of the problem.

    Returns:
        False if the problem is infeasible.

    Raises:
        ProgramTooLargeError: the integer program is too large.
        Interrupted: the time is over or the solve was cancelled.
    """
    if state.problem.has_negative_limit:
        return False
    state.enter("state the integer program")
    state.raise_bound(state.problem.min_price)
    program = IntegerProgram(state.problem)
    state.statistics["columns"] = float(len(program.model.cost))
    if not program.has_choices or not state.problem.nodes:
        return program.has_choices and state.offer(np.zeros(0, dtype=np.intp))

    def offer(x: FloatArray) -> None:
        state.offer(program.choice(x))

    state.enter("solve the integer program")
    solver = HighsSolver(program.model, state, offer=offer)
    while True:
        outcome = solver.branch(None, relative_gap=state.gap)
        if outcome.status is RunStatus.INFEASIBLE:
            return state.choice is not None
        state.raise_bound(outcome.bound)
        if outcome.x is None or outcome.status is RunStatus.STOPPED:
            raise Interrupted
        choice = program.choice(outcome.x)
        exceeded = program.exceeded(choice)
        # HiGHS keeps rows to within its tolerance. A choice that exceeds a limit by that is
        # excluded, and HiGHS runs again.
        if state.offer(choice) or not exceeded.any():
            return True
        solver.forbid(outcome.x, exceeded)


def with_equal_groups(problem: Problem) -> Problem:
    """The problem restricted to choices in which the groups of each repeat choose alike.

    Nodes whose numbers of strategies differ between groups are not tied.
    """
    ties = (
        nodes
        for repeat in problem.repeats
        for nodes in zip(*repeat.instances, strict=True)
        if len({problem.nodes[v].num_strategies for v in nodes}) == 1
    )
    known = {v for tie in problem.ties for v in tie}
    more = tuple(tie for tie in ties if known.isdisjoint(tie))
    return replace(problem, ties=(*problem.ties, *more))


def _allowed(problem: Problem, heads: IntArray) -> dict[int, BoolArray]:
    """Mask of the strategies with a finite cost that fit by themselves, by the head of each tie."""
    allowed: dict[int, BoolArray] = {}
    for v, head in enumerate(heads.tolist()):
        finite = np.isfinite(problem.nodes[v].cost)
        allowed[head] = allowed[head] & finite if head in allowed else finite
    for limit in _binding(problem):
        for v, usage in limit.nodes.items():
            first, last = problem.peak_spans[v]
            if first < last:
                allowed[int(heads[v])] = allowed[int(heads[v])] & (usage <= limit.limit)
    return allowed


def _binding(problem: Problem) -> tuple[UsageLimit, ...]:
    """The limits that a choice may exceed."""
    if not problem.can_bind:
        return ()
    return tuple(limit for limit in problem.resources if np.isfinite(limit.limit))


def _distinct(problem: Problem, heads: IntArray) -> list[tuple[Edge, int]]:
    """The edges between the columns of ties, equal ones once, and how often each occurs."""
    counts: dict[tuple[int, ...], tuple[Edge, int]] = {}
    for edge in problem.edges:
        arrays = id(edge.prices), id(edge.rows), id(edge.cols)
        key = (int(heads[edge.source]), int(heads[edge.target]), *arrays)
        counts[key] = edge, counts.get(key, (edge, 0))[1] + 1
    return list(counts.values())
