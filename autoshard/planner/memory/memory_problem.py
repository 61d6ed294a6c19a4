"""The optimization problem of a formulation, with memory counted as usage.

In addition to the variables of the formulation it has a residency for each tensor that backward
needs, and a binary variable for the checkpointing of each unit, such as a repeated block. Usage is
the memory of a training step at some time points, see `autoshard.planner.memory.time_points`. It
is a lower bound of the true memory, so a lower bound of this problem is valid for every plan that
fits. In the program of `autoshard.solve.programs.linear_program` it is m_v(s), the time points are
the times t, and the memory budget is M.

What a micro-batch saves for backward is counted for each micro-batch in flight: once until the
backward that needs it, and until the optimizer's step for the micro-batches that wait.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property

import numpy as np

from autoshard.base.arrays import BoolArray, FloatArray, IntArray
from autoshard.costs import Frequency
from autoshard.plan.options import Recomputing
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.formulation.saved_tensors import CheckpointSpan, SavedTensors
from autoshard.planner.formulation.stage_builder import Decisions
from autoshard.planner.formulation.variables import Role, Use, Variable
from autoshard.planner.memory.residency import (
    EdgeEnd,
    RareGathers,
    Residency,
    Rule,
    Transition,
    UseResidency,
    transition_costs,
)
from autoshard.planner.memory.time_points import BackwardPoint, Interval, TimePoints
from autoshard.solve import Edge, Problem, ProblemNode

_States = tuple[Residency, ...]
_COPY_STATES: _States = (
    Residency.KEPT,
    Residency.REGATHERED,
    Residency.SOURCE_KEPT,
    Residency.FREED,
    Residency.RECOMPUTED,
)
_HELD = frozenset({Residency.MADE, Residency.KEPT, Residency.REGATHERED, Residency.FREED})
"""Residencies of an operator that runs once, with what it keeps of an input in place of a copy."""


class MemoryProblem:
    """The variables of a formulation, and the residencies of its tensors.

    Args:
        formulation: a formulation in training mode.
        reshard_after_forward: the planning option.
        activation_checkpointing: the planning option.
        negligible: maximum total bytes of the small values that are not counted.
        points: time points of backward at which memory is counted.

    Attributes:
        num_common: number of the first nodes, which are not those of time points.
    """

    def __init__(
        self,
        formulation: Formulation,
        *,
        reshard_after_forward: Recomputing,
        activation_checkpointing: Recomputing,
        negligible: float = 0.0,
        points: Sequence[BackwardPoint] = (),
    ) -> None:
        assert formulation.prices.training
        self._formulation = formulation
        self._graph = formulation.graph
        self._reshard_after_forward = reshard_after_forward
        self._checkpointing = activation_checkpointing
        units = formulation.checkpoint_units if activation_checkpointing != "never" else ()
        self._saved = SavedTensors(
            formulation.prices,
            formulation.blocks,
            units,
            negligible=negligible / formulation.prices.in_flight,
        )
        self._time = TimePoints(formulation, points)
        self._nodes: list[ProblemNode] = []
        self._edges: list[Edge] = []
        self._ends: list[EdgeEnd] = []  # by variable
        self._copies: dict[int, EdgeEnd] = {}  # by use
        self._in_place: dict[int, int] = {}  # use whose copy a variable replaces, by variable
        self._rare: dict[int, RareGathers] = {}  # of parameters, by use
        self._groups: list[list[int]] = []  # nodes of the problem by variable
        self._switches: dict[int, int] = {}  # node that checkpoints a span, by its first node
        self._uses_of: dict[int, list[int]] = {}  # numbers of the uses by a variable
        # Equal nodes and edges share their arrays, since the solver compares them by identity.
        self._arrays: dict[tuple[object, ...], tuple[FloatArray, FloatArray]] = {}
        self._distinct: dict[int, tuple[FloatArray, IntArray]] = {}
        self._matrices: dict[tuple[object, ...], tuple[FloatArray, IntArray, IntArray]] = {}
        self._build()

    @cached_property
    def problem(self) -> Problem:
        """The optimization problem, without a usage limit."""
        return Problem(
            nodes=tuple(self._nodes),
            edges=tuple(self._edges),
            repeats=self._formulation.repeats(self._nodes_of),
        )

    @property
    def variables(self) -> dict[int, int]:
        """The formulation's variable of each node of the problem that has one."""
        return {end.node: i for i, end in enumerate(self._ends)}

    def nodes_with(self, masks: Sequence[BoolArray]) -> list[BoolArray]:
        """Masks of the strategies of each node that are compatible with strategies of variables.

        Args:
            masks: mask of the strategies of each variable, shape [S].
        """
        ends = zip(self._ends, masks, strict=True)
        return _compatible(
            self.problem, {end.node: np.tile(mask, len(end.states)) for end, mask in ends}
        )

    def decisions(self, choice: IntArray) -> Decisions:
        """The decisions of a choice, one strategy index per node of the problem."""
        variables = self._formulation.variables
        strategies: IntArray = np.zeros(len(variables), dtype=np.intp)
        states: list[Residency] = []
        for i, (end, variable) in enumerate(zip(self._ends, variables, strict=True)):
            number, strategies[i] = divmod(int(choice[end.node]), len(variable.strategies))
            states.append(end.states[number])
        regathered = set()
        frequencies: dict[int, Frequency] = {}
        for number, use in enumerate(self._formulation.uses):
            state = states[use.target]
            if self._formulation.reads_parameter(use):
                chosen = (int(strategies[i]) for i in (use.source, use.target))
                frequencies[number] = self._formulation.edge_costs(use).frequencies(*chosen)[0]
            if number in self._rare:
                rare = self._rare[number].frequency(int(choice[self._copies[number].node]))
                if rare is not None:
                    frequencies[number] = rare
                    continue
            if number in self._copies and state is not Residency.RECOMPUTED:
                state = self._copy_state(self._copies[number], use, choice)
            elif self._in_place.get(use.target) != number:
                continue
            if state in (Residency.REGATHERED, Residency.SOURCE_KEPT):
                regathered.add(number)
        checkpoints = (
            span.nodes
            for span in self._spans
            if self._checkpointing == "always" or choice[self._switches[span.nodes.start]]
        )
        return Decisions(strategies, frozenset(regathered), tuple(checkpoints), frequencies)

    def _copy_state(self, copy: EdgeEnd, use: Use, choice: IntArray) -> Residency:
        stops = np.cumsum(copy.sizes(self._formulation.edge_costs(use)))
        return copy.states[int(np.searchsorted(stops, choice[copy.node], side="right"))]

    def _build(self) -> None:
        if self._checkpointing == "auto":
            for span in self._spans:
                self._switches[span.nodes.start] = self._add(np.zeros(2), np.zeros(2), (0, 0))
        for number, use in enumerate(self._formulation.uses):
            self._uses_of.setdefault(use.target, []).append(number)
        for i, variable in enumerate(self._formulation.variables):
            uses = self._uses_of.get(i, ())
            self._groups.append([])
            self._add_variable(i, variable, uses)
            for number in uses:
                self._add_use(number, self._formulation.uses[number])
        for first, second, rows, cols in self._formulation.ties:
            self._equate(self._ends[first].node, self._ends[second].node, rows, cols)
        self.num_common = len(self._nodes)
        for number, point in enumerate(self._time.backward):
            self._add_backward(point, self._time.at(number))

    def _add(self, time: FloatArray, usage: FloatArray, interval: Interval) -> int:
        self._nodes.append(ProblemNode(time, usage, interval))
        return len(self._nodes) - 1

    @cached_property
    def _spans(self) -> tuple[CheckpointSpan, ...]:
        return tuple(dict.fromkeys(span for span in self._saved.spans if span is not None))

    def _add_variable(self, i: int, variable: Variable, uses: Sequence[int]) -> None:
        states, use = self._states(variable), None
        replaced = self._replaced_copy(variable, uses)
        if replaced is not None:
            self._in_place[i], states = replaced
            use = self._formulation.uses[replaced[0]]
        time, usage = self._variable_costs(variable, states)
        interval = self._time.always
        if use is not None:
            usage, interval = self._with_copy(usage, use, states), self._copy_interval(use)
        elif variable.role is Role.OPERATOR:
            interval = self._time.until(self._graph.numbers[variable.name])
        node = self._add(time, usage, interval)
        if variable.role is Role.OPERATOR or use is not None:
            self._add_waiting(node, i)
        self._ends.append(EdgeEnd(node, states, (False,) * len(states)))
        self._groups[i].append(node)
        gradients = variable.usage.get("gradients")
        if gradients is not None:
            self._add_gradient(i, node, gradients)
        span = self._span(variable)
        if span is not None and span.nodes.start in self._switches:
            recomputed = np.array([int(state is Residency.RECOMPUTED) for state in states])
            labels = np.repeat(recomputed, len(variable.strategies))
            self._equate(self._switches[span.nodes.start], node, np.arange(2), labels)

    def _add_waiting(self, number: int, variable: int) -> None:
        """Count what a node keeps for the micro-batches that wait for their backward, too.

        Args:
            number: the node.
            variable: the variable to which it belongs.
        """
        in_flight, node = self._formulation.prices.in_flight, self._nodes[number]
        if in_flight == 1 or not node.usage.any():
            return
        if not self._time.counts_operations and node.interval[1] <= self._time.before_optimizer[1]:
            # Until the optimizer's step, memory is counted at the turn only.
            usage = self._multiple(node.usage, in_flight)
            self._nodes[number] = replace(node, usage=usage)
            return
        if id(node.usage) not in self._distinct:
            self._distinct[id(node.usage)] = np.unique(node.usage, return_inverse=True)
        distinct, labels = self._distinct[id(node.usage)]
        usage = self._multiple(distinct, in_flight - 1)
        waiting = self._add(np.zeros(len(usage)), usage, self._time.before_optimizer)
        self._groups[variable].append(waiting)
        self._equate(number, waiting, labels, np.arange(len(usage)))

    def _add_gradient(self, i: int, node: int, nbytes: FloatArray) -> None:
        """Add a node for the gradient of a parameter, in the layout of the parameter."""
        size = len(nbytes)
        readers = (j for j, _ in self._graph.consumers[self._formulation.variables[i].name])
        counted = [(nbytes, self._time.after(min(readers, default=0)))]
        prices = self._formulation.prices
        if prices.micro_batches > 1:
            dtype = self._graph.stored_dtype(self._formulation.variables[i].name)
            sums = self._multiple(nbytes, prices.accumulation_factor(dtype))
            counted = [(sums, self._time.before_optimizer), (nbytes, self._time.optimizer)]
        for counted_bytes, interval in counted:
            gradient = self._add(np.zeros(size), counted_bytes, interval)
            self._groups[i].append(gradient)
            self._equate(node, gradient, np.arange(size), np.arange(size))

    def _multiple(self, nbytes: FloatArray, factor: float) -> FloatArray:
        """A multiple of some bytes."""
        key = (id(nbytes), factor)
        if key not in self._arrays:
            self._arrays[key] = nbytes, factor * nbytes
        return self._arrays[key][1]

    def _add_backward(self, point: BackwardPoint, interval: Interval) -> None:
        """Add a node for the memory of the backward of an operator or a resharding."""
        if point.starts_block:
            return
        if point.variable >= 0:
            end = self._ends[point.variable]
            nbytes = self._time.operator_bytes(point.variable)
            distinct, numbers = np.unique(nbytes, return_inverse=True)
            node = self._add(np.zeros(len(distinct)), distinct, interval)
            labels = np.tile(numbers, len(end.states))
            self._equate(end.node, node, labels, np.arange(len(distinct)))
            for number in self._uses_of.get(point.variable, ()):
                self._add_gathered(number, interval)
            return
        use = self._formulation.uses[point.use]
        costs = self._formulation.edge_costs(use)
        start, end = self._ends[use.source], self._ends[use.target]
        nbytes = self._time.resharding_bytes(use, costs)
        time = np.where(np.isfinite(costs.seconds), 0.0, np.inf)
        node = self._add(time.ravel(), nbytes.ravel(), interval)
        rows, cols = (x.ravel() for x in np.indices(nbytes.shape))
        self._equate(start.node, node, np.tile(costs.rows, len(start.states)), rows)
        self._equate(end.node, node, np.tile(costs.cols, len(end.states)), cols)

    def _add_gathered(self, number: int, interval: Interval) -> None:
        """Add a node for the bytes that backward gathers again for the operator of a use."""
        use = self._formulation.uses[number]
        operator = self._graph.numbers[self._formulation.variables[use.target].name]
        if use.position not in self._saved.saved[operator].inputs:
            return
        in_place = self._ends[use.target] if self._in_place.get(use.target) == number else None
        copy = self._copies.get(number, in_place)
        if copy is None or Residency.REGATHERED not in copy.states:
            return
        costs = self._formulation.edge_costs(use)
        start = self._source_end(use, self._formulation.variables[use.source])
        num_sources, num_targets = len(costs.sources), len(costs.targets)
        # The layout after all others stands for a tensor that is not gathered again.
        nbytes = np.zeros((2, num_sources, num_targets + 1))
        nbytes[:, :, :-1] = self._share(use) * self._time.gathered_bytes(use, costs)
        # If the source is gathered again itself, it is in memory too.
        nbytes[1, :, :-1] += costs.source_bytes[:, None]
        node = self._add(np.zeros(nbytes.size), nbytes.ravel(), interval)
        rows, cols = (x.ravel() for x in np.indices((2 * num_sources, num_targets + 1)))
        again = [num_sources * (state is Residency.REGATHERED) for state in start.states]
        self._equate(start.node, node, start.labels(costs, again, 0), rows)
        kept = [num_targets * (state is not Residency.REGATHERED) for state in copy.states]
        labels = np.minimum(copy.labels(costs, kept, num_targets), num_targets)
        self._equate(copy.node, node, labels, cols)

    def _equate(self, first: int, second: int, rows: IntArray, cols: IntArray) -> None:
        """Add an edge that forces two nodes to strategies with equal labels."""
        self._edges.append(Edge.equal(first, second, rows, cols))

    def _span(self, variable: Variable) -> CheckpointSpan | None:
        if variable.role is Role.OPERATOR:
            return self._saved.spans[self._graph.numbers[variable.name]]
        return None

    def _states(self, variable: Variable) -> _States:
        """The residencies that a variable's tensors can have."""
        if variable.role is Role.INPUT:
            return (Residency.AT_REST,)
        if variable.role is Role.OUTPUT:
            return (Residency.KEPT,)
        if variable.role is Role.SHARED:
            if variable.name in self._saved.needed_in_backward:
                return (Residency.KEPT, Residency.FREED)
            is_negligible = variable.name in self._saved.negligible
            return (Residency.KEPT if is_negligible else Residency.FREED,)
        number = self._graph.numbers[variable.name]
        states: _States = (Residency.MADE,)
        if self._saved.is_view[number]:
            outputs = self._graph.nodes[number].outputs
            needed = not self._saved.needed_in_backward.isdisjoint(outputs)
            states = (Residency.KEPT, Residency.FREED) if needed else (Residency.FREED,)
        if self._span(variable) is None:
            return states
        is_forced = self._checkpointing == "always"
        return (Residency.RECOMPUTED,) if is_forced else (*states, Residency.RECOMPUTED)

    def _replaced_copy(self, variable: Variable, uses: Sequence[int]) -> tuple[int, _States] | None:
        """The use whose copy a variable takes the place of, to save a node, and its residencies.

        Not a copy that may keep the source of a resharding, or may be gathered once per step.
        """
        ends = self._states(variable)
        own = tuple(state for state in ends if state is not Residency.RECOMPUTED)
        for number in uses if variable.role in (Role.OPERATOR, Role.SHARED) else ():
            use = self._formulation.uses[number]
            if not self._needs_copy(use, variable) or self._may_run_once(use):
                continue
            start = self._source_end(use, self._formulation.variables[use.source])
            residency = self._use_residency(use, variable)
            if Residency.SOURCE_KEPT not in _copy_states(residency, start.states, ends):
                states = _copy_states(residency, start.states, own)
                return number, (*states, *ends[len(own) :])
        return None

    def _needs_copy(self, use: Use, variable: Variable) -> bool:
        """True if backward needs what a variable reads, so that there is a residency to choose."""
        if variable.role is Role.SHARED:
            return {Residency.KEPT, Residency.FREED} <= {*self._states(variable)}
        return self._use_residency(use, variable).needed

    def _with_copy(self, usage: FloatArray, use: Use, states: _States) -> FloatArray:
        """The usage of a variable and of the copy that it takes the place of."""
        costs, share = self._formulation.edge_costs(use), self._share(use)
        key = (id(usage), id(costs), states, share)
        if key not in self._arrays:
            kept, nothing = share * costs.target_bytes[costs.cols], np.zeros(len(costs.cols))
            nbytes = [kept if state is Residency.KEPT else nothing for state in states]
            self._arrays[key] = usage, usage + np.concatenate(nbytes)
        return self._arrays[key][1]

    def _variable_costs(self, variable: Variable, states: _States) -> tuple[FloatArray, FloatArray]:
        """Seconds and bytes of a variable's strategies in each of its residencies."""
        span = self._span(variable)
        runs_again = span is not None and self._graph.numbers[variable.name] in span.recomputed
        key = (id(variable.strategies), id(variable.time), states, runs_again)
        if key not in self._arrays:
            times, usages = [], []
            for state in states:
                time, usage = variable.time, np.zeros(len(variable.strategies))
                if state is Residency.AT_REST:
                    kinds = (nbytes for k, nbytes in variable.usage.items() if k != "gradients")
                    usage = sum(kinds, usage)
                elif state in _HELD and self._is_made(variable):
                    usage = sum(variable.usage.values(), usage)
                elif state is Residency.RECOMPUTED and runs_again:
                    node = self._formulation.node_of(variable)
                    prices = self._formulation.prices
                    time = time + prices.forward(node, variable.strategies)
                times.append(time)
                usages.append(usage)
            self._arrays[key] = np.concatenate(times), np.concatenate(usages)
        return self._arrays[key]

    def _add_use(self, number: int, use: Use) -> None:
        source, target = (self._formulation.variables[i] for i in (use.source, use.target))
        residency = self._use_residency(use, target)
        start, end = self._source_end(use, source), self._ends[use.target]
        is_made = source.role is Role.OPERATOR and Residency.SAVED not in start.states
        is_shared = target.role is Role.SHARED
        reread = is_made and residency.recomputed and not residency.inside and not is_shared
        if self._in_place.get(use.target) == number:
            self._add_edge(use, start, end, residency, UseResidency.in_place)
        elif self._may_run_once(use) or self._needs_copy(use, target) or reread:
            self._add_copy(number, residency, start, end)
        else:
            rule = UseResidency.to_copy if is_shared else UseResidency.direct
            self._add_edge(use, start, end, residency, rule)

    def _may_run_once(self, use: Use) -> bool:
        """True if a parameter may stay gathered from one micro-batch to the next."""
        reshards = self._reshard_after_forward == "always"
        return not reshards and bool(self._formulation.edge_costs(use).can_run_once.any())

    def _source_end(self, use: Use, source: Variable) -> EdgeEnd:
        """The producer of a value, with the residencies of the output that the use reads."""
        end = self._ends[use.source]
        states = end.states
        if source.role is Role.OPERATOR:
            if use.source in self._in_place and self._is_made(source):
                states = tuple(Residency.MADE if s in _HELD else s for s in states)
            saved = self._saved.saved[self._graph.numbers[source.name]].outputs
            recomputed = Residency.RECOMPUTED
            if use.value in self._saved.negligible:
                states = tuple(s if s is recomputed else Residency.SAVED for s in states)
            elif use.output in saved:
                states = tuple(Residency.SAVED if s is Residency.MADE else s for s in states)
        return EdgeEnd(end.node, states, (True,) * len(states))

    def _is_made(self, variable: Variable) -> bool:
        """True for an operator whose results have memory of their own."""
        if variable.role is not Role.OPERATOR:
            return False
        return not self._saved.is_view[self._graph.numbers[variable.name]]

    def _use_residency(self, use: Use, target: Variable) -> UseResidency:
        saved, value = self._saved, use.value
        made_in = saved.span_of(value)
        if target.role is Role.OUTPUT:
            return UseResidency(
                needed=value not in saved.negligible,
                is_output=True,
                reshard_after_forward=self._reshard_after_forward,
            )
        if target.role is Role.SHARED:
            first = saved.first_reader_inside(value)
            return UseResidency(
                needed=Residency.KEPT in self._states(target),
                inside=first is not None,
                recomputed=made_in is not None and first is not None and first in made_in.reading,
                leaves=saved.leaves(value) or value in saved.negligible,
                reshard_after_forward=self._reshard_after_forward,
            )
        reader = self._graph.numbers[target.name]
        span = saved.spans[reader]
        return UseResidency(
            needed=saved.needs(reader, use.position),
            inside=span is not None and made_in is span,
            recomputed=span is not None and reader in span.reading,
            reshard_after_forward=self._reshard_after_forward,
        )

    def _add_copy(self, number: int, residency: UseResidency, start: EdgeEnd, end: EdgeEnd) -> None:
        """Add a node for the residency of a resharded tensor, between producer and readers."""
        use = self._formulation.uses[number]
        states = _copy_states(residency, start.states, end.states)
        at_source = tuple(state is Residency.SOURCE_KEPT for state in states)
        rare = None
        if self._may_run_once(use):
            costs = self._formulation.edge_costs(use)
            rare = RareGathers.of(costs, len(states) * len(costs.targets))
        node = self._add(*self._copy_costs(use, states, rare), self._copy_interval(use))
        self._add_waiting(node, use.target)
        copy = self._copies[number] = EdgeEnd(node, states, at_source, by_layout=True, rare=rare)
        self._groups[use.target].append(node)
        self._add_edge(use, start, copy, residency, UseResidency.to_copy)
        self._add_edge(use, copy, end, residency, UseResidency.from_copy)
        if rare is not None:
            self._rare[number] = rare
            self._add_kept(use, node, rare)

    def _add_kept(self, use: Use, copy: int, rare: RareGathers) -> None:
        """Add a node for what stays in memory from one micro-batch to the next."""
        key = (id(rare.costs), "kept")
        kept, labels = np.unique(rare.kept_bytes, return_inverse=True)
        if key not in self._arrays:
            self._arrays[key] = np.zeros(len(kept) + 1), np.concatenate([[0.0], kept])
        time, nbytes = self._arrays[key]
        node = self._add(time, nbytes, self._time.before_optimizer)
        self._groups[use.target].append(node)
        of_copy = np.concatenate([np.zeros(rare.offset, dtype=np.intp), labels + 1])
        self._equate(copy, node, of_copy, np.arange(len(nbytes)))

    def _copy_interval(self, use: Use) -> Interval:
        """The time points at which a copy that is kept for a use is in memory in any case."""
        target = self._formulation.variables[use.target]
        if target.role is Role.OUTPUT:
            return self._time.always
        if target.role is Role.SHARED:
            return self._time.until(self._saved.value_needed_until(use.value))
        reader = self._graph.numbers[target.name]
        return self._time.until(self._saved.needed_until(reader, use.position))

    def _copy_costs(
        self, use: Use, states: _States, rare: RareGathers | None
    ) -> tuple[FloatArray, FloatArray]:
        """Seconds and bytes of a copy in each residency and layout, without `rare` ones."""
        costs, share = self._formulation.edge_costs(use), self._share(use)
        key = (id(costs), states, share)
        if key not in self._arrays:
            nbytes = {
                Residency.KEPT: share * costs.target_bytes,
                Residency.SOURCE_KEPT: share * costs.source_bytes,
            }
            nothing = np.zeros(len(costs.targets))
            counted = [nbytes.get(state, nothing) for state in states]
            usage = np.concatenate([*counted, np.zeros(len(rare or ()))])
            self._arrays[key] = np.zeros(len(usage)), usage
        return self._arrays[key]

    def _share(self, use: Use) -> float:
        """Bytes that are kept of what a use reads, relative to those of the value."""
        target = self._formulation.variables[use.target]
        if target.role is Role.OUTPUT:
            return 1.0
        reader = self._graph.numbers[target.name] if target.role is Role.OPERATOR else None
        return self._saved.share(reader, use.value)

    def _add_edge(
        self, use: Use, start: EdgeEnd, end: EdgeEnd, residency: UseResidency, rule: Rule
    ) -> None:
        costs = self._formulation.edge_costs(use)
        key = (id(costs), start.states, end.states, residency, rule)
        if key not in self._matrices:
            self._matrices[key] = transition_costs(costs, start, end, residency, rule)
        self._edges.append(Edge(start.node, end.node, *self._matrices[key]))

    def _nodes_of(self, nodes: range) -> tuple[int, ...]:
        """The nodes of the problem that belong to an instance of a block."""
        found = [v for i in self._formulation.variables_of(nodes) for v in self._groups[i]]
        return (*found, *(self._switches[i] for i in nodes if i in self._switches))


