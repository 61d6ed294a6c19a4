"""The steps of a resharding on local tensors.

For every pair of types in `autoshard.layouts.STEPS`, the `spmd_types` package has a function with
exactly that forward and backward, through which eager code runs collectives. It supports equal
slices of one dim. Interleaved sub-shards are reordered before and after; slices of unequal length
are padded with zeros before, and trimmed after.

Two kinds of steps run the same actions as functional collectives instead: all steps under
`torch.compile`, since `spmd_types` inspects autograd nodes, which do not exist during tracing, and
all-to-alls, since `spmd_types` exchanges lists of tensors, which gloo supports only in newer torch.
Under `torch.compile` the compiler decides about overlap.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from spmd_types import redistribute  # type: ignore[attr-defined]  # exported without __all__
from spmd_types import types as spmd
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from autoshard.layouts import STEPS, Action, AxisType, Kind, largest_shard, parse_type
from autoshard.plan import PlannedStep
from autoshard.runtime.process_groups import process_group
from autoshard.runtime.shards import from_rank_major, to_rank_major
from autoshard.torch_private import COLLECTIVES

# spmd_types 0.3 calls collectives by names that torch 2.13 deprecates; users cannot change that.
warnings.filterwarnings(
    "ignore", r"`torch\.distributed\._functional_collectives", FutureWarning, "spmd_types"
)

LocalFunction = Callable[[torch.Tensor], torch.Tensor]

_WHOLE = {Kind.INVARIANT: spmd.I, Kind.REPLICATE: spmd.R, Kind.PARTIAL: spmd.P}


def bind_steps(
    steps: Sequence[PlannedStep], mesh: DeviceMesh, shape: Sequence[int]
) -> tuple[LocalFunction, ...]:
    """The functions that run a resharding's steps on a rank's tensor, in order.

    The functions are differentiable. Steps on axes of size 1 are left out.

    Args:
        steps: the steps as a plan lists them.
        mesh: its mesh dim names are the axes of the steps.
        shape: global shape of the tensor.

    Raises:
        PlanError: a step is on an axis that the mesh does not have.
    """
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    return tuple(
        bind_step(
            parse_type(step.source),
            parse_type(step.target),
            process_group(mesh, step.axis),
            shape,
        )
        for step in steps
        if step.num_ranks(sizes) > 1
    )


def run_steps(steps: Sequence[LocalFunction], tensor: torch.Tensor) -> torch.Tensor:
    """Run the steps of a resharding one after the other."""
    for step in steps:
        tensor = step(tensor)
    return tensor


def bind_step(
    source: AxisType, target: AxisType, group: ProcessGroup, shape: Sequence[int]
) -> LocalFunction:
    """The function that runs one step; element types that collectives lack travel as others.

    Args:
        source: type of its axes before the step.
        target: type of its axes after it.
        group: process group of its axes.
        shape: global shape of the tensor.
    """
    run = _bind_plain(source, target, group, shape)

    def run_any(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():
            # The last dim is that of real and imaginary parts; dims are counted from the first.
            moved = run(torch.view_as_real(tensor.resolve_conj()))
            return torch.view_as_complex(moved.contiguous())
        if tensor.dtype is torch.bool:
            return run(tensor.view(torch.uint8)).view(torch.bool)
        return run(tensor)

    return run_any


def _bind_plain(
    source: AxisType, target: AxisType, group: ProcessGroup, shape: Sequence[int]
) -> LocalFunction:
    uneven = _uneven_dims(source, target, group, shape)
    even = _bind_even(source, target, group)
    if not uneven:
        return even
    if source.is_replicated:
        (dim,) = uneven
        if source.kind is Kind.REPLICATE:
            return dim.own_slice
        gather = _bind_even(target, source, group)
        return lambda tensor: _Slice.apply(tensor, dim, gather)  # type: ignore[no-untyped-call]  # torch

    def run(tensor: torch.Tensor) -> torch.Tensor:
        for dim in uneven:
            tensor = dim.padded(tensor, is_whole=dim.index != source.dim)
        tensor = even(tensor)
        for dim in uneven:
            tensor = dim.trimmed(tensor, is_whole=dim.index != target.dim)
        return tensor

    return run


@dataclass(frozen=True, slots=True)
class ElementTypes:
    """Element types of a tensor whose gradient is reduced in another one, or that is converted.

    Attributes:
        read: element type of the result of a resharding, and of its collectives in forward.
        reduced: element type of its collectives in backward.
    """

    read: torch.dtype
    reduced: torch.dtype


def bind_with_casts(
    steps: Sequence[PlannedStep], mesh: DeviceMesh, shape: Sequence[int], dtypes: ElementTypes
) -> LocalFunction:
    """The function that converts a tensor and runs steps on it; arguments as for `bind_steps`.

    The gradient is converted before the steps of backward, and to the tensor's element type after
    them. Autograd itself would convert it to that of the result between two steps.
    """
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    bound = []
    for step in steps:
        if step.num_ranks(sizes) > 1:
            source, target = parse_type(step.source), parse_type(step.target)
            group = process_group(mesh, step.axis)
            even = _FunctionalStep.of(source, target, group)
            bound.append(_UnevenStep(even, _uneven_dims(source, target, group, shape)))
    return _CastSteps(dtypes, tuple(bound))


@dataclass(frozen=True, slots=True)
class _UnevenStep:
    """The forward and the backward action of a step on slices that may be uneven.

    Attributes:
        even: the step on even slices.
        uneven: the unevenly sharded dims.
    """

    even: "_FunctionalStep"
    uneven: tuple["_UnevenDim", ...]

    def run(self, tensor: torch.Tensor, *, backward: bool) -> torch.Tensor:
        """Run one of the actions."""
        old, new = self.even.source, self.even.target
        if backward:
            old, new = new, old
        if self.uneven and self.even.source.is_replicated:
            # A slice of the whole tensor, which each rank takes of its own copy.
            if not backward:
                return self.uneven[0].own_slice(tensor)
            if new.kind is Kind.REPLICATE:
                return self.uneven[0].in_zeros(tensor)
        for dim in self.uneven:
            tensor = dim.padded(tensor, is_whole=dim.index != old.dim)
        tensor = self.even.run(tensor, backward=backward)
        for dim in self.uneven:
            tensor = dim.trimmed(tensor, is_whole=dim.index != new.dim)
        return tensor


@dataclass(frozen=True, slots=True)
class _CastSteps:
    """A cast, and the steps of a resharding after it.

    Attributes:
        dtypes: the element types.
        steps: the steps, in order.
    """

    dtypes: ElementTypes
    steps: tuple[_UnevenStep, ...]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Run them differentiably."""
        resharded: torch.Tensor = _Cast.apply(tensor, self)  # type: ignore[no-untyped-call]  # torch
        return resharded


