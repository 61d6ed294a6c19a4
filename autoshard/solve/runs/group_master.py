"""Combination of the groups of several choices under the usage limit, as an integer program.

A *column* is a choice of one group, with the strategies of the boundary nodes before it and of the
shared nodes. Since groups are equal, a column may be used for any group of its run. The integer
program chooses how many groups use each column, and one choice of the nodes outside of runs, so
that the strategies at boundaries agree. Consecutive groups that are alive at the same times are one
*segment*, so the size of the program does not depend on the number of groups.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from scipy import sparse

from autoshard.base.arrays import BoolArray, FloatArray, IntArray
from autoshard.solve.network import spread
from autoshard.solve.problem import Problem
from autoshard.solve.programs.highs import integer_point
from autoshard.solve.runs.find import Run, independent_runs
from autoshard.solve.state import SolveState

_GAP_SHARE = 0.1
_MAX_NODES = 4000
_ROUNDS = 10
"""Share of the requested gap that the integer program may leave, its nodes, and its solves."""

_TIGHTER = 1e-6
"""Relative decrease of the limit when a choice exceeds it because of rounding."""

_State = bytes
"""Strategies of the boundary nodes between two groups, and of the shared nodes."""


@dataclass(frozen=True, slots=True, eq=False)
class _Column:
    """A choice of one group.

    Attributes:
        start: state before the group.
        end: state after it.
        picks: strategies of its nodes, shape [P].
        cost: price of its nodes and edges.
        uses: usage of its nodes, shape [P].
    """

    start: _State
    end: _State
    picks: IntArray
    cost: float
    uses: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class _Rest:
    """A choice of the nodes outside of runs.

    Attributes:
        starts: state before the first group of each run.
        ends: state after the last group of each run.
        picks: strategies of the nodes.
        cost: price of the nodes and of their edges.
        uses: usage of the nodes.
    """

    starts: tuple[_State, ...]
    ends: tuple[_State, ...]
    picks: IntArray
    cost: float
    uses: FloatArray


@dataclass(frozen=True, slots=True)
class _Segment:
    """Consecutive groups of a run, from `first` to `last - 1`."""

    run: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class _Cut:
    """States that the groups of a segment must enter to use a column that starts in one of them."""

    segment: _Segment
    states: frozenset[_State]


class _ProgramRows:
    """The rows of an integer program, added one by one."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def add(self, entries: Iterable[tuple[int, float]], low: float, high: float) -> None:
        """Add a row of (column, value) entries and its limits."""
        self._entries.extend((len(self.low), col, value) for col, value in entries)
        self.low.append(low)
        self.high.append(high)

    def matrix(self, num_columns: int) -> sparse.csr_array:
        rows, cols, values = zip(*self._entries, strict=True)
        shape = (len(self.low), num_columns)
        return sparse.csr_array((values, (rows, cols)), shape=shape)