@cache
def _copy_states(residency: UseResidency, starts: _States, ends: _States) -> _States:
    """The residencies that a copy can have, given those of the producer and the readers."""
    impossible = Transition.IMPOSSIBLE
    return tuple(
        state
        for state in _COPY_STATES
        if any(residency.to_copy(s, state) is not impossible for s in starts)
        and any(residency.from_copy(state, t) is not impossible for t in ends)
    )


def _compatible(problem: Problem, kept: Mapping[int, BoolArray]) -> list[BoolArray]:
    """Masks of the strategies with a finite edge cost to a given strategy of each neighbour.

    Args:
        problem: the problem.
        kept: mask of the given strategies of some nodes, shape [S] each.

    Returns:
        A mask of shape [S] for each node; the given one for the nodes in `kept`.
    """
    known: dict[bytes, BoolArray] = {}
    kept = {v: known.setdefault(mask.tobytes(), mask) for v, mask in kept.items()}
    chosen = [np.ones(node.num_strategies, dtype=np.bool_) for node in problem.nodes]
    reached: dict[tuple[int, ...], BoolArray] = {}
    for edge in problem.edges:
        ends = (edge.source, edge.rows, edge.cost), (edge.target, edge.cols, edge.cost.T)
        for (near, rows, costs), (far, cols, _) in (ends, ends[::-1]):
            if near not in kept or far in kept:
                continue
            key = (id(edge.prices), id(rows), id(cols), id(kept[near]))
            if key not in reached:
                finite = np.isfinite(costs[np.unique(rows[kept[near]])])
                reached[key] = np.logical_or.reduce(finite, axis=0)[cols]
            chosen[far] = chosen[far] & reached[key]
    return [kept.get(v, mask) for v, mask in enumerate(chosen)]
