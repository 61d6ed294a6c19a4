"""From the solution back to the plan's stage: placements, reshardings, costs, memory."""

from collections.abc import Iterator

from autoshard.costs import Passes, hidden_seconds
from autoshard.graph import Graph, Input, InputKind, Node, graph_to_json
from autoshard.layouts import Action, Layout, Step, again_price, placement_texts, step_price
from autoshard.ops import InnerCollective, Strategy
from autoshard.plan.document import (
    Checkpoint,
    Costs,
    InnerStep,
    Memory,
    PlacedInput,
    PlacedNode,
    PlacedOutput,
    PlannedStep,
    Resharding,
    Stage,
)
from autoshard.plan.gradients import Gradient
from autoshard.plan.memory.recompute import recomputed
from autoshard.plan.memory.timeline import Timeline
from autoshard.plan.nontrivial_axes import NontrivialAxes
from autoshard.plan.pricing import inner_time
from autoshard.planner.formulation.decisions import Decisions, use_of
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.formulation.variables import Arc, Role

_Texts = tuple[str, ...]
_Shown = tuple[_Texts, _Texts, float, tuple[InnerStep, ...]]
"""Layouts of what an operator takes and makes, its compute, and what runs inside."""

_Change = tuple[str, str, tuple[PlannedStep, ...], Passes[float]]
"""What a resharding goes from and to, its steps, and seconds of both passes."""


