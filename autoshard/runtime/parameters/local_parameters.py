"""This rank's shards of the parameters that a program reads, with one autograd node per group.

A parameter at rest is a DTensor, and operators take its local tensor. `DTensor.to_local` is an
autograd node for each parameter and derives placements of the gradient in every step. Here
parameters that are read one after the other share a node, and a gradient is placed like its
parameter. Like a bucket of DistributedDataParallel, a node runs in backward when the gradients of
all its parameters are complete, so the bytes of a group are limited.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node, increment_version
from torch.distributed.tensor import DTensor

from autoshard.errors import PlanError
from autoshard.layouts import Layout
from autoshard.lowering.buckets import LARGEST
from autoshard.plan import PlacedInput
from autoshard.runtime.checks.call_checks import ParameterCheck
from autoshard.runtime.parameters.parameters import ModuleAttribute
from autoshard.runtime.program.accumulation import (
    GradientAccumulation,
    Owner,
    PendingGradient,
    Reduce,
    active_accumulation,
)
from autoshard.runtime.program.instructions import Instruction, Recompute, Reshard, RunOperator
from autoshard.runtime.program.local_program import LocalProgram
from autoshard.runtime.shards import local_shape
from autoshard.torch_private import (
    accumulates,
    dtensor_of,
    has_gradient_hooks,
    spec_of,
    stored_shard,
)


class LocalParameters:
    """Access to this rank's shards of the parameters of a program.

    Args:
        attributes: the parameters, by slot.
        groups: slots of the parameters that share an autograd node.
        check: of the parameters before each call.
        ties: attributes that are one parameter, by name.
    """

    def __init__(
        self,
        attributes: Mapping[int, ModuleAttribute],
        groups: Sequence[Sequence[int]],
        check: ParameterCheck,
        ties: Sequence[Mapping[str, ModuleAttribute]] = (),
    ) -> None:
        self._check = check
        self._ties = ties
        self._groups = [(slots, [attributes[slot] for slot in slots]) for slots in groups]

    def fill(self, registers: list[Any], copied: frozenset[int]) -> None:
        """Put the current shards into their slots; gradients are accumulated in the parameters.

        Args:
            registers: of a run.
            copied: slots whose gradients are copied, from `gradients_to_copy`.

        Raises:
            PlanError: a parameter was replaced by a plain tensor, is not as planned, or no longer
                tied to another one.
        """
        groups = [
            (slots, [_current(attribute) for attribute in attributes])
            for slots, attributes in self._groups
        ]
        self._check_all(groups)
        for slots, parameters in groups:
            for slot, local in zip(slots, _local(parameters, slots, copied), strict=True):
                registers[slot] = local

    def _check_all(self, groups: Sequence[tuple[Sequence[int], Sequence[DTensor]]]) -> None:
        for tied in self._ties:
            first, *others = (attribute.get() for attribute in tied.values())
            if any(other is not first for other in others):
                raise PlanError(
                    f"the parameters {', '.join(tied)} were tied when the plan was applied, and "
                    f"are not any more: assign one parameter to all of them, or untie them before "
                    f"the export and plan again"
                )
        for slots, parameters in groups:
            self._check.check(slots, parameters)
        accumulation = active_accumulation()
        if accumulation is not None:
            accumulation.note_parameters(id(self), [p for _, group in groups for p in group])


def _current(attribute: ModuleAttribute) -> DTensor:
    parameter = attribute.get()
    if not isinstance(parameter, DTensor):
        raise PlanError(
            f"parameter {attribute.name!r} of {type(attribute.module).__name__} was replaced by a "
            f"plain tensor after the plan was applied; load weights into the DTensor instead"
        )
    return parameter


def _local(
    parameters: Sequence[DTensor], slots: Sequence[int], copied: frozenset[int]
) -> Sequence[torch.Tensor]:
    # Frozen ones are not inputs of the node; to_local would make a view.
    local = [stored_shard(parameter) for parameter in parameters]
    if not torch.is_grad_enabled():
        return local
    trained = [i for i, parameter in enumerate(parameters) if parameter.requires_grad]
    if trained:
        copies = [slots[i] in copied for i in trained]
        sums = _Sums.of()
        shards = _Shards.apply(copies, sums, *[parameters[i] for i in trained])  # type: ignore[no-untyped-call]  # torch
        for i, shard in zip(trained, shards, strict=True):
            local[i] = shard
    return local


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums of gradients over micro-batches in an element type of their own.

    Attributes:
        accumulation: of the model.
        waits: True if the micro-batch is not the last one of the step.
    """

    accumulation: GradientAccumulation
    waits: bool

    @classmethod
    def of(cls) -> "_Sums | None":
        """Those of the model whose forward runs; None if `grad` has the type of the sum."""
        accumulation = active_accumulation()
        if accumulation is None or accumulation.dtype is None:
            return None
        return cls(accumulation, accumulation.waits)

    def add(
        self, owners: Sequence[Owner], gradients: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """The gradients of the step; None for each parameter if a later micro-batch adds more."""
        summed = self.accumulation.summed(owners, gradients, _reduced, waits=self.waits)
        return [None] * len(gradients) if summed is None else summed


def _reduced(_number: int) -> tuple[Hashable, Reduce]:
    """A key, and what reduces a sum of shards that are reduced."""
    return "shard", lambda shard: shard


class _Shards(torch.autograd.Function):
    """Shards of parameters; their gradients are DTensors placed like the parameters."""

    @staticmethod
    def forward(
        ctx: Any, copies: Sequence[bool], sums: _Sums | None, *parameters: DTensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.copies, ctx.sums, ctx.parameters = copies, sums, parameters
        # A parameter that the loss does not depend on has no gradient.
        ctx.set_materialize_grads(False)
        # The stored shard itself must not become part of the graph.
        return tuple([stored_shard(parameter).detach() for parameter in parameters])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[DTensor | None, ...]:
        accumulators = [node for node, _ in ctx.next_functions]
        found: list[DTensor | None] = [None, None]
        if ctx.sums is not None:
            owners = [Owner(*pair) for pair in zip(ctx.parameters, accumulators, strict=True)]
            gradients = ctx.sums.add(owners, gradients)
        for parameter, gradient, copies, accumulator in zip(
            ctx.parameters, gradients, ctx.copies, accumulators, strict=True
        ):
            if gradient is None:
                found.append(None)
                continue
            # A DTensor reports contiguous strides whatever the local ones are, and fused
            # optimizers rely on that.
            own = gradient.contiguous()
            if copies and own is gradient:
                own = gradient.clone()
            found.append(_accumulated(parameter, own, accumulator))
        return tuple(found)


def _accumulated(parameter: DTensor, gradient: torch.Tensor, accumulator: Node) -> DTensor | None:
    """Add a gradient to `parameter.grad`; where only autograd can do that, return it instead.

    Autograd's own accumulation would call DTensor's dispatcher. It is needed for hooks of the
    parameter, for `torch.autograd.grad`, and for second derivatives.
    """
    if (
        gradient.requires_grad
        or not parameter.is_leaf
        or has_gradient_hooks(parameter)
        or not accumulates(accumulator)
    ):
        return dtensor_of(gradient, spec_of(parameter))
    before = parameter.grad
    if isinstance(before, PendingGradient):
        before.add_reduced(gradient)
    elif before is None:
        parameter.grad = dtensor_of(gradient, spec_of(parameter))
    elif isinstance(before, DTensor) and before.placements == parameter.placements:
        stored_shard(before).add_(gradient)
        increment_version(before)
    else:
        return dtensor_of(gradient, spec_of(parameter))
    return None


def parameter_groups(
    program: LocalProgram, inputs: Sequence[PlacedInput]
) -> Iterator[tuple[int, ...]]:
    """Slots of the parameters that share an autograd node: neighbours in the order of reading.

    Args:
        program: reads the parameters.
        inputs: of its stage.
    """
    order = dict.fromkeys(slot for one in _flat(program.instructions) for slot in one.reads)
    group: list[int] = []
    total = 0
    for slot in dict.fromkeys((*order, *range(len(inputs)))):
        if slot >= len(inputs) or inputs[slot].kind != "parameter":
            continue
        placed = inputs[slot]
        dtype: torch.dtype = getattr(torch, placed.dtype)
        nbytes = prod(placed.local_shape) * dtype.itemsize
        if group and total + nbytes > LARGEST:
            yield tuple(group)
            group, total = [], 0
        group.append(slot)
        total += nbytes
    if group:
        yield tuple(group)


def gradients_to_copy(program: LocalProgram, inputs: Sequence[PlacedInput]) -> frozenset[int]:
    """Slots of the parameters whose gradients may be the gradients of other tensors as well.

    The gradient of both summands of `a + b` is one tensor, which must not become the `grad` of
    two parameters. An operator passes a gradient on, or a view of it, only if its output has as
    many elements as its input.

    Args:
        program: reads the parameters.
        inputs: of its stage.
    """
    place = program.place
    own = {
        slot: local_shape(x.shape, Layout.parse(x.layout), place.axis_sizes, place.coordinate)
        for slot, x in enumerate(inputs)
        if x.kind == "parameter"
    }
    found = set(program.kept)
    for instruction in _flat(program.instructions):
        # What a collective returns is new.
        if isinstance(instruction, Reshard) and not instruction.reduces:
            found.update(instruction.reads)
        elif isinstance(instruction, RunOperator):
            node = program.graph.nodes[program.graph.numbers[instruction.node]]
            factors = _FACTORS.get(node.operator, ())
            made = {_num_elements(shape) for shape in instruction.shapes}
            found.update(
                slot
                for position, slot in enumerate(instruction.reads)
                if slot in own and position not in factors and made & {None, prod(own[slot])}
            )
    return frozenset(found & own.keys())


_FACTORS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(
        ("aten.linear.default", "aten.mm.default", "aten.bmm.default", "aten.matmul.default"),
        (0, 1),
    ),
    **dict.fromkeys(("aten.addmm.default", "aten.baddbmm.default"), (1, 2)),
    "aten.mul.Tensor": (0, 1),
}
"""Positions of the factors of a product, whose gradients are products too and therefore new."""


def _num_elements(shape: Sequence[int | None]) -> int | None:
    """The product of the sizes; None if one depends on data."""
    sizes = [size for size in shape if size is not None]
    return prod(sizes) if len(sizes) == len(shape) else None


def _flat(instructions: Sequence[Instruction]) -> Iterator[Instruction]:
    for instruction in instructions:
        if isinstance(instruction, Recompute):
            yield from _flat(instruction.instructions)
        else:
            yield instruction