class _Cast(torch.autograd.Function):
    """Converts a tensor and runs steps; its backward reduces in an element type of its own."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, steps: _CastSteps) -> torch.Tensor:
        ctx.steps, ctx.dtype = steps, tensor.dtype
        tensor = tensor.to(steps.dtypes.read)
        for step in steps.steps:
            tensor = step.run(tensor, backward=False)
        return tensor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        steps: _CastSteps = ctx.steps
        gradient = gradient.to(steps.dtypes.reduced)
        for step in reversed(steps.steps):
            gradient = step.run(gradient, backward=True)
        return gradient.to(ctx.dtype), None


@dataclass(frozen=True, slots=True)
class _UnevenDim:
    """A dim that is sharded into slices of unequal length; those of the last ranks may be empty.

    No layout has empty slices, but what a resharding passes through may, with other dynamic sizes.

    Attributes:
        index: index of the dim in the tensor.
        size: global size of the dim.
        num_ranks: number of ranks of the axis.
        rank: index of this rank on the axis.
    """

    index: int
    size: int
    num_ranks: int
    rank: int

    @property
    def _share(self) -> int:
        return largest_shard(self.size, self.num_ranks)

    @property
    def _start(self) -> int:
        return min(self.rank * self._share, self.size)

    @property
    def _own(self) -> int:
        return min(self._share, self.size - self._start)

    def own_slice(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the rank's slice of a whole tensor; backward pads the gradient with zeros."""
        view = tensor.narrow(self.index, self._start, self._own)
        # A view would keep the whole tensor alive.
        return view.clone(memory_format=torch.contiguous_format)

    def in_zeros(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole tensor with the rank's slice, and zeros elsewhere."""
        shape = list(tensor.shape)
        shape[self.index] = self.size
        whole = tensor.new_zeros(shape)
        whole.narrow(self.index, self._start, self._own).copy_(tensor)
        return whole

    def padded(self, tensor: torch.Tensor, *, is_whole: bool) -> torch.Tensor:
        """Pad a slice or the whole tensor to the next size that the number of ranks divides."""
        missing = self._share * (self.num_ranks if is_whole else 1) - tensor.shape[self.index]
        if not missing:
            return tensor
        later_dims = (0, 0) * (tensor.ndim - 1 - self.index)
        return torch.nn.functional.pad(tensor, (*later_dims, 0, missing))

    def trimmed(self, tensor: torch.Tensor, *, is_whole: bool) -> torch.Tensor:
        """Remove the padding of a slice, or of the whole tensor."""
        return tensor.narrow(self.index, 0, self.size if is_whole else self._own).contiguous()


def _uneven_dims(
    source: AxisType, target: AxisType, group: ProcessGroup, shape: Sequence[int]
) -> tuple[_UnevenDim, ...]:
    """The dims of a tensor that a step shards into slices of unequal length, before or after it."""
    return tuple(
        _UnevenDim(t.dim, shape[t.dim], group.size(), group.rank())
        for t in (source, target)
        if t.is_shard and shape[t.dim] % group.size()
    )


class _Slice(torch.autograd.Function):
    """I -> S: a slice in forward, an all-gather of the slices in backward."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, dim: _UnevenDim, gather: LocalFunction
    ) -> torch.Tensor:
        ctx.dim, ctx.gather = dim, gather
        return dim.own_slice(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        whole = ctx.gather(ctx.dim.padded(gradient, is_whole=False))
        return ctx.dim.trimmed(whole, is_whole=True), None, None


def _bind_even(source: AxisType, target: AxisType, group: ProcessGroup) -> LocalFunction:
    before, after = _spmd_type(source), _spmd_type(target)
    num_ranks = group.size()
    functional = _FunctionalStep.of(source, target, group)
    if source.is_shard and target.is_shard:
        return functional

    def run(tensor: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return functional(tensor)
        if target.sub_shards:
            tensor = to_rank_major(tensor, target, num_ranks)
        # Gradients are reduced in the tensor's dtype, as the plan counts them; by default
        # spmd_types would use float32 for narrower dtypes.
        resharded: torch.Tensor = redistribute(
            tensor.contiguous(),
            group,
            src=before,
            dst=after,
            backward_options={"op_dtype": tensor.dtype},
        )
        if resharded.requires_grad:
            # The all-reduce of a gradient needs contiguous memory, but autograd passes any
            # strides, such as those of an expanded scalar.
            resharded.register_hook(made_contiguous)  # type: ignore[no-untyped-call]  # torch
        return from_rank_major(resharded, source, num_ranks) if source.sub_shards else resharded

    return run


def made_contiguous(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """Gradient hook that returns a contiguous gradient; None for an unused tensor."""
    return None if gradient is None else gradient.contiguous()


def _spmd_type(axis_type: AxisType) -> object:
    return spmd.S(axis_type.dim) if axis_type.is_shard else _WHOLE[axis_type.kind]


@dataclass(frozen=True, slots=True)
class _FunctionalStep:
    """One step on an axis, run with functional collectives.

    Attributes:
        source: type of the axis before the step.
        target: type of the axis after it.
        group: name of the process group.
        num_ranks: number of ranks of the axis.
        rank: index of this rank on the axis.
        actions: of forward and of backward; not looked up in each run, since `torch.compile` of
            PyTorch 2.12 does not trace that.
    """

    source: AxisType
    target: AxisType
    group: str
    num_ranks: int
    rank: int
    actions: tuple[Action, Action]

    @classmethod
    def of(cls, source: AxisType, target: AxisType, group: ProcessGroup) -> Self:
        """The step between two types on the axis of a process group."""
        actions = STEPS[source.kind, target.kind]
        return cls(source, target, group.group_name, group.size(), group.rank(), actions)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Run the step differentiably."""
        resharded: torch.Tensor = _Functional.apply(tensor, self)  # type: ignore[no-untyped-call]  # torch
        return resharded

    def run(self, tensor: torch.Tensor, *, backward: bool) -> torch.Tensor:
        """Run the forward or the backward action of the step."""
        action = self.actions[backward]
        old, new = (self.target, self.source) if backward else (self.source, self.target)
        if action is Action.SLICE:
            return self._split(tensor, new)[self.rank].contiguous()
        if action is Action.PAD:
            slices = tensor.new_zeros((self.num_ranks, *tensor.shape))
            slices[self.rank] = tensor
            return self._join(slices, old)
        if action is Action.MASK:
            return tensor.clone() if self.rank == 0 else torch.zeros_like(tensor)
        if action is Action.NOTHING:
            return tensor.view_as(tensor)
        return self._communicate(action, tensor, old, new)

    def _communicate(
        self, action: Action, tensor: torch.Tensor, old: AxisType, new: AxisType
    ) -> torch.Tensor:
        if action is Action.ALL_REDUCE:
            return _waited(COLLECTIVES.all_reduce(tensor.contiguous(), "sum", self.group))
        if action is Action.ALL_GATHER:
            rows = tensor.contiguous().unsqueeze(0)
            moved = COLLECTIVES.all_gather_into_tensor(rows, self.num_ranks, self.group)
            return self._join(_waited(moved), old)
        slices = self._split(tensor, new).contiguous()
        if action is Action.REDUCE_SCATTER:
            moved = COLLECTIVES.reduce_scatter_tensor(slices, "sum", self.num_ranks, self.group)
            return _waited(moved).squeeze(0)
        assert action is Action.ALL_TO_ALL, f"no step runs {action}"
        ones = [1] * self.num_ranks
        sent = COLLECTIVES.all_to_all_single(slices, ones, ones, self.group)
        return self._join(_waited(sent), old)

    def _split(self, tensor: torch.Tensor, shard: AxisType) -> torch.Tensor:
        """Stack the slices of all ranks along a new dim 0."""
        if shard.sub_shards:
            tensor = to_rank_major(tensor, shard, self.num_ranks)
        return torch.unflatten(tensor, shard.dim, (self.num_ranks, -1)).movedim(shard.dim, 0)

    def _join(self, slices: torch.Tensor, shard: AxisType) -> torch.Tensor:
        """Join the slices of all ranks, stacked along dim 0, to the whole tensor."""
        whole = slices.movedim(0, shard.dim).flatten(shard.dim, shard.dim + 1).contiguous()
        return from_rank_major(whole, shard, self.num_ranks) if shard.sub_shards else whole


class _Functional(torch.autograd.Function):
    """Runs a functional step, and its backward action in backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, step: _FunctionalStep) -> torch.Tensor:
        ctx.step = step
        return step.run(tensor, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.step.run(gradient, backward=True), None


def _waited(moved: Any) -> torch.Tensor:
    tensor: torch.Tensor = COLLECTIVES.wait_tensor(moved)
    return tensor