class GroupMaster:
    """The integer program over the groups of the choices added so far.

    Args:
        state: of the problem, whose limit is finite; it is offered the choices found.

    Attributes:
        state: of the problem.
        columns: the columns of each run, by start and strategies.
        rests: the choices outside of groups, by their strategies and those at the ends of runs.
    """

    def __init__(self, state: SolveState) -> None:
        self.state, self._problem = state, state.problem
        self._runs = independent_runs(state.problem)
        self.columns: list[dict[bytes, _Column]] = [{} for _ in self._runs]
        self.rests: dict[bytes, _Rest] = {}
        self._first, self._last = self._problem.peak_spans.T
        self._owner_of_node, self._owner_of_edge = _owners(self._problem, self._runs)
        self._outside = np.flatnonzero(self._owner_of_node < 0)
        ends = [v for run in self._runs for v in run.last_boundary]
        self._key_nodes = np.concatenate((self._outside, np.array(ends, dtype=np.intp)))

    def add(self, choice: IntArray) -> None:
        """Add the groups of a choice, and its nodes outside of groups."""
        uses, paid = self._problem.uses(choice), self._problem.prices(choice)
        uses = np.where(self._first < self._last, uses, 0.0)
        if not (np.isfinite(uses).all() and np.isfinite(paid).all()):
            return
        # Shifted by one: what is outside of groups, -1, is counted at 0.
        owners = np.concatenate((self._owner_of_node, self._owner_of_edge)) + 1
        costs = np.bincount(owners, weights=paid, minlength=2)
        starts, ends, number = [], [], 1
        for run, known in zip(self._runs, self.columns, strict=True):
            shared = choice[list(run.shared_nodes)]
            picks = choice[run.node_array]
            between = [choice[list(run.before)], *picks[:, list(run.boundary)]]
            states = [np.append(picked, shared).tobytes() for picked in between]
            for k, (start, end) in enumerate(pairwise(states)):
                key = start + picks[k].tobytes()
                if key not in known:
                    used = uses[run.node_array[k]]
                    known[key] = _Column(start, end, picks[k], float(costs[number + k]), used)
            number += len(run.instances)
            starts.append(states[0])
            ends.append(states[-1])
        rest = choice[self._outside]
        self.rests[choice[self._key_nodes].tobytes()] = _Rest(
            tuple(starts), tuple(ends), rest, float(costs[0]), uses[self._outside]
        )

    def combine(self) -> None:
        """Offer the best combination of the groups that were added.

        The limit is stated at the times at which combinations exceed it, one after the other.
        """
        state, limit = self.state, self._problem.usage_limit
        times: list[int] = []
        cuts: list[_Cut] = []
        if not self.rests:  # all choices that were given have infinite prices
            return
        for _ in range(_ROUNDS):
            state.check()
            program = _Program(self, times, limit, cuts)
            values = None if state.closed else program.solve()
            if values is None:
                return
            fresh = program.disconnected(values)
            cuts += fresh
            if fresh:
                continue
            choice = self._choice(program, values)
            if state.offer(choice):
                return
            time = int(self._over_time(choice).argmax())
            if time in times:
                # The row is there already, and the integer program exceeds it by its tolerance.
                limit -= _TIGHTER * abs(limit)
            else:
                times.append(time)

    def _over_time(self, choice: IntArray) -> FloatArray:
        uses = np.where(self._first < self._last, self._problem.uses(choice), 0.0)
        return spread(self._first, self._last, uses, len(self._problem.peak_times))

    def _choice(self, program: "_Program", values: FloatArray) -> IntArray:
        """The choice of a solution of the integer program."""
        rest = program.rest(values)
        choice = np.zeros(len(self._problem.nodes), dtype=np.intp)
        choice[self._outside] = rest.picks
        for i, run in enumerate(self._runs):
            columns = program.trail(values, i, rest)
            choice[run.node_array] = np.array([column.picks for column in columns])
        return choice

    def segments(self, times: Sequence[int]) -> list[list[_Segment]]:
        """Segments of each run: groups whose nodes are alive at the same ones of some times."""
        found = []
        for i, run in enumerate(self._runs):
            alive = self._alive(run.node_array, times).reshape(len(run.instances), -1)
            differs = np.flatnonzero((alive[1:] != alive[:-1]).any(axis=1)) + 1
            cuts = [0, *differs.tolist(), len(run.instances)]
            found.append([_Segment(i, first, last) for first, last in pairwise(cuts)])
        return found

    def used(self, segment: _Segment, column: _Column, times: Sequence[int]) -> FloatArray:
        """Usage of a column in a segment at each of some times."""
        alive = self._alive(self._runs[segment.run].node_array[segment.first], times)
        used: FloatArray = alive.T @ column.uses
        return used

    def used_outside(self, rest: _Rest, times: Sequence[int]) -> FloatArray:
        """Usage outside of groups at each of some times."""
        used: FloatArray = self._alive(self._outside, times).T @ rest.uses
        return used

    def release(self, segment: _Segment, column: _Column) -> float:
        """Decrease of usage from the first to the last time, if a group uses a column."""
        ends = self.used(segment, column, (0, len(self._problem.peak_times) - 1))
        return float(ends[0] - ends[1])

    def _alive(self, nodes: IntArray, times: Sequence[int]) -> BoolArray:
        """Mask of the nodes that are alive at some times, with an axis of times at the end."""
        at = np.array(times, dtype=np.intp)
        alive: BoolArray = (self._first[nodes][..., None] <= at) & (
            at < self._last[nodes][..., None]
        )
        return alive


