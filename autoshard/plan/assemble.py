"""From the solution back to the plan's stage: placements, conversions, costs, memory."""

from collections.abc import Iterator

from autoshard.graph import Graph, Input, InputKind, graph_to_json
from autoshard.layouts import Layout, Step, placement_texts, step_price
from autoshard.plan.active import ActiveAxes
from autoshard.plan.document import (
    Conversion,
    Costs,
    Memory,
    PlacedInput,
    PlacedNode,
    PlacedOutput,
    PlannedStep,
    Stage,
)
from autoshard.plan.formulate import Arc, Formulation, Role
from autoshard.plan.gradients import Gradient
from autoshard.rules import Strategy
from autoshard.solve import IntArray


class Assembly:
    """A solved formulation, read as a plan.

    Args:
        formulation: what was solved.
        choice: strategy index per variable.
    """

    def __init__(self, formulation: Formulation, choice: IntArray) -> None:
        self._formulation = formulation
        self._graph: Graph = formulation.graph
        self._axes: ActiveAxes = formulation.axes
        self._choice = choice
        self._strategies: list[Strategy] = [
            variable.strategies[s]
            for variable, s in zip(formulation.variables, choice, strict=True)
        ]

    def stage(self, name: str = "stage0") -> Stage:
        """The whole program as one stage."""
        mesh = self._axes.mesh
        return Stage(
            name=name,
            axes=tuple(zip(mesh.axis_names, mesh.axis_sizes, strict=True)),
            program=graph_to_json(self._graph),
            inputs=tuple(self._inputs()),
            nodes=tuple(self._nodes()),
            conversions=tuple(self._conversions()),
            outputs=tuple(self._outputs()),
        )

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
        communication = sum(conversion.time for conversion in stage.conversions)
        return Costs(
            total=compute + communication + optimizer,
            compute=compute,
            communication=communication,
            optimizer=optimizer,
        )

    def memory(self) -> Memory:
        """Predicted bytes by kind."""
        kinds = dict.fromkeys(("parameters", "gradients", "optimizer", "buffers", "inputs"), 0.0)
        for variable, s in zip(self._formulation.variables, self._choice, strict=True):
            for kind, use in variable.usage.items():
                if kind in kinds:
                    kinds[kind] += float(use[s])
        peak = self._formulation.problem.peak_usage(self._choice)
        return Memory(
            peak=round(peak),
            budget=self._formulation.prices.budget_bytes,
            activations=round(peak - sum(kinds.values())),
            **{kind: round(use) for kind, use in kinds.items()},
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
                yield PlacedNode(
                    name=node.name,
                    inputs=self._texts(node.inputs, strategy.inputs),
                    outputs=self._texts(node.outputs, strategy.outputs),
                    time=float(variable.time[s]),
                )

    def _texts(self, values: tuple[str, ...], layouts: tuple[Layout, ...]) -> tuple[str, ...]:
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

    def _conversions(self) -> Iterator[Conversion]:
        for arc in self._formulation.arcs:
            table = self._formulation.table(arc.value, arc.gradient)
            source = self._formulation.layout_at_source(arc, self._strategies[arc.source])
            target = self._strategies[arc.target].inputs[arc.position]
            if source != target:
                yield self._conversion(arc, source, target, table.path(source, target))

    def _conversion(
        self, arc: Arc, source: Layout, target: Layout, steps: tuple[Step, ...]
    ) -> Conversion:
        consumer = self._formulation.variables[arc.target]
        position = int(consumer.name) if consumer.role is Role.OUTPUT else arc.position
        differentiable = arc.gradient is not Gradient.NONE
        names = {Role.OUTPUT: "output", Role.SHARED: None}
        return Conversion(
            value=arc.value,
            consumer=names.get(consumer.role, consumer.name),
            position=position,
            source=str(self._axes.widen(source, differentiable=differentiable)),
            target=str(self._axes.widen(target, differentiable=differentiable)),
            steps=tuple(self._step(step) for step in steps),
        )

    def _step(self, step: Step) -> PlannedStep:
        return PlannedStep(
            axis=self._axes.mesh.axis_names[self._axes.axes[step.axis]],
            source=str(step.source),
            target=str(step.target),
            forward=step.forward.value,
            backward=step.backward.value,
            nbytes=step.nbytes,
            time=step_price(step, self._axes),
        )
