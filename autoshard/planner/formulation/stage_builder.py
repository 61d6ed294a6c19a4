"""Builds a stage of the plan from a solution, and reads the decisions of a stage."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from autoshard.base.arrays import IntArray
from autoshard.costs import Frequency, StepCommunication
from autoshard.errors import PlanError
from autoshard.graph import Input, InputKind, graph_to_json
from autoshard.graph.gradients import Gradient
from autoshard.layouts import ALONE, Action, Layout, Step, placement_texts
from autoshard.lowering.recompute import checkpoint_spans, recomputed
from autoshard.lowering.timeline import Timeline
from autoshard.mesh import join_axes
from autoshard.ops import InnerCollective, Strategy
from autoshard.plan.predictions import Costs, Memory
from autoshard.plan.stage import (
    Checkpoint,
    InnerStep,
    PlacedInput,
    PlacedNode,
    PlacedOutput,
    PlannedStep,
    Resharding,
    Stage,
)
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.formulation.variables import Role, Use, Variable
from autoshard.pricing.prices import communication_of

_Path = tuple[str, str, tuple[PlannedStep, ...], StepCommunication[float]]
"""Source and target layout of a resharding, its steps, and its seconds."""


@dataclass(frozen=True)
class Decisions:
    """The decisions of a plan.

    Attributes:
        choice: strategy index of each variable of a formulation.
        regathered: indices of the uses whose resharding runs again in backward.
        checkpoints: nodes of each activation checkpoint, in program order.
        frequencies: how often reshardings of parameters run, by index of the use; those that are
            not listed run as often as is fastest.
    """

    choice: IntArray
    regathered: frozenset[int] = frozenset()
    checkpoints: tuple[range, ...] = ()
    frequencies: Mapping[int, Frequency] = field(default_factory=dict)


def with_gathers_again(formulation: Formulation, decisions: Decisions) -> Decisions:
    """Decisions, with the activations that `regather_activations` has backward gather again.

    What a checkpoint gathers, it gathers again in any case.
    """
    if not formulation.prices.gathers_activations_again:
        return decisions
    again = set(decisions.regathered)
    span_of = {i: span for span in decisions.checkpoints for i in span}
    graph, choice = formulation.graph, decisions.choice
    for number, use in enumerate(formulation.uses):
        costs = formulation.edge_costs(use)
        pair = costs.rows[choice[use.source]], costs.cols[choice[use.target]]
        if costs.gathers_again[pair]:
            reader = formulation.variables[use.target]
            if reader.role is Role.OPERATOR:
                is_inside = graph.numbers[reader.name] in span_of
            else:
                first = min(i for i, _ in graph.consumers[use.value])
                is_inside = graph.makers[use.value] in span_of.get(first, ())
            if not is_inside:
                again.add(number)
    return replace(decisions, regathered=frozenset(again))


class StageBuilder:
    """Builds a stage of a plan from the solution of a formulation.

    Args:
        formulation: the problem.
        decisions: its solution.
    """

    def __init__(self, formulation: Formulation, decisions: Decisions) -> None:
        self._formulation = formulation
        self._decisions = decisions
        self._graph = formulation.graph
        self._axes = formulation.axes
        self._num = formulation.prices.micro_batches
        self._chosen: list[tuple[Variable, Strategy, int]] = [
            (variable, variable.strategies[s], s)
            for variable, s in zip(formulation.variables, map(int, decisions.choice), strict=True)
        ]
        # Nodes that share their strategies have equal placements.
        self._nodes_alike: dict[tuple[int, int], PlacedNode] = {}
        self._paths: dict[tuple[object, ...], _Path] = {}

    def stage(self, name: str = "stage0") -> Stage:
        """The whole program as one stage."""
        mesh, nodes = self._formulation.mesh, self._graph.nodes
        stage = Stage(
            name=name,
            axes=tuple(zip(mesh.axis_names, mesh.axis_sizes, strict=True)),
            micro_batches=self._num,
            in_flight=self._formulation.prices.in_flight,
            accumulation_dtype=self._formulation.prices.accumulation_dtype,
            program=graph_to_json(self._graph),
            inputs=tuple(self._inputs()),
            nodes=tuple(self._nodes()),
            reshardings=tuple(self._reshardings()),
            outputs=tuple(self._outputs()),
            checkpoints=tuple(
                Checkpoint(first=nodes[span.start].name, last=nodes[span.stop - 1].name)
                for span in self._decisions.checkpoints
            ),
        )
        return self._overlapped(stage) if self._formulation.prices.overlaps else stage

    def communication(self, number: int) -> StepCommunication[float] | None:
        """Seconds of the resharding for a use, by its number; None if there is none."""
        use = self._formulation.uses[number]
        if self._source(use) == self._target(use):
            return None
        return self._path(number, use)[3]

    def costs(self, stage: Stage) -> Costs:
        """Predicted seconds by kind."""
        formulation = self._formulation
        parameters = {p.name for p in self._graph.parameters}
        trained = {name for name in parameters if formulation.gradients.exists(name)}
        optimizer = loading = 0.0
        for variable, _, s in self._chosen:
            if variable.role is Role.INPUT and variable.name in trained:
                optimizer += float(variable.time[s])
            elif variable.role is Role.INPUT:
                loading += float(variable.time[s])
        optimizer += formulation.prices.full_accumulation(stage.reshardings)
        compute = loading + sum(node.time for node in stage.nodes)
        communication = sum(resharding.time for resharding in stage.reshardings)
        communication += sum(node.communication for node in stage.nodes)
        recompute = self._recompute(stage)
        overlapped = sum(resharding.overlapped for resharding in stage.reshardings)
        return Costs(
            total=compute + communication + optimizer + recompute - overlapped,
            compute=compute,
            communication=communication,
            optimizer=optimizer,
            recompute=recompute,
            overlapped=overlapped,
        )

    def memory(self, timeline: Timeline) -> Memory:
        """Predicted bytes by kind at the peak."""
        return peak_memory(timeline, self._formulation.prices.memory_budget)

    def _overlapped(self, stage: Stage) -> Stage:
        """The stage with the seconds of each resharding that overlap with compute."""
        again = recomputed(self._graph, stage).reshardings
        seconds = {}
        for number, use in enumerate(self._formulation.uses):
            key = self._formulation.use_key(use)
            if self._source(use) != self._target(use):
                compute = self._formulation.edge_costs(use).compute_of(
                    int(self._decisions.choice[use.target])
                )
                seconds[key] = 0.0
                if compute is not None:
                    communication = self._path(number, use)[3]
                    seconds[key] = float(communication.overlapped(compute, again=key in again))
        reshardings = (
            c.model_copy(update={"overlapped": seconds[c.use]}) for c in stage.reshardings
        )
        return stage.model_copy(update={"reshardings": tuple(reshardings)})

    def _recompute(self, stage: Stage) -> float:
        """Seconds of the operators and reshardings that run again in backward."""
        again = recomputed(self._graph, stage)
        if not again.nodes and not again.reshardings:
            return 0.0
        formulation, seconds = self._formulation, 0.0
        known: dict[tuple[int, int], float] = {}
        for variable, strategy, s in self._chosen:
            if variable.role is Role.OPERATOR and variable.name in again.nodes:
                key = (id(variable.strategies), s)
                if key not in known:
                    node = formulation.node_of(variable)
                    known[key] = float(formulation.prices.forward(node, [strategy])[0])
                seconds += known[key]
        for number, use in enumerate(formulation.uses):
            if formulation.use_key(use) in again.reshardings:
                seconds += self._path(number, use)[3].again()
        return seconds

    def _inputs(self) -> Iterator[PlacedInput]:
        by_name = {i.name: i for i in self._graph.inputs if i.kind is not InputKind.LITERAL}
        for variable, strategy, _ in self._chosen:
            if variable.role is Role.INPUT:
                yield self._input(by_name[variable.name], strategy)

    def _input(self, graph_input: Input, strategy: Strategy) -> PlacedInput:
        tensor = self._graph.values[graph_input.name]
        layout = self._widen(graph_input.name, strategy.outputs[0])
        sizes = self._formulation.mesh.axis_sizes
        return PlacedInput.model_validate(
            {
                "name": graph_input.name,
                "kind": graph_input.kind.value,
                "target": graph_input.target,
                "aliases": graph_input.aliases,
                "dtype": self._graph.stored_dtype(graph_input.name).value,
                "shape": tensor.shape,
                "local_shape": layout.local_shape(tensor.shape, sizes),
                "layout": str(layout),
                "placements": placement_texts(layout, sizes),
            }
        )

    def _nodes(self) -> Iterator[PlacedNode]:
        for variable, strategy, s in self._chosen:
            if variable.role is Role.OPERATOR:
                key = (id(variable.strategies), s)
                if key not in self._nodes_alike:
                    self._nodes_alike[key] = self._node(variable, strategy, float(variable.time[s]))
                yield self._nodes_alike[key].model_copy(update={"name": variable.name})

    def _node(self, variable: Variable, strategy: Strategy, time: float) -> PlacedNode:
        node = self._formulation.node_of(variable)
        if strategy.collectives:
            compute = self._formulation.prices.rank_compute(node, strategy.sizes)
            time = self._num * (compute.forward + compute.backward)
        return PlacedNode(
            name=node.name,
            inputs=self._texts(node.inputs, strategy.inputs),
            outputs=self._texts(node.outputs, strategy.outputs),
            time=time,
            inside=tuple(self._inner_step(c) for c in strategy.collectives),
        )

    def _inner_step(self, collective: InnerCollective) -> InnerStep:
        return InnerStep(
            axis=self._axes.name(collective.axis),
            action=collective.operation.action.value,
            operation=collective.operation.value,
            direction="backward" if collective.backward else "forward",
            nbytes=collective.nbytes,
            time=self._num * self._formulation.prices.inner_time(collective, self._axes),
        )

    def _outputs(self) -> Iterator[PlacedOutput]:
        for variable, strategy, _ in self._chosen:
            if variable.role is not Role.OUTPUT:
                continue
            position = int(variable.name)
            output = self._graph.outputs[position]
            name = output.name
            assert name is not None
            shape = self._graph.values[name].shape
            layout = self._widen(name, strategy.inputs[0])
            yield PlacedOutput(
                name=name,
                updates=output.updates,
                position=position,
                shape=shape,
                local_shape=layout.local_shape(shape, self._formulation.mesh.axis_sizes),
                layout=str(layout),
            )

    def _reshardings(self) -> Iterator[Resharding]:
        for number, use in enumerate(self._formulation.uses):
            if self._source(use) == self._target(use):
                continue
            value, consumer, position = self._formulation.use_key(use)
            source, target, steps, communication = self._path(number, use)
            moves = any(step.forward != Action.NOTHING for step in steps)
            yield Resharding(
                value=value,
                consumer=consumer,
                position=position,
                source=source,
                target=target,
                steps=steps,
                regather=moves and number in self._decisions.regathered,
                frequency=communication.frequency,
            )

    def _source(self, use: Use) -> Layout:
        return self._formulation.source_layout(use, self._chosen[use.source][1])

    def _target(self, use: Use) -> Layout:
        return self._chosen[use.target][1].inputs[use.position]

    def _frequency(self, number: int, use: Use) -> Frequency:
        """Frequency of the resharding for a use in a training step."""
        if not self._formulation.reads_parameter(use):
            return Frequency.MICRO_BATCH
        if number in self._decisions.frequencies:
            return self._decisions.frequencies[number]
        source, target = (int(self._decisions.choice[i]) for i in (use.source, use.target))
        return self._formulation.edge_costs(use).fastest_frequency(source, target)

    def _path(self, number: int, use: Use) -> _Path:
        source, target = self._source(use), self._target(use)
        table = self._formulation.table(use.value, use.gradient)
        of_parameter = self._formulation.reads_parameter(use)
        key = (id(table), source, target, self._frequency(number, use), of_parameter)
        if key not in self._paths:
            self._paths[key] = self._new_path(number, use)
        return self._paths[key]

    def _new_path(self, number: int, use: Use) -> _Path:
        source, target = self._source(use), self._target(use)
        differentiable = use.gradient is not Gradient.NONE
        path = self._formulation.table(use.value, use.gradient).path(source, target)
        communication, times = communication_of(
            path,
            self._axes,
            charge=self._formulation.prices.charges.get(use.value, ALONE),
            of_parameter=self._formulation.reads_parameter(use),
            micro_batches=self._num,
            frequency=self._frequency(number, use),
            contention=self._formulation.mesh.topology.device.contention,
        )
        steps = zip(path, times, strict=True)
        return (
            str(self._axes.widen(source, differentiable=differentiable)),
            str(self._axes.widen(target, differentiable=differentiable)),
            tuple(self._step(step, time) for step, time in steps),
            communication,
        )

    def _step(self, step: Step, time: float) -> PlannedStep:
        return PlannedStep(
            axis=join_axes(map(self._axes.name, step.axes)),
            source=str(step.source),
            target=str(step.target),
            forward=step.forward.value,
            backward=step.backward.value,
            nbytes=step.nbytes,
            gradient_nbytes=step.gradient_nbytes,
            time=time,
        )

    def _texts(self, values: tuple[str, ...], layouts: tuple[Layout, ...]) -> tuple[str, ...]:
        pairs = zip(values, layouts, strict=True)
        return tuple(str(self._widen(value, layout)) for value, layout in pairs)

    def _widen(self, value: str, layout: Layout) -> Layout:
        differentiable = self._formulation.gradients.exists(value)
        return self._axes.widen(layout, differentiable=differentiable)


def peak_memory(timeline: Timeline, budget: int) -> Memory:
    """Predicted bytes by kind at the peak of a timeline."""
    phase, name = timeline.moments[timeline.peak_moment]
    return Memory(
        peak=timeline.peak,
        budget=budget,
        phase=phase.value,
        at=name,
        turn=timeline.at_turn,
        per_micro_batch=timeline.per_micro_batch,
        optimizer_step=timeline.at_optimizer_step,
        **timeline.at_peak,
    )


def decisions_of(formulation: Formulation, stage: Stage) -> Decisions:
    """The decisions of a stage of a plan.

    Raises:
        PlanError: the layouts of a node are not among the strategies of the formulation.
    """
    reshardings = {c.use: c for c in stage.reshardings}
    placed = {
        number: reshardings[formulation.use_key(use)]
        for number, use in enumerate(formulation.uses)
        if formulation.use_key(use) in reshardings
    }
    return Decisions(
        _choice(formulation, stage),
        frozenset(number for number, resharding in placed.items() if resharding.regather),
        checkpoint_spans(formulation.graph, stage),
        {number: resharding.frequency for number, resharding in placed.items()},
    )


def _choice(formulation: Formulation, stage: Stage) -> IntArray:
    """The strategy index of each variable of a formulation in a plan."""
    axes = formulation.axes

    def layouts(*texts: str) -> tuple[Layout, ...]:
        return tuple(axes.narrow(Layout.parse(text)) for text in texts)

    placed = {
        **{(Role.INPUT, i.name): ((), layouts(i.layout)) for i in stage.inputs},
        **{(Role.OPERATOR, n.name): (layouts(*n.inputs), layouts(*n.outputs)) for n in stage.nodes},
        **{(Role.OUTPUT, str(o.position)): (layouts(o.layout), ()) for o in stage.outputs},
    }
    shared = {c.value: layouts(c.target) for c in stage.reshardings if c.consumer is None}
    into = {use.target: use for use in formulation.uses}
    choice: IntArray = np.zeros(len(formulation.variables), dtype=np.intp)
    for i, variable in enumerate(formulation.variables):
        wanted = placed.get((variable.role, variable.name))
        if variable.role is Role.SHARED:
            use = into[i]
            made = formulation.variables[use.source].strategies[choice[use.source]]
            layout = shared.get(variable.name, (formulation.source_layout(use, made),))
            wanted = (layout, layout)
        found = [(s.inputs, s.outputs) for s in variable.strategies]
        if wanted not in found:
            raise PlanError(
                f"the plan's {variable.role} {variable.name!r} is not among the strategies of "
                "this version of autoshard; check the plan, or make it again"
            )
        choice[i] = found.index(wanted)
    return choice