class _Program:
    """The integer program at some times.

    Its variables are the choices outside of groups, the number of groups of each segment that use
    each column, and the state between each two segments.
    """

    def __init__(
        self, master: GroupMaster, times: Sequence[int], limit: float, cuts: Sequence[_Cut]
    ) -> None:
        self.rests, self._cuts = list(master.rests.values()), cuts
        self._master, self._times, self._limit = master, times, limit
        self._columns = [list(known.values()) for known in master.columns]
        self._segments = master.segments(times)
        self._counts: dict[_Segment, int] = {}
        self._between: dict[tuple[int, int, _State], int] = {}
        size = len(self.rests)
        for columns, segments in zip(self._columns, self._segments, strict=True):
            for segment in segments:
                self._counts[segment] = size
                size += len(columns)
        for i, segments in enumerate(self._segments):
            for j in range(1, len(segments)):
                for s in self._states[i]:
                    self._between[i, j, s] = size
                    size += 1
        self._size = size

    @cached_property
    def _states(self) -> list[list[_State]]:
        """The states of each run."""
        return [
            list(dict.fromkeys(s for column in columns for s in (column.start, column.end)))
            for columns in self._columns
        ]

    def solve(self) -> FloatArray | None:
        """Values of all variables; None if there is no combination."""
        state = self._master.state
        cost = np.zeros(self._size)
        cost[: len(self.rests)] = [rest.cost for rest in self.rests]
        most = np.ones(self._size)
        for segment, first in self._counts.items():
            columns = self._columns[segment.run]
            cost[first : first + len(columns)] = [column.cost for column in columns]
            most[first : first + len(columns)] = segment.last - segment.first
        rows = self._rows()
        return integer_point(
            cost / max(float(np.abs(cost).max()), 1e-300),
            rows.matrix(self._size),
            np.array(rows.low),
            np.array(rows.high),
            most,
            max_nodes=_MAX_NODES,
            relative_gap=_GAP_SHARE * state.gap,
            time_limit=max(state.remaining, 1e-3),
        )

    def _rows(self) -> _ProgramRows:
        rows = _ProgramRows()
        rows.add(((r, 1.0) for r in range(len(self.rests))), 1.0, 1.0)
        for segment, first in self._counts.items():
            number = float(segment.last - segment.first)
            columns = range(first, first + len(self._columns[segment.run]))
            rows.add(((c, 1.0) for c in columns), number, number)
        for i, segments in enumerate(self._segments):
            for j, segment in enumerate(segments):
                for s in self._states[i]:
                    rows.add(self._flow(segment, j, s), 0.0, 0.0)
        for cut in self._cuts:
            if cut.segment in self._counts:
                rows.add(self._entering(cut), -np.inf, 0.0)
        self._add_usage(rows)
        return rows

    def _entering(self, cut: _Cut) -> Iterator[tuple[int, float]]:
        """Entries of the row of a cut."""
        # At most as many groups can start in the states as there are groups, and none unless one
        # enters them: from another state, from the segment before, or at the start of the run.
        i, most = cut.segment.run, float(cut.segment.last - cut.segment.first)
        for c, column in enumerate(self._columns[i], self._counts[cut.segment]):
            if column.start in cut.states:
                yield c, 1.0
            elif column.end in cut.states:
                yield c, -most
        j = self._segments[i].index(cut.segment)
        for s in cut.states if j else ():
            yield self._between[i, j, s], -most
        for r, rest in enumerate(self.rests if not j else ()):
            if rest.starts[i] in cut.states:
                yield r, -most

    def _flow(self, segment: _Segment, j: int, s: _State) -> Iterator[tuple[int, float]]:
        """Entries of the row that as many groups of a segment end in a state as start in it."""
        i, last = segment.run, j == len(self._segments[segment.run]) - 1
        for c, column in enumerate(self._columns[i], self._counts[segment]):
            if (column.start == s) != (column.end == s):
                yield c, 1.0 if column.end == s else -1.0
        for r, rest in enumerate(self.rests):
            enters, leaves = j == 0 and rest.starts[i] == s, last and rest.ends[i] == s
            if enters != leaves:
                yield r, 1.0 if enters else -1.0
        if j:
            yield self._between[i, j, s], 1.0
        if not last:
            yield self._between[i, j + 1, s], -1.0

    def _add_usage(self, rows: _ProgramRows) -> None:
        """Add a row for the limit at each time."""
        if not self._times:
            return
        unit = max(abs(self._limit), 1e-300)
        entries: list[tuple[int, FloatArray]] = [
            (r, self._master.used_outside(rest, self._times) / unit)
            for r, rest in enumerate(self.rests)
        ]
        for segment, first in self._counts.items():
            for c, column in enumerate(self._columns[segment.run], first):
                entries.append((c, self._master.used(segment, column, self._times) / unit))
        for t in range(len(self._times)):
            row = ((c, float(used[t])) for c, used in entries if used[t])
            rows.add(row, -np.inf, self._limit / unit)

    def rest(self, values: FloatArray) -> _Rest:
        """The choice outside of groups."""
        return self.rests[int(values[: len(self.rests)].argmax())]

    def disconnected(self, values: FloatArray) -> list[_Cut]:
        """Cuts that forbid the columns of a solution that no path through its groups reaches."""
        # Flow conservation also allows circles apart from the path, like the subtours of a
        # travelling salesman. As there, they are cut off when they occur.
        cuts = []
        for i, start in enumerate(self.rest(values).starts):
            at = start
            for segment in self._segments[i]:
                chosen = self._chosen(values, segment)
                path = _trail(chosen, at)
                if len(path) < len(chosen):
                    reached = {at, *(c.end for c in path)}
                    cuts.append(_Cut(segment, frozenset(self._states[i]) - reached))
                at = self._end(values, segment, path[-1].end if path else at)
        return cuts

    def _end(self, values: FloatArray, segment: _Segment, reached: _State) -> _State:
        """The state after a segment; `reached` after the last one."""
        i = segment.run
        j = self._segments[i].index(segment) + 1
        between = (s for s in self._states[i] if values[self._between.get((i, j, s), 0)] > 0)
        return next(between) if j < len(self._segments[i]) else reached

    def _chosen(self, values: FloatArray, segment: _Segment) -> list[_Column]:
        """The columns that the groups of a segment use, as often as they do."""
        columns = self._columns[segment.run]
        counts = values[self._counts[segment] :][: len(columns)].astype(np.intp)
        return [c for c, n in zip(columns, counts, strict=True) for _ in range(n)]

    def trail(self, values: FloatArray, i: int, rest: _Rest) -> list[_Column]:
        """The columns of a run in order; those whose usage decreases most over time come last.

        Args:
            values: of all variables; connected.
            i: number of the run.
            rest: the choice outside of groups.
        """
        at, found = rest.starts[i], list[_Column]()
        for segment in self._segments[i]:
            chosen = self._chosen(values, segment)
            keys = {id(c): self._master.release(segment, c) for c in chosen}
            # `_trail` takes the last first. The last group of forward is the first of backward, so
            # what it keeps is freed soonest: those that keep most should be late.
            chosen.sort(key=lambda c: keys[id(c)], reverse=True)
            found += _trail(chosen, at)
            at = found[-1].end
        return found


