"""The optimization problem with what is held for backward as part of the choice.

Takes the choices of a formulation and adds, wherever backward needs a tensor, what becomes of
it after forward; and for each instance of a repeated block, whether it is checkpointed. Usage
is what a training step holds at some of its moments, see
`autoshard.planner.memory_budget.checkpoints`. What is left out makes it less than the truth and
never more, so a bound of this problem is one of every plan that fits.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np

from autoshard.arrays import BoolArray, FloatArray, IntArray
from autoshard.layouts import Layout
from autoshard.plan.options import Recomputing
from autoshard.planner.formulation.decisions import Decisions
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.formulation.variables import Arc, Role, Variable
from autoshard.planner.memory_budget.candidate_strategies import reached_strategies
from autoshard.planner.memory_budget.checkpoints import Backward, Moments
from autoshard.planner.memory_budget.residency import Price, State, Use
from autoshard.planner.memory_budget.residency_costs import ArcPrices, End, joined
from autoshard.planner.memory_budget.saved_tensors import Retention, Span
from autoshard.solve import Edge, Problem
from autoshard.solve import Node as ProblemNode

_States = tuple[State, ...]
_CHOICES: _States = (State.KEEP, State.AGAIN, State.HOLD, State.DROP, State.REDONE)


class MemoryProblem:
    """A formulation's choices with what is held for backward.

    Args:
        plain: the formulation, in training.
        reshard_after_forward: whether resharded tensors are resharded again.
        activation_checkpointing: whether blocks are checkpointed.
        negligible: bytes that need not be counted, of small values all together.
        backward: moments of backward at which memory is counted too.
    """

    def __init__(
        self,
        plain: Formulation,
        *,
        reshard_after_forward: Recomputing,
        activation_checkpointing: Recomputing,
        negligible: float = 0.0,
        backward: Sequence[Backward] = (),
    ) -> None:
        assert plain.prices.training
        self._plain = plain
        self._graph = plain.graph
        self._again = reshard_after_forward
        self._activation_checkpointing = activation_checkpointing
        self._retention = Retention(
            plain.graph,
            plain.gradients,
            plain.blocks,
            checkpoints=activation_checkpointing != "never",
            negligible=negligible,
        )
        self._moments = Moments(plain, self._retention, backward)
        self._nodes: list[ProblemNode] = []
        self._edges: list[Edge] = []
        self._ends: list[End] = []
        self._kept: dict[int, End] = {}  # by arc
        self._groups: list[list[int]] = []  # nodes of the problem by variable
        self._modes: dict[int, int] = {}  # by first node of the span
        self._arrays: dict[tuple[object, ...], tuple[FloatArray, FloatArray]] = {}
        self._arc_prices: dict[tuple[object, ...], ArcPrices] = {}
        self._matrices: dict[tuple[object, ...], tuple[FloatArray, IntArray, IntArray]] = {}
        self._build()

    @cached_property
    def problem(self) -> Problem:
        """The optimization problem, without a limit."""
        return Problem(
            nodes=tuple(self._nodes),
            edges=tuple(self._edges),
            repeats=self._plain.repeats(self._choices_of),
        )

    def variable_of(self, node: int) -> int:
        """The formulation's variable that a node of the problem belongs to; -1 for none."""
        return self._variable_of.get(node, -1)

    def nodes_with(self, masks: Sequence[BoolArray]) -> list[BoolArray]:
        """Strategies of each node of the problem that go with some strategies of variables.

        Args:
            masks: which strategies of each variable, shape [S].
        """
        ends = zip(self._ends, masks, strict=True)
        kept = {end.node: np.tile(mask, len(end.states)) for end, mask in ends}
        return reached_strategies(self.problem, kept)

    @cached_property
    def _variable_of(self) -> dict[int, int]:
        return {end.node: i for i, end in enumerate(self._ends)}

    def decisions(self, choice: IntArray) -> Decisions:
        """What a strategy per node of the problem means."""
        plain: IntArray = np.zeros(len(self._ends), dtype=np.intp)
        states: list[State] = []
        for i, (end, variable) in enumerate(zip(self._ends, self._plain.variables, strict=True)):
            number, plain[i] = divmod(int(choice[end.node]), len(variable.strategies))
            states.append(end.states[number])
        again = set()
        for number, arc in enumerate(self._plain.arcs):
            state = states[arc.target]
            if number in self._kept and state is not State.REDONE:
                state = self._state_of(self._kept[number], arc, choice)
            if state in (State.AGAIN, State.HOLD):
                again.add(number)
        redone = (
            span.nodes
            for span in self._spans
            if self._activation_checkpointing == "always" or choice[self._modes[span.nodes.start]]
        )
        return Decisions(plain, frozenset(again), tuple(redone))

    def _state_of(self, end: End, arc: Arc, choice: IntArray) -> State:
        stops = np.cumsum(end.sizes(self._prices_of(arc)))
        return end.states[int(np.searchsorted(stops, choice[end.node], side="right"))]

    def _build(self) -> None:
        if self._activation_checkpointing == "auto":
            for span in self._spans:
                # Whether it is checkpointed.
                self._modes[span.nodes.start] = self._add(np.zeros(2), np.zeros(2), (0, 0))
        arcs: dict[int, list[int]] = {}
        for number, arc in enumerate(self._plain.arcs):
            arcs.setdefault(arc.target, []).append(number)
        for i, variable in enumerate(self._plain.variables):
            self._groups.append([])
            self._add_variable(i, variable)
            for number in arcs.get(i, ()):
                self._add_arc(number, self._plain.arcs[number])
        for number, moment in enumerate(self._moments.backward):
            self._add_backward(moment, self._moments.at(number))

    def _add(self, time: FloatArray, usage: FloatArray, interval: tuple[int, int]) -> int:
        self._nodes.append(ProblemNode(time, usage, interval))
        return len(self._nodes) - 1

    @cached_property
    def _spans(self) -> tuple[Span, ...]:
        return tuple(dict.fromkeys(span for span in self._retention.spans if span is not None))

    def _add_variable(self, i: int, variable: Variable) -> None:
        states = self._states(variable)
        time, usage = self._priced(variable, states)
        interval = self._moments.always
        if variable.role is Role.OPERATOR:
            interval = self._moments.until(self._graph.numbers[variable.name])
        node = self._add(time, usage, interval)
        self._ends.append(End(node, states, (False,) * len(states)))
        self._groups[i].append(node)
        gradients = variable.usage.get("gradients")
        if gradients is not None:
            self._add_gradient(i, node, gradients)
        span = self._span(variable)
        if span is not None and span.nodes.start in self._modes:
            redone = np.array([int(state is State.REDONE) for state in states])
            modes = np.repeat(redone, len(variable.strategies))
            mode = self._modes[span.nodes.start]
            self._edges.append(Edge(mode, node, _SAME_MODE, np.arange(2), modes))

    def _add_gradient(self, i: int, node: int, nbytes: FloatArray) -> None:
        """The gradient of a parameter, as the parameter lies."""
        size = len(nbytes)
        readers = (j for j, _ in self._graph.consumers[self._plain.variables[i].name])
        arrives = self._moments.after(min(readers, default=0))
        gradient = self._add(np.zeros(size), nbytes, arrives)
        self._groups[i].append(gradient)
        self._tie(node, gradient, np.arange(size), np.arange(size))

    def _add_backward(self, moment: Backward, interval: tuple[int, int]) -> None:
        """What an operator's or a resharding's backward takes."""
        if moment.reaches:
            return
        if moment.variable >= 0:
            end = self._ends[moment.variable]
            nbytes = self._moments.operator_bytes(moment.variable)
            distinct, numbers = np.unique(nbytes, return_inverse=True)
            node = self._add(np.zeros(len(distinct)), distinct, interval)
            labels = np.tile(numbers, len(end.states))
            self._tie(end.node, node, labels, np.arange(len(distinct)))
            return
        arc = self._plain.arcs[moment.arc]
        prices, start, end = self._prices_of(arc), self._ends[arc.source], self._ends[arc.target]
        nbytes = self._moments.resharding_bytes(moment.arc, *self._layouts(arc))
        time = np.where(np.isfinite(prices.once), 0.0, np.inf)
        node = self._add(time.ravel(), nbytes.ravel(), interval)
        rows, cols = (x.ravel() for x in np.indices(nbytes.shape))
        self._tie(start.node, node, np.tile(prices.rows, len(start.states)), rows)
        self._tie(end.node, node, np.tile(prices.cols, len(end.states)), cols)

    def _tie(self, first: int, second: int, rows: IntArray, cols: IntArray) -> None:
        """Let two nodes agree in a label."""
        same = np.full((int(rows.max()) + 1, int(cols.max()) + 1), np.inf)
        np.fill_diagonal(same, 0.0)
        self._edges.append(Edge(first, second, same, rows, cols))

    def _span(self, variable: Variable) -> Span | None:
        if variable.role is Role.OPERATOR:
            return self._retention.spans[self._graph.numbers[variable.name]]
        return None

    def _states(self, variable: Variable) -> _States:
        if variable.role is Role.INPUT:
            return (State.REST,)
        if variable.role is Role.OUTPUT:
            return (State.DROP,)
        if variable.role is Role.SHARED:
            if variable.name in self._retention.wanted:
                return (State.KEEP, State.DROP)
            return (State.KEEP if variable.name in self._retention.small else State.DROP,)
        number = self._graph.numbers[variable.name]
        made: _States = (State.MADE,)
        if self._retention.looks[number]:
            outputs = self._graph.nodes[number].outputs
            wanted = not self._retention.wanted.isdisjoint(outputs)
            made = (State.SEEN, State.LOST) if wanted else (State.LOST,)
        if self._span(variable) is None:
            return made
        return (
            (State.REDONE,) if self._activation_checkpointing == "always" else (*made, State.REDONE)
        )

    def _priced(self, variable: Variable, states: _States) -> tuple[FloatArray, FloatArray]:
        """Seconds and bytes of a variable's strategies in each of its states."""
        span = self._span(variable)
        again = span is not None and self._graph.numbers[variable.name] in span.running
        key = (id(variable.strategies), id(variable.time), states, again)
        if key not in self._arrays:
            parts = [self._priced_in(variable, state) for state in states]
            time, usage = (np.concatenate(part) for part in zip(*parts, strict=True))
            self._arrays[key] = time, usage
        return self._arrays[key]

    def _priced_in(self, variable: Variable, state: State) -> tuple[FloatArray, FloatArray]:
        nothing = np.zeros(len(variable.strategies))
        if state is State.REST:
            held = (use for kind, use in variable.usage.items() if kind != "gradients")
            return variable.time, sum(held, nothing)
        if variable.role is not Role.OPERATOR:
            return variable.time, nothing
        number = self._graph.numbers[variable.name]
        node = self._graph.nodes[number]
        if state is State.REDONE:
            span = self._retention.spans[number]
            assert span is not None
            if number not in span.running:
                return variable.time, nothing
            forward = self._plain.prices.forward(self._graph, node, variable.strategies)
            return variable.time + forward, nothing
        if state is State.MADE:
            return variable.time, sum(variable.usage.values(), nothing)
        return variable.time, nothing

    def _add_arc(self, number: int, arc: Arc) -> None:
        source, target = self._plain.variables[arc.source], self._plain.variables[arc.target]
        use = self._use(arc, target)
        start, end = self._start(arc, source), self._ends[arc.target]
        is_made = source.role is Role.OPERATOR and State.SAVED not in start.states
        if target.role is Role.SHARED:
            if State.DROP in end.states and State.KEEP in end.states:
                self._add_kept(number, use, start, end, passing="shared")
            else:
                self._link(arc, start, end, use, "into")
        elif use.needed or (is_made and use.redone and not use.inside):
            self._add_kept(number, use, start, end, passing="out_of")
        else:
            self._link(arc, start, end, use, "directly")

    def _start(self, arc: Arc, source: Variable) -> End:
        """The source of an arc, as its states are for the output that the arc takes."""
        end = self._ends[arc.source]
        states = end.states
        if source.role is Role.OPERATOR:
            saved = self._retention.saved[self._graph.numbers[source.name]].outputs
            if arc.value in self._retention.small:
                states = tuple(s if s is State.REDONE else State.SAVED for s in states)
            elif arc.output in saved:
                states = tuple(State.SAVED if s is State.MADE else s for s in states)
        return End(end.node, states, (True,) * len(states))

    def _use(self, arc: Arc, target: Variable) -> Use:
        known, value = self._retention, arc.value
        made_in = known.span_of(value)
        if target.role is Role.OUTPUT:
            needed = value not in known.small
            return Use(needed=needed, is_output=True, again=self._again)
        if target.role is Role.SHARED:
            reader = known.first_reader_inside(value)
            return Use(
                inside=reader is not None,
                redone=made_in is not None and reader is not None and reader in made_in.taking,
                leaves=known.leaves(value) or value in known.small,
                again=self._again,
            )
        reader = self._graph.numbers[target.name]
        span = known.spans[reader]
        return Use(
            needed=known.needs(reader, arc.position),
            inside=span is not None and made_in is span,
            redone=span is not None and reader in span.taking,
            again=self._again,
        )

    def _add_kept(self, number: int, use: Use, start: End, end: End, *, passing: str) -> None:
        """The choice what becomes of a tensor, resharded for those who take it."""
        arc = self._plain.arcs[number]
        never, passed = Price.NEVER, getattr(use, passing)
        states = tuple(
            state
            for state in _CHOICES
            if any(use.into(s, state) is not never for s in start.states)
            and any(passed(state, t) is not never for t in end.states)
        )
        made = tuple(state is State.HOLD for state in states)
        middle = self._add_choice(arc, states, made, self._held_for(arc))
        self._kept[number] = middle
        self._link(arc, start, middle, use, "into")
        self._link(arc, middle, end, use, passing)

    def _held_for(self, arc: Arc) -> tuple[int, int]:
        """When what is held for a use is there for sure."""
        target = self._plain.variables[arc.target]
        if target.role is Role.OUTPUT:
            return self._moments.always
        if target.role is Role.SHARED:
            return self._moments.until(self._retention.value_needed_until(arc.value))
        reader = self._graph.numbers[target.name]
        return self._moments.until(self._retention.needed_until(reader, arc.position))

    def _add_choice(
        self, arc: Arc, states: _States, made: tuple[bool, ...], interval: tuple[int, int]
    ) -> End:
        prices = self._prices_of(arc)
        key = (id(prices), states, made)
        if key not in self._arrays:
            sides = [prices.made if is_made else prices.taken for is_made in made]
            usage = np.concatenate(
                [
                    nbytes if state in (State.HOLD, State.KEEP) else np.zeros(len(nbytes))
                    for state, nbytes in zip(states, sides, strict=True)
                ]
            )
            self._arrays[key] = np.zeros(len(usage)), usage
        node = self._add(*self._arrays[key], interval)
        self._groups[arc.target].append(node)
        return End(node, states, made, own=True)

    def _link(self, arc: Arc, start: End, end: End, use: Use, passing: str) -> None:
        """An edge along a use; `passing` says which of its prices."""
        prices = self._prices_of(arc)
        key = (id(prices), start.states, end.states, use, passing)
        if key not in self._matrices:
            price: Callable[[State, State], Price] = getattr(use, passing)
            self._matrices[key] = (
                joined(prices, start, end, price),
                start.labels(prices),
                end.labels(prices),
            )
        self._edges.append(Edge(start.node, end.node, *self._matrices[key]))

    def _prices_of(self, arc: Arc) -> ArcPrices:
        key = self._plain.kind_of(arc)
        if key not in self._arc_prices:
            table, ends = self._plain.table(arc.value, arc.gradient), self._plain.ends(arc)
            nbytes = [self._plain.local_bytes(arc.value, x) for x in self._layouts(arc)]
            self._arc_prices[key] = ArcPrices(
                ends.once(table),
                ends.again(table),
                ends.stays(table),
                ends.rows,
                ends.cols,
                *nbytes,
            )
        return self._arc_prices[key]

    def _layouts(self, arc: Arc) -> Iterator[list[Layout]]:
        """Layouts at both ends of a use, as its prices tell them apart."""
        layouts, ends = self._plain.table(arc.value, arc.gradient).layouts, self._plain.ends(arc)
        for numbers in (ends.made, ends.taken):
            yield [layouts[i] for i in numbers.tolist()]

    def _choices_of(self, nodes: range) -> tuple[int, ...]:
        """The nodes of the problem that belong to an instance of a block."""
        chosen = [v for i in self._plain.choices_of(nodes) for v in self._groups[i]]
        modes = (self._modes[nodes.start],) if nodes.start in self._modes else ()
        return (*chosen, *modes)


_SAME_MODE = np.array([[0.0, np.inf], [np.inf, 0.0]])
