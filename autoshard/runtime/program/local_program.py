"""A planned stage, compiled to a program on a rank's local tensors."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import LayoutError, PlanError
from autoshard.graph import graph_from_json
from autoshard.graph.experts import ragged_values
from autoshard.layouts import Action, Layout
from autoshard.lowering import instructions as lowering
from autoshard.ops import Kernel, draws_random_numbers, spec_for
from autoshard.plan import Resharding, Stage
from autoshard.runtime.program.buckets import BucketSteps
from autoshard.runtime.program.instructions import (
    Begin,
    End,
    Instruction,
    ProgramRun,
    Recompute,
    Registers,
    Reshard,
    RunOperator,
    execute,
    mark_apart,
    mark_last_reads,
)
from autoshard.runtime.program.kernels import bind_kernel
from autoshard.runtime.program.local_node import LocalNode, MeshRanks, Place, Step
from autoshard.runtime.program.regather import Regathers
from autoshard.runtime.resharding import ElementTypes, bind_steps, bind_with_casts
from autoshard.runtime.shards import local_shape


class LocalProgram:
    """The instructions of one rank for a stage, with kernels and process groups bound.

    Args:
        stage: a plan's stage; its `program` is the graph.
        mesh: the stage's devices, with the stage's axes.
        seed: seed of random operators such as dropout; must be the same on all ranks.
        custom_operators: operators outside ATen that the program may call, as `namespace::name`
            or whole namespaces.
        bucketed: True if reshardings of parameters share collectives and overlap other work, as
            in the plan; otherwise each runs separately before its first read.
        model: the model, whose opaque modules the program calls.

    Raises:
        PlanError: the mesh does not have the stage's axes, the stage is inconsistent, or it calls
            an operator that is not allowed.

    Attributes:
        graph: the program that is run.
        instructions: the rank's instructions, in order.
        is_random: True if the program draws random numbers.
        place: position of this rank on the mesh.
        read_inputs: slots of the inputs that are read.
        kept: slots of the outputs.
    """

    def __init__(
        self,
        stage: Stage,
        mesh: DeviceMesh,
        *,
        seed: int = 0,
        custom_operators: Collection[str] = (),
        bucketed: bool = True,
        model: nn.Module | None = None,
    ) -> None:
        self.graph = graph_from_json(stage.program)
        self.is_random = any(draws_random_numbers(node) for node in self.graph.nodes)
        self.place = _place(stage, mesh, seed)
        custom = frozenset(
            node.operator for node in self.graph.nodes if _may_call(node.operator, custom_operators)
        )
        lowered = lowering.lower(stage, self.graph, bucketed=bucketed)
        self.instructions = tuple(_Binder(lowered, mesh, self.place, custom, model).bind())
        self._outputs = tuple(zip(lowered.outputs, self.graph.outputs, strict=True))
        self.kept = frozenset(slot for slot in lowered.outputs if slot is not None)
        self.read_inputs = mark_last_reads(self.instructions, self.kept)
        self._num_inputs = len(stage.inputs)
        self._unread = tuple(set(range(self._num_inputs)) - self.read_inputs)
        written = [slot for instruction in self.instructions for slot in instruction.targets]
        self._unwritten = (None,) * (max([self._num_inputs - 1, *written]) + 1 - self._num_inputs)
        self._has_run = False

    def compute_apart(self, slots: Iterable[int]) -> None:
        """Allow gradients of what does not derive from some inputs to be computed apart.

        Args:
            slots: of these inputs.
        """
        mark_apart(self.instructions, slots)

    def registers(self, inputs: Iterable[torch.Tensor]) -> Registers:
        """The registers of a run before its first instruction.

        Args:
            inputs: this rank's shards of `stage.inputs`, in order.
        """
        registers: Registers = [*inputs, *self._unwritten]
        for slot in self._unread:
            registers[slot] = None
        return registers

    def __call__(
        self,
        inputs: Iterable[torch.Tensor],
        *,
        step: Step = 0,
        checkpoints: bool = True,
        apart: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[Any, ...]:
        """Run on this rank's tensors.

        Args:
            inputs: this rank's shards of `stage.inputs`, in order. If nothing else references
                them, as with an iterator, they are freed after their last use.
            step: index of the training step. It and the seed determine the random numbers, so
                that recomputing a step draws the same ones.
            checkpoints: False to save what the planned activation checkpoints would recompute.
            apart: gets the tensors whose gradients are computed apart, after `compute_apart`.

        Returns:
            One entry per output of the graph: this rank's shard, or the literal.
        """
        registers = self.registers(inputs)
        # Shapes follow from those of the inputs, so they are compared in the first run only.
        checks = not self._has_run
        execute(
            self.instructions, registers, ProgramRun(step, Regathers(), checks, checkpoints, apart)
        )
        self._has_run = True
        return self._results(registers)

    def run_compiled(self, inputs: Sequence[torch.Tensor], step: Step) -> tuple[Any, ...]:
        """Run, as a compiler traces it. Arguments are those of a call."""
        registers = self.registers(inputs)
        execute(self.instructions, registers, ProgramRun(step, Regathers(), checks_shapes=False))
        return self._results(registers)

    def _results(self, registers: Registers) -> tuple[Any, ...]:
        return tuple(
            [output.literal if slot is None else registers[slot] for slot, output in self._outputs]
        )


class _Binder:
    """Binds kernels and process groups to lowered instructions.

    Args:
        lowered: the lowered stage.
        mesh: the stage's devices.
        place: position of this rank on the mesh.
        custom: names of operators outside ATen that may be called.
        model: the model, whose opaque modules the program calls.
    """

    def __init__(
        self,
        lowered: lowering.Lowering,
        mesh: DeviceMesh,
        place: Place,
        custom: frozenset[str],
        model: nn.Module | None,
    ) -> None:
        self._lowered = lowered
        self._graph = lowered.graph
        self._mesh = mesh
        self._place = place
        self._custom = custom
        self._model = model
        self._ragged = ragged_values(lowered.graph)
        self._buckets: dict[int, BucketSteps] = {}  # by the slot of the pending bucket
        self._regathered: set[int] = set()  # slots that may share memory with re-gathered results

    def bind(self) -> Iterator[Instruction]:
        """The executable instructions; those of a checkpoint become one `Recompute`.

        Raises:
            PlanError: the stage is inconsistent, or calls an operator that is not allowed.
        """
        self._check_inputs()
        groups = groupby(self._lowered.instructions, key=lambda lowered: lowered.checkpoint)
        for checkpoint, group in groups:
            bound = [self._bind(instruction) for instruction in group]
            if checkpoint < 0:
                yield from bound
            else:
                yield Recompute.of(bound)

    def _check_inputs(self) -> None:
        for placed in self._lowered.stage.inputs:
            layout, shape = Layout.parse(placed.layout), self._graph.values[placed.name].shape
            self._local_shapes([placed.name], [layout])  # raises where the layout is illegal
            local_shape = layout.local_shape(shape, self._place.axis_sizes)
            if local_shape != placed.local_shape:
                raise PlanError(
                    f"input {placed.name!r} has the local shape {placed.local_shape} in the plan, "
                    f"but {placed.layout} gives {local_shape}"
                )

    def _bind(self, lowered: lowering.Instruction) -> Instruction:
        reads, targets = lowered.reads, lowered.targets
        match lowered:
            case lowering.LocalCall():
                return self._call(lowered)
            case lowering.UnbucketedReshard():
                return self._reshard(lowered)
            case lowering.Cast():
                return self._cast(lowered)
            case lowering.BeginBucket():
                shapes = [self._graph.values[value].shape for value, _, _ in lowered.bucket.uses]
                dtypes = self._element_types(lowered.bucket.uses[0][0])
                micro_batches = self._lowered.stage.micro_batches
                collectives = BucketSteps(lowered.bucket, self._mesh, shapes, micro_batches, dtypes)
                self._buckets[targets[0]] = collectives
                return Begin(reads=reads, targets=targets, steps=collectives)
            case lowering.EndBucket():
                first = lowered.bucket.reshardings[0]
                regather = lowered.bucket.regather or self._only_converts(first)
                collectives = self._buckets[reads[0]]
                if regather:
                    self._regathered.update(targets)
                return End(reads=reads, targets=targets, steps=collectives, regather=regather)

    def _element_types(self, value: str) -> ElementTypes | None:
        """The types to which a parameter and its gradient are converted; None if none."""
        read = self._graph.values[value].dtype
        reduced = self._graph.reduced_dtype(value)
        if self._graph.stored_dtype(value) is read is reduced:
            return None
        return ElementTypes(getattr(torch, read.value), getattr(torch, reduced.value))

    def _only_converts(self, resharding: Resharding) -> bool:
        """True if forward of a resharding only converts a parameter, which backward repeats."""
        moves = any(step.forward != Action.NOTHING for step in resharding.steps)
        return resharding.value in self._graph.converted and not moves

    def _reshard(self, lowered: lowering.UnbucketedReshard) -> Reshard:
        resharding, (slot,) = lowered.resharding, lowered.reads
        shape = self._graph.values[resharding.value].shape
        dtypes = self._element_types(resharding.value)
        regather = resharding.regather
        if dtypes is None:
            steps = bind_steps(lowered.steps, self._mesh, shape)
        else:
            steps = (bind_with_casts(lowered.steps, self._mesh, shape, dtypes),)
            if slot < len(self._lowered.stage.inputs) and lowered.checkpoint < 0:
                regather = regather or self._only_converts(resharding)
        if regather or slot in self._regathered:
            self._regathered.update(lowered.targets)
        return Reshard(
            reads=lowered.reads,
            targets=lowered.targets,
            use=resharding.use,
            steps=steps,
            regather=regather,
            reduces=dtypes is not None or Action(lowered.steps[0].backward).is_collective,
        )

    def _cast(self, lowered: lowering.Cast) -> Reshard:
        read: torch.dtype = getattr(torch, self._graph.values[lowered.value].dtype.value)
        self._regathered.update(lowered.targets)
        return Reshard(
            reads=lowered.reads,
            targets=lowered.targets,
            use=(lowered.value, None, 0),
            steps=(bind_with_casts((), self._mesh, (), ElementTypes(read, read)),),
            regather=True,
            reduces=True,
        )

    def _call(self, lowered: lowering.LocalCall) -> RunOperator:
        node, placed = self._graph.nodes[lowered.number], lowered.placed
        inputs = tuple(Layout.parse(text) for text in placed.inputs)
        outputs = tuple(Layout.parse(text) for text in placed.outputs)
        local = LocalNode(
            node=node,
            inputs=inputs,
            outputs=outputs,
            shapes=tuple(self._graph.values[value].shape for value in node.inputs),
            input_shapes=self._local_shapes(node.inputs, inputs),
            output_shapes=self._local_shapes(node.outputs, outputs),
            place=self._place,
            custom=self._custom,
            model=self._model,
        )
        spec = spec_for(node.operator)
        reads_regathered = not self._regathered.isdisjoint(lowered.reads)
        returns_views = spec.is_view or spec.strides is not None or spec.kernel is Kernel.MODULE
        if reads_regathered and returns_views:
            self._regathered.update(lowered.targets)
        # The number of rows of an expert depends on data.
        known: list[tuple[int | None, ...]] = [
            (None, None, *shape[2:]) if value in self._ragged else shape
            for value, shape in zip(node.outputs, local.output_shapes, strict=True)
        ]
        return RunOperator(
            node=node.name,
            reads=lowered.reads,
            targets=lowered.targets,
            writes=self._writes(local),
            shapes=tuple(known),
            kernel=bind_kernel(local),
            reads_regathered=reads_regathered,
        )

    def _writes(self, local: LocalNode) -> tuple[int, ...]:
        """Positions of the inputs that an operator changes in place.

        Raises:
            PlanError: the plan shards one, so that its gathered copy would be changed.
        """
        for placed in self._lowered.stage.inputs:
            is_written = placed.name in self._graph.running_statistics
            if is_written and any(t.is_shard for t in Layout.parse(placed.layout).types):
                raise PlanError(
                    f"buffer {placed.target!r} is sharded as {placed.layout}, and a batch norm "
                    f"updates it: every rank needs all of it; plan again without a pin of it"
                )
        return local.running_statistics()

    def _local_shapes(
        self, values: Sequence[str], layouts: Sequence[Layout]
    ) -> tuple[tuple[int, ...], ...]:
        """Shapes on this rank; its slice of an unevenly sharded dim may be smaller than others."""
        if len(values) != len(layouts):
            raise PlanError(f"there are {len(layouts)} layouts for the values {list(values)}")
        place, shapes = self._place, []
        for value, layout in zip(values, layouts, strict=True):
            try:
                shape = self._graph.values[value].shape
                shapes.append(local_shape(shape, layout, place.axis_sizes, place.coordinate))
            except LayoutError as error:
                raise PlanError(f"value {value!r}: {error}") from None
        return tuple(shapes)


def _may_call(operator: str, allowed: Collection[str]) -> bool:
    namespace, _, rest = operator.partition(".")
    packet = rest.partition(".")[0]
    return namespace in allowed or f"{namespace}::{packet}" in allowed


def _place(stage: Stage, mesh: DeviceMesh, seed: int) -> Place:
    names, sizes = zip(*stage.axes, strict=True) if stage.axes else ((), ())
    if mesh.mesh_dim_names != names or tuple(mesh.shape) != sizes:
        wanted = ", ".join(f"{name}={size}" for name, size in stage.axes)
        raise PlanError(
            f"the plan is for a mesh with the axes {wanted}; this one has the shape "
            f"{tuple(mesh.shape)} and the axis names {mesh.mesh_dim_names}: create it with "
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
        ranks=MeshRanks(mesh),
    )