def _trail(columns: Iterable[_Column], start: _State) -> list[_Column]:
    """A path through columns, each used once, if there is one (Hierholzer, 1873)."""
    left: dict[_State, list[_Column]] = {}
    for column in columns:
        left.setdefault(column.start, []).append(column)
    stack: list[_Column] = []
    path: list[_Column] = []
    at = start
    while True:
        if left.get(at):
            stack.append(left[at].pop())
            at = stack[-1].end
        elif stack:
            path.append(stack.pop())
            at = path[-1].start
        else:
            return path[::-1]


def _owners(problem: Problem, runs: Sequence[Run]) -> tuple[IntArray, IntArray]:
    """Number of the group of each node and of each edge, over all runs; -1 outside of groups."""
    of_node = np.full(len(problem.nodes), -1, dtype=np.intp)
    number, number_of_run = 0, []
    for run in runs:
        number_of_run.append(number)
        of_node[run.node_array] = number + np.arange(len(run.instances))[:, None]
        number += len(run.instances)
    ends = np.array([(e.source, e.target) for e in problem.edges], dtype=np.intp).reshape(-1, 2)
    of_edge = np.full(len(ends), -1, dtype=np.intp)
    for run, first in zip(runs, number_of_run, strict=True):
        last = first + len(run.instances) - 1
        groups = of_node[ends]
        inside = (first <= groups) & (groups <= last)
        shared = np.isin(ends, run.shared_nodes)
        before = np.isin(ends, run.before) & (groups[:, ::-1] == first)
        belongs = inside.any(axis=1) & (inside | shared | before).all(axis=1)
        of_edge[belongs] = np.where(inside, groups, -1).max(axis=1)[belongs]
    return of_node, of_edge
