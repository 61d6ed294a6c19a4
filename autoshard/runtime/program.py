"""A planned stage as a program on local tensors: no DTensor, nothing decided while it runs."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import LayoutError, PlanError
from autoshard.graph import Graph, Node, Output, graph_from_json
from autoshard.layouts import Layout
from autoshard.plan import Conversion, PlacedNode, Stage
from autoshard.runtime.conversions import LocalFunction, bind_steps
from autoshard.runtime.kernels import (
    LocalKernel,
    LocalNode,
    Place,
    bind_kernel,
    draws_random_numbers,
)

Registers = list[Any]
"""A tensor per slot while it is alive, None before and after."""


class Instruction(Protocol):
    """One thing that a rank does."""

    reads: tuple[int, ...]
    dead: tuple[int, ...]

    def run(self, registers: Registers, step: int) -> None:
        """Do it."""
        ...


@dataclass(slots=True)
class _Convert:
    value: str
    reads: tuple[int, ...]
    target: int
    steps: tuple[LocalFunction, ...]
    dead: tuple[int, ...] = ()

    def run(self, registers: Registers, step: int) -> None:  # noqa: ARG002  a protocol's method
        tensor = registers[self.reads[0]]
        for convert in self.steps:
            tensor = convert(tensor)
        registers[self.target] = tensor


@dataclass(slots=True)
class _Call:
    node: str
    reads: tuple[int, ...]
    targets: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    kernel: LocalKernel
    dead: tuple[int, ...] = ()

    def run(self, registers: Registers, step: int) -> None:
        outputs = self.kernel([registers[slot] for slot in self.reads], step)
        for slot, output, shape in zip(self.targets, outputs, self.shapes, strict=True):
            assert output.shape == shape, f"{self.node} made {tuple(output.shape)}, not {shape}"
            registers[slot] = output


class LocalProgram:
    """What one rank runs for a stage.

    Args:
        stage: of a plan; carries its program.
        mesh: the stage's devices, with the stage's axes.
        seed: of random operators such as dropout; must be the same on all ranks.

    Raises:
        PlanError: the mesh is not the stage's, the stage contradicts itself, or it calls
            an operator that may not be called.

    Attributes:
        graph: the program that is run.
        is_random: whether it draws random numbers.
        place: where on the mesh this rank is.
    """

    def __init__(self, stage: Stage, mesh: DeviceMesh, *, seed: int = 0) -> None:
        self.graph = graph_from_json(stage.program)
        self.is_random = any(draws_random_numbers(node) for node in self.graph.nodes)
        self.place = _place(stage, mesh, seed)
        compiler = _Compiler(stage, self.graph, mesh, self.place)
        compiler.compile()
        self._num_slots = compiler.num_slots
        self._instructions: tuple[Instruction, ...] = tuple(compiler.instructions)
        self._outputs = tuple(compiler.output_slots)

    def __call__(self, inputs: Sequence[torch.Tensor], *, step: int = 0) -> tuple[Any, ...]:
        """Run on this rank's tensors.

        Args:
            inputs: this rank's slices of `stage.inputs`, in order.
            step: number of the training step. Random numbers follow from it and the seed,
                so that recomputing a step draws the same ones.

        Returns:
            One entry per output of the graph: this rank's slice, or the literal.
        """
        registers: Registers = [*inputs, *[None] * (self._num_slots - len(inputs))]
        for instruction in self._instructions:
            instruction.run(registers, step)
            for slot in instruction.dead:
                registers[slot] = None
        return tuple(
            registers[slot] if slot is not None else output.literal
            for slot, output in zip(self._outputs, self.graph.outputs, strict=True)
        )


@dataclass
class _Compiler:
    """Turns a stage into instructions.

    A conversion runs right before its first reader, so that a parameter is gathered when it
    is needed and not before.
    """

    stage: Stage
    graph: Graph
    mesh: DeviceMesh
    place: Place
    instructions: list[_Convert | _Call] = field(default_factory=list)
    output_slots: list[int | None] = field(default_factory=list)
    num_slots: int = 0

    def compile(self) -> None:
        """Fill `instructions` and `output_slots`."""
        self._slots = {placed.name: self._new_slot() for placed in self.stage.inputs}
        self._check_inputs()
        self._conversions = {(c.value, c.consumer, c.position): c for c in self.stage.conversions}
        if len(self._conversions) < len(self.stage.conversions):
            raise PlanError(f"stage {self.stage.name!r} converts one use of a value twice")
        placed_nodes = {placed.name: placed for placed in self.stage.nodes}
        for node in self.graph.nodes:
            if node.name not in placed_nodes:
                raise PlanError(f"stage {self.stage.name!r} has no layouts for node {node.name!r}")
            self._add_call(node, placed_nodes[node.name])
        for position, output in enumerate(self.graph.outputs):
            self.output_slots.append(self._output_slot(output, position))
        if self._conversions:
            value, consumer, _ = next(iter(self._conversions))
            raise PlanError(f"the plan converts {value!r} for {consumer!r}, which does not use it")
        self._mark_dead()

    def _check_inputs(self) -> None:
        for placed in self.stage.inputs:
            if placed.name not in self.graph.values:
                raise PlanError(
                    f"stage {self.stage.name!r} places {placed.name!r}, which is no value"
                )
            (shape,) = self._local_shapes([placed.name], [Layout.parse(placed.layout)])
            if shape != placed.local_shape:
                raise PlanError(
                    f"input {placed.name!r} has the local shape {placed.local_shape} in the plan, "
                    f"but {placed.layout} gives {shape}"
                )

    def _new_slot(self) -> int:
        self.num_slots += 1
        return self.num_slots - 1

    def _add_call(self, node: Node, placed: PlacedNode) -> None:
        reads = tuple(
            self._read(value, node.name, position) for position, value in enumerate(node.inputs)
        )
        local = self._local_node(node, placed)
        for name in node.outputs:
            self._slots[name] = self._new_slot()
        self.instructions.append(
            _Call(
                node=node.name,
                reads=reads,
                targets=tuple(self._slots[name] for name in node.outputs),
                shapes=local.output_shapes,
                kernel=bind_kernel(local),
            )
        )

    def _local_node(self, node: Node, placed: PlacedNode) -> LocalNode:
        inputs = tuple(Layout.parse(text) for text in placed.inputs)
        outputs = tuple(Layout.parse(text) for text in placed.outputs)
        return LocalNode(
            node=node,
            inputs=inputs,
            outputs=outputs,
            input_shapes=tuple(self._local_shapes(node.inputs, inputs)),
            output_shapes=tuple(self._local_shapes(node.outputs, outputs)),
            place=self.place,
        )

    def _local_shapes(
        self, values: Sequence[str], layouts: Sequence[Layout]
    ) -> Iterator[tuple[int, ...]]:
        if len(values) != len(layouts):
            raise PlanError(f"there are {len(layouts)} layouts for the values {list(values)}")
        for value, layout in zip(values, layouts, strict=True):
            try:
                shape = self.graph.values[value].shape
                yield layout.local_shape(shape, self.place.axis_sizes)
            except LayoutError as error:
                raise PlanError(f"value {value!r}: {error}") from None

    def _output_slot(self, output: Output, position: int) -> int | None:
        return None if output.name is None else self._read(output.name, "output", position)

    def _read(self, value: str, consumer: str, position: int) -> int:
        """The slot from which a use of a value reads, converted as the plan says."""
        shared = self._conversions.pop((value, None, 0), None)
        if shared is not None:
            self._slots[value] = self._add_conversion(shared)
        own = self._conversions.pop((value, consumer, position), None)
        return self._slots[value] if own is None else self._add_conversion(own)

    def _add_conversion(self, conversion: Conversion) -> int:
        source = self._slots[conversion.value]
        steps = bind_steps(conversion.steps, self.mesh)
        if not steps:
            return source
        target = self._new_slot()
        self.instructions.append(_Convert(conversion.value, (source,), target, steps))
        return target

    def _mark_dead(self) -> None:
        """Free each slot behind its last reader; outputs stay."""
        kept = set(self.output_slots)
        last: dict[int, int] = {}
        for number, instruction in enumerate(self.instructions):
            for slot in (*instruction.reads, *_targets(instruction)):
                last[slot] = number
        dead = defaultdict(list)
        for slot, number in last.items():
            if slot not in kept:
                dead[number].append(slot)
        for number, slots in dead.items():
            self.instructions[number].dead = tuple(slots)


def _targets(instruction: _Convert | _Call) -> tuple[int, ...]:
    return instruction.targets if isinstance(instruction, _Call) else (instruction.target,)


def _place(stage: Stage, mesh: DeviceMesh, seed: int) -> Place:
    names, sizes = zip(*stage.axes, strict=True) if stage.axes else ((), ())
    if mesh.mesh_dim_names != names or tuple(mesh.shape) != sizes:
        wanted = ", ".join(f"{name}={size}" for name, size in stage.axes)
        raise PlanError(
            f"the plan is for a mesh with the axes {wanted}; this one has the shape "
            f"{tuple(mesh.shape)} and the axis names {mesh.mesh_dim_names}: make it with "
            f"init_device_mesh({mesh.device_type!r}, {sizes}, mesh_dim_names={names})"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise PlanError("this rank is not part of the device mesh")
    return Place(
        axis_sizes=sizes,
        coordinate=tuple(coordinate),
        device=torch.device(mesh.device_type),
        seed=seed,
    )