class Assembly:
    """A solved formulation, read as a plan.

    Args:
        formulation: what was solved.
        decisions: its solution.
    """

    def __init__(self, formulation: Formulation, decisions: Decisions) -> None:
        self._formulation = formulation
        self._decisions = decisions
        choice = decisions.choice
        self._graph: Graph = formulation.graph
        self._axes: NontrivialAxes = formulation.axes
        self._choice = choice
        self._strategies: list[Strategy] = [
            variable.strategies[s]
            for variable, s in zip(formulation.variables, choice, strict=True)
        ]
        self._shown: dict[tuple[int, int], _Shown] = {}
        self._changes: dict[tuple[object, ...], _Change] = {}

    def stage(self, name: str = "stage0") -> Stage:
        """The whole program as one stage."""
        mesh = self._axes.mesh
        stage = Stage(
            name=name,
            axes=tuple(zip(mesh.axis_names, mesh.axis_sizes, strict=True)),
            program=graph_to_json(self._graph),
            inputs=tuple(self._inputs()),
            nodes=tuple(self._nodes()),
            reshardings=tuple(self._reshardings()),
            outputs=tuple(self._outputs()),
            checkpoints=tuple(
                Checkpoint(
                    first=self._graph.nodes[span.start].name,
                    last=self._graph.nodes[span.stop - 1].name,
                )
                for span in self._decisions.checkpoints
            ),
        )
        return self._overlapped(stage) if self._formulation.prices.overlaps else stage

    def _overlapped(self, stage: Stage) -> Stage:
        """A stage whose reshardings say what of them runs beside compute."""
        again = recomputed(self._graph, stage).reshardings
        hidden = {
            use: self._hidden(arc, again=use in again)
            for arc in self._formulation.arcs
            if self._source(arc) != self._target(arc)
            for use in [use_of(self._formulation, arc)]
        }
        reshardings = (
            c.model_copy(update={"overlapped": hidden[c.use]}) for c in stage.reshardings
        )
        return stage.model_copy(update={"reshardings": tuple(reshardings)})

    def _hidden(self, arc: Arc, *, again: bool) -> float:
        compute = self._formulation.ends(arc).compute_of(self._choice[arc.target])
        if compute is None:
            return 0.0
        return float(hidden_seconds(self._change(arc)[3], compute, again=again))

    def costs(self, stage: Stage) -> Costs:
        """Predicted seconds by kind."""
        trained = {
            parameter.name
            for parameter in self._graph.parameters
            if self._formulation.gradients.exists(parameter.name)
        }
        optimizer = loading = 0.0
        for variable, s in zip(self._formulation.variables, self._choice, strict=True):
            if variable.role is Role.INPUT and variable.name in trained:
                optimizer += float(variable.time[s])
            elif variable.role is Role.INPUT:
                loading += float(variable.time[s])
        compute = loading + sum(node.time for node in stage.nodes)
        communication = sum(resharding.time for resharding in stage.reshardings)
        communication += sum(node.communication for node in stage.nodes)
        recompute = self._recompute(stage)
        hidden = sum(resharding.overlapped for resharding in stage.reshardings)
        return Costs(
            total=compute + communication + optimizer + recompute - hidden,
            compute=compute,
            communication=communication,
            optimizer=optimizer,
            recompute=recompute,
            overlapped=hidden,
        )

    def _recompute(self, stage: Stage) -> float:
        """Seconds of what runs once more in backward."""
        again = recomputed(self._graph, stage)
        if not again.nodes and not again.reshardings:
            return 0.0
        formulation, seconds = self._formulation, 0.0
        known: dict[tuple[int, int], float] = {}
        for variable, strategy, s in zip(
            formulation.variables, self._strategies, self._choice, strict=True
        ):
            if variable.role is Role.OPERATOR and variable.name in again.nodes:
                key = (id(variable.strategies), int(s))
                if key not in known:
                    node = self._graph.nodes[self._graph.numbers[variable.name]]
                    known[key] = float(formulation.prices.forward(self._graph, node, [strategy])[0])
                seconds += known[key]
        for arc in formulation.arcs:
            if use_of(formulation, arc) in again.reshardings:
                seconds += self._change(arc)[3].forward
        return seconds

    def memory(self, timeline: Timeline) -> Memory:
        """Predicted bytes by kind at the peak."""
        phase, name = timeline.moments[timeline.peak_moment]
        turn = timeline.turn
        return Memory(
            peak=timeline.peak,
            budget=self._formulation.prices.memory_budget,
            phase=phase.value,
            at=name,
            turn=None if turn is None else int(timeline.total[turn]),
            **timeline.at_peak,
        )

    def _widen(self, value: str, layout: Layout) -> Layout:
        differentiable = self._formulation.gradients.exists(value)
        return self._axes.widen(layout, differentiable=differentiable)

    def _inputs(self) -> Iterator[PlacedInput]:
        by_name = {i.name: i for i in self._graph.inputs if i.kind is not InputKind.LITERAL}
        for variable, strategy in zip(self._formulation.variables, self._strategies, strict=True):
            if variable.role is Role.INPUT:
                yield self._input(by_name[variable.name], strategy)

    def _input(self, graph_input: Input, strategy: Strategy) -> PlacedInput:
        tensor = self._graph.values[graph_input.name]
        layout = self._widen(graph_input.name, strategy.outputs[0])
        sizes = self._axes.mesh.axis_sizes
        return PlacedInput.model_validate(
            {
                "name": graph_input.name,
                "kind": graph_input.kind.value,
                "target": graph_input.target,
                "aliases": graph_input.aliases,
                "dtype": tensor.dtype.value,
                "shape": tensor.shape,
                "local_shape": layout.local_shape(tensor.shape, sizes),
                "layout": str(layout),
                "placements": placement_texts(layout, sizes),
            }
        )

    def _nodes(self) -> Iterator[PlacedNode]:
        nodes = iter(self._graph.nodes)
        for variable, strategy, s in zip(
            self._formulation.variables, self._strategies, self._choice, strict=True
        ):
            if variable.role is Role.OPERATOR:
                node = next(nodes)
                # Nodes that share their strategies have tensors of the same types.
                key = (id(variable.strategies), int(s))
                if key not in self._shown:
                    self._shown[key] = (
                        self._texts(node.inputs, strategy.inputs),
                        self._texts(node.outputs, strategy.outputs),
                        self._compute(node, strategy, float(variable.time[s])),
                        tuple(self._inner_step(c) for c in strategy.collectives),
                    )
                inputs, outputs, time, inside = self._shown[key]
                yield PlacedNode(
                    name=node.name, inputs=inputs, outputs=outputs, time=time, inside=inside
                )

    def _compute(self, node: Node, strategy: Strategy, time: float) -> float:
        """What of the time of an operator is compute."""
        if not strategy.collectives:
            return time
        formulation = self._formulation
        backward = formulation.gradients.flows(node)
        compute = formulation.prices.rank_compute(
            self._graph, node, strategy.sizes, backward=backward
        )
        return compute.forward + compute.backward

    def _inner_step(self, collective: InnerCollective) -> InnerStep:
        return InnerStep(
            axis=self._axes.mesh.axis_names[self._axes.axes[collective.axis]],
            action=collective.operation.action.value,
            operation=collective.operation.value,
            direction="backward" if collective.backward else "forward",
            nbytes=collective.nbytes,
            time=inner_time(collective, self._axes),
        )

    def _texts(self, values: tuple[str, ...], layouts: tuple[Layout, ...]) -> _Texts:
        pairs = zip(values, layouts, strict=True)
        return tuple(str(self._widen(value, layout)) for value, layout in pairs)

    def _outputs(self) -> Iterator[PlacedOutput]:
        for variable, strategy in zip(self._formulation.variables, self._strategies, strict=True):
            if variable.role is not Role.OUTPUT:
                continue
            position = int(variable.name)
            name = self._graph.outputs[position].name
            assert name is not None
            tensor = self._graph.values[name]
            layout = self._widen(name, strategy.inputs[0])
            yield PlacedOutput(
                name=name,
                position=position,
                shape=tensor.shape,
                local_shape=layout.local_shape(tensor.shape, self._axes.mesh.axis_sizes),
                layout=str(layout),
            )

    def _reshardings(self) -> Iterator[Resharding]:
        for number, arc in enumerate(self._formulation.arcs):
            if self._source(arc) != self._target(arc):
                yield self._resharding(arc, again=number in self._decisions.again)

    def _source(self, arc: Arc) -> Layout:
        return self._formulation.layout_at_source(arc, self._strategies[arc.source])

    def _target(self, arc: Arc) -> Layout:
        return self._strategies[arc.target].inputs[arc.position]

    def _resharding(self, arc: Arc, *, again: bool) -> Resharding:
        value, consumer, position = use_of(self._formulation, arc)
        start, end, steps, _ = self._change(arc)
        moves = any(step.forward != Action.NOTHING for step in steps)
        return Resharding(
            value=value,
            consumer=consumer,
            position=position,
            source=start,
            target=end,
            steps=steps,
            regather=again and moves,
        )

    def _change(self, arc: Arc) -> _Change:
        source, target = self._source(arc), self._target(arc)
        table = self._formulation.table(arc.value, arc.gradient)
        key = (id(table), source, target)
        if key not in self._changes:
            differentiable = arc.gradient is not Gradient.NONE
            path = table.path(source, target)
            carried = self._formulation.carried.get(arc.value, 1.0)
            forward = sum(again_price(step, self._axes, carried) for step in path)
            both = sum(step_price(step, self._axes, carried) for step in path)
            self._changes[key] = (
                str(self._axes.widen(source, differentiable=differentiable)),
                str(self._axes.widen(target, differentiable=differentiable)),
                tuple(self._step(step, carried) for step in path),
                Passes(forward, max(both - forward, 0.0)),
            )
        return self._changes[key]

    def _step(self, step: Step, carried: float) -> PlannedStep:
        return PlannedStep(
            axis=self._axes.mesh.axis_names[self._axes.axes[step.axis]],
            source=str(step.source),
            target=str(step.target),
            forward=step.forward.value,
            backward=step.backward.value,
            nbytes=step.nbytes,
            time=step_price(step, self._axes, carried),
        )
