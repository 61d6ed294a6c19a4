"""Plans written by hand: layouts are given, reshardings follow from them.

They pin down what a runtime must do without a planner in between, and contain what a planner
seldom picks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod

from torch import nn

from autoshard.base.outcome import SolveStatus
from autoshard.graph import Graph, InputKind, graph_digest, graph_to_json, load_graph
from autoshard.graph.export.model import export_model
from autoshard.layouts import Layout, ReshardingTable, placement_texts
from autoshard.lowering.instructions import count_collectives
from autoshard.mesh import Mesh, join_axes, make_mesh
from autoshard.plan import (
    Certificate,
    Costs,
    GraphSummary,
    Memory,
    PlacedInput,
    PlacedNode,
    PlacedOutput,
    Plan,
    PlannedStep,
    PlanOptions,
    Provenance,
    Resharding,
    Stage,
)

Layouts = tuple[Sequence[str], Sequence[str]]
"""Of the inputs and of the outputs of one node."""


@dataclass
class HandPlan:
    """A plan in the making.

    Attributes:
        model: what is planned.
        args: example arguments.
        mesh: of the plan.
        kwargs: example keyword arguments.
        at_rest: layout by target (or by the value's name) of the inputs that are not whole.
        nodes: layouts of each node, in order; a node that is left out is whole.
        shared: layout into which a value is brought for all its consumers.
        outputs: layout by position of the outputs that are not whole.
        mode: training or inference.
    """

    model: nn.Module
    args: tuple[object, ...]
    mesh: Mesh
    kwargs: Mapping[str, object] = field(default_factory=dict)
    at_rest: Mapping[str, str] = field(default_factory=dict)
    nodes: Mapping[int, Layouts] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[int, str] = field(default_factory=dict)
    mode: str = "training"

    def build(self) -> Plan:
        graph = load_graph(export_model(self.model, self.args, dict(self.kwargs)))
        stage = _Stage(self, graph).build()
        return Plan(
            id="0" * 64,
            certificate=Certificate(status=SolveStatus.FEASIBLE, objective=0.0, bound=0.0, gap=0.0),
            graph=GraphSummary(digest=graph_digest(graph), num_nodes=1, num_parameters=1),
            mesh=self.mesh,
            options=PlanOptions(mode=self.mode),
            costs=Costs(total=0, compute=0, communication=0, optimizer=0),
            memory=Memory(
                peak=0,
                budget=None,
                phase="turn",
                at="",
                turn=0,
                per_micro_batch=0,
                optimizer_step=0,
                parameters=0,
                gradients=0,
                optimizer=0,
                buffers=0,
                inputs=0,
                activations=0,
                temporaries=0,
            ),
            collectives=count_collectives((stage,), (graph,)),
            stages=(stage,),
            provenance=Provenance(versions={}, wall_time={}, statistics={}),
        )


class _Flat:
    """Prices by which the shortest resharding of the fewest bytes wins."""

    def collective_time(
        self,
        _action: str,
        _axis: int | tuple[int, ...],
        nbytes: int,
        *,
        inner: bool = False,  # noqa: ARG002  the protocol's
    ) -> float:
        return 1.0 + nbytes

    def copy_time(self, _nbytes: int) -> float:
        return 0.0


class _Stage:
    def __init__(self, hand: HandPlan, graph: Graph) -> None:
        self.hand = hand
        self.graph = graph
        self.sizes = hand.mesh.axis_sizes
        self.made: dict[str, str] = {}
        self.reshardings: list[Resharding] = []

    def build(self) -> Stage:
        inputs = [
            self._input(i.name, i.kind, i.target, i.aliases)
            for i in self.graph.inputs
            if i.kind is not InputKind.LITERAL
        ]
        nodes = []
        for number, node in enumerate(self.graph.nodes):
            whole = [self._whole(v) for v in node.inputs], [self._whole(v) for v in node.outputs]
            takes, makes = self.hand.nodes.get(number, whole)
            for position, (value, layout) in enumerate(zip(node.inputs, takes, strict=True)):
                self._use(value, node.name, position, layout)
            for value, layout in zip(node.outputs, makes, strict=True):
                self._make(value, layout)
            nodes.append(
                PlacedNode(name=node.name, inputs=tuple(takes), outputs=tuple(makes), time=0.0)
            )
        outputs = [
            self._output(o.name, position)
            for position, o in enumerate(self.graph.outputs)
            if o.name is not None
        ]
        return Stage(
            name="stage0",
            axes=tuple(zip(self.hand.mesh.axis_names, self.sizes, strict=True)),
            program=graph_to_json(self.graph),
            inputs=tuple(inputs),
            nodes=tuple(nodes),
            reshardings=tuple(self.reshardings),
            outputs=tuple(outputs),
        )

    def _whole(self, value: str) -> str:
        return ",".join(["I" if self._differentiable(value) else "R"] * len(self.sizes))

    def _differentiable(self, value: str) -> bool:
        return self.hand.mode == "training" and self.graph.values[value].requires_grad

    def _make(self, value: str, layout: str) -> None:
        self.made[value] = layout
        if value in self.hand.shared:
            self._reshard(value, None, 0, self.hand.shared[value])
            self.made[value] = self.hand.shared[value]

    def _use(self, value: str, consumer: str, position: int, layout: str) -> None:
        if self.made[value] != layout:
            self._reshard(value, consumer, position, layout)

    def _reshard(self, value: str, consumer: str | None, position: int, target: str) -> None:
        tensor = self.graph.values[value]
        reshardings = ReshardingTable(
            tensor.shape,
            tensor.dtype.itemsize,
            self.sizes,
            differentiable=self._differentiable(value),
            pricer=_Flat(),
        )
        source = self.made[value]
        names = self.hand.mesh.axis_names
        steps = tuple(
            PlannedStep(
                axis=join_axes(names[axis] for axis in step.axes),
                source=str(step.source),
                target=str(step.target),
                forward=step.forward,
                backward=step.backward,
                nbytes=step.nbytes,
                time=0.0,
            )
            for step in reshardings.path(Layout.parse(source), Layout.parse(target))
            # As in any plan: an axis of one rank has no steps.
            if prod(self.sizes[axis] for axis in step.axes) > 1
        )
        self.reshardings.append(
            Resharding(
                value=value,
                consumer=consumer,
                position=position,
                source=source,
                target=target,
                steps=steps,
            )
        )

    def _input(
        self, name: str, kind: InputKind, target: str, aliases: tuple[str, ...]
    ) -> PlacedInput:
        tensor = self.graph.values[name]
        text = self.hand.at_rest.get(target, self._whole(name))
        self._make(name, text)
        layout = Layout.parse(text)
        return PlacedInput.model_validate(
            {
                "name": name,
                "kind": kind.value,
                "target": target,
                "aliases": aliases,
                "dtype": tensor.dtype.value,
                "shape": tensor.shape,
                "local_shape": layout.local_shape(tensor.shape, self.sizes),
                "layout": text,
                "placements": placement_texts(layout, self.sizes),
            }
        )

    def _output(self, name: str, position: int) -> PlacedOutput:
        text = self.hand.outputs.get(position, self._whole(name))
        self._use(name, "output", position, text)
        shape = self.graph.values[name].shape
        return PlacedOutput(
            name=name,
            position=position,
            shape=shape,
            local_shape=Layout.parse(text).local_shape(shape, self.sizes),
            layout=text,
        )


def cpu_mesh(**axes: int) -> Mesh:
    """A mesh of CPU hosts with these axes."""
    return make_mesh(tuple(axes.values()), axes=tuple(axes), backend="gloo")


@cache
def built(make: Callable[[], HandPlan]) -> tuple[HandPlan, Plan]:
    """A hand-written plan in the making and made, once for all that is checked of it."""
    hand = make()
    return hand, hand.build()


@dataclass
class Checked:
    """A hand-written plan, and what is checked of it."""

    make: Callable[[], HandPlan]
    check: Callable[[HandPlan, Plan], None]

    def prepare(self) -> None:
        built(self.make)

    def __call__(self) -> None:
        self.check(*built(self.make))
