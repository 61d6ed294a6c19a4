"""Running the steps of a resharding on local tensors.

Every pair of types in `autoshard.layouts.STEPS` is a function of the `spmd_types` package with
exactly the table's forward and backward, so eager code here talks to no process group itself.
That package knows dims that are cut as one into equal slices. Interleaved sub-shards are
reordered around it; slices of unequal length are padded with zeros before it and trimmed after.

Under `torch.compile` the same actions run as functional collectives: `spmd_types` looks at
autograd nodes, which a tracer does not have. The compiler decides what overlaps with what.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from spmd_types import redistribute  # type: ignore[attr-defined]  # exported without __all__
from spmd_types import types as spmd
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import PlanError
from autoshard.layouts import STEPS, Action, AxisType, Kind, largest_shard, parse_type
from autoshard.plan import PlannedStep
from autoshard.runtime.shards import by_rank, by_sub_shard

LocalFunction = Callable[[torch.Tensor], torch.Tensor]

_WHOLE = {Kind.INVARIANT: spmd.I, Kind.REPLICATE: spmd.R, Kind.PARTIAL: spmd.P}
_OPS: Any = torch.ops._c10d_functional  # noqa: SLF001  as torch.distributed's functions call them


def bind_steps(
    steps: Sequence[PlannedStep], mesh: DeviceMesh, shape: Sequence[int]
) -> tuple[LocalFunction, ...]:
    """The functions that run a resharding's steps on a rank's tensor, in order.

    A function is differentiable where its argument requires a gradient. Steps on axes of
    one rank change nothing and are left out.

    Args:
        steps: as a plan lists them.
        mesh: has the process group of each axis by name.
        shape: global shape of the tensor.

    Raises:
        PlanError: a step is on an axis that the mesh does not have.
    """
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    for step in steps:
        if step.axis not in sizes:
            raise PlanError(f"a step is on the axis {step.axis!r}; the mesh has {list(sizes)}")
    return tuple(
        bind_step(
            parse_type(step.source), parse_type(step.target), mesh.get_group(step.axis), shape
        )
        for step in steps
        if sizes[step.axis] > 1
    )


def run_steps(steps: Sequence[LocalFunction], tensor: torch.Tensor) -> torch.Tensor:
    """Run the steps of a resharding one after the other."""
    for step in steps:
        tensor = step(tensor)
    return tensor


def bind_step(
    source: AxisType, target: AxisType, group: ProcessGroup, shape: Sequence[int]
) -> LocalFunction:
    """The function that runs one step.

    Args:
        source: type before.
        target: type after.
        group: the ranks of the axis.
        shape: global shape of the tensor.
    """
    uneven = [
        _Uneven(t.dim, shape[t.dim], group.size(), group.rank())
        for t in (source, target)
        if t.is_shard and shape[t.dim] % group.size()
    ]
    even = _bind_even(source, target, group)
    if not uneven:
        return even
    if source.is_replicated:
        (cut,) = uneven
        if source.kind is Kind.REPLICATE:
            return cut.own
        gather = _bind_even(target, source, group)
        return lambda tensor: _Slice.apply(tensor, cut, gather)  # type: ignore[no-untyped-call]  # torch

    def run(tensor: torch.Tensor) -> torch.Tensor:
        for cut in uneven:
            tensor = cut.padded(tensor)
        tensor = even(tensor)
        for cut in uneven:
            tensor = cut.trimmed(tensor, is_whole=cut.dim != target.dim)
        return tensor

    return run


@dataclass(frozen=True, slots=True)
class _Uneven:
    """A dim that an axis cuts into slices of unequal length.

    Attributes:
        dim: of the tensor.
        size: of the whole dim.
        num_ranks: of the axis.
        rank: this one.
    """

    dim: int
    size: int
    num_ranks: int
    rank: int

    @property
    def _share(self) -> int:
        return largest_shard(self.size, self.num_ranks)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rank's slice of a whole tensor; its gradient is written into zeros."""
        start = self.rank * self._share
        own = tensor.narrow(self.dim, start, min(self._share, self.size - start))
        # Not a view, which would keep the whole tensor alive.
        return own.clone(memory_format=torch.contiguous_format)

    def padded(self, tensor: torch.Tensor) -> torch.Tensor:
        """A slice, or the whole, as if the size were the next one that the axis divides."""
        length = tensor.shape[self.dim]
        wanted = self._share * (self.num_ranks if length == self.size else 1)
        missing = wanted - length
        if not missing:
            return tensor
        return torch.nn.functional.pad(tensor, (*(0, 0) * (tensor.ndim - 1 - self.dim), 0, missing))

    def trimmed(self, tensor: torch.Tensor, *, is_whole: bool) -> torch.Tensor:
        """A padded slice, or the padded whole, without its padding."""
        own = min(self._share, self.size - self.rank * self._share)
        return tensor.narrow(self.dim, 0, self.size if is_whole else own).contiguous()


class _Slice(torch.autograd.Function):
    """I -> S: a slice, and backward an all-gather of slices."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, cut: _Uneven, gather: LocalFunction
    ) -> torch.Tensor:
        ctx.cut, ctx.gather = cut, gather
        return cut.own(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        whole = ctx.gather(ctx.cut.padded(gradient))
        return ctx.cut.trimmed(whole, is_whole=True), None, None


def _bind_even(source: AxisType, target: AxisType, group: ProcessGroup) -> LocalFunction:
    before, after = _spmd_type(source), _spmd_type(target)
    num_ranks = group.size()
    traced = _TracedStep(source, target, group.group_name, num_ranks, group.rank())

    def run(tensor: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            compiled: torch.Tensor = _Traced.apply(tensor, traced)  # type: ignore[no-untyped-call]  # torch
            return compiled
        if target.sub_shards:
            tensor = by_rank(tensor, target, num_ranks)
        # Reductions of gradients run in the tensor's own dtype, as the plan counted them;
        # spmd_types has to be told so where the dtype is narrower than float32.
        resharded: torch.Tensor = redistribute(
            tensor.contiguous(),
            group,
            src=before,
            dst=after,
            backward_options={"op_dtype": tensor.dtype},
        )
        if resharded.requires_grad:
            # The all-reduce of a gradient takes contiguous memory only, and autograd
            # passes any layout, such as an expanded scalar.
            resharded.register_hook(made_contiguous)  # type: ignore[no-untyped-call]  # torch
        return by_sub_shard(resharded, source, num_ranks) if source.sub_shards else resharded

    return run


def made_contiguous(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A hook for tensors whose gradient must be contiguous; an unused tensor has none."""
    return None if gradient is None else gradient.contiguous()


def _spmd_type(axis_type: AxisType) -> object:
    return spmd.S(axis_type.dim) if axis_type.is_shard else _WHOLE[axis_type.kind]


@dataclass(frozen=True, slots=True)
class _TracedStep:
    """One step on the ranks of an axis, as `torch.compile` traces it.

    Attributes:
        source: type before.
        target: type after.
        group: name of the process group.
        num_ranks: of the axis.
        rank: this one.
    """

    source: AxisType
    target: AxisType
    group: str
    num_ranks: int
    rank: int

    def run(self, tensor: torch.Tensor, *, backward: bool) -> torch.Tensor:
        """Run the action of forward, or that of backward."""
        action = STEPS[self.source.kind, self.target.kind][backward]
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
            return _waited(_OPS.all_reduce(tensor.contiguous(), "sum", self.group))
        if action is Action.ALL_GATHER:
            rows = tensor.contiguous().unsqueeze(0)
            moved = _OPS.all_gather_into_tensor(rows, self.num_ranks, self.group)
            return self._join(_waited(moved), old)
        slices = self._split(tensor, new).contiguous()
        if action is Action.REDUCE_SCATTER:
            moved = _OPS.reduce_scatter_tensor(slices, "sum", self.num_ranks, self.group)
            return _waited(moved).squeeze(0)
        assert action is Action.ALL_TO_ALL, f"no step runs {action}"
        ones = [1] * self.num_ranks
        return self._join(_waited(_OPS.all_to_all_single(slices, ones, ones, self.group)), old)

    def _split(self, tensor: torch.Tensor, cut: AxisType) -> torch.Tensor:
        """The slices of all ranks, stacked along a new dim 0."""
        if cut.sub_shards:
            tensor = by_rank(tensor, cut, self.num_ranks)
        return torch.unflatten(tensor, cut.dim, (self.num_ranks, -1)).movedim(cut.dim, 0)

    def _join(self, slices: torch.Tensor, cut: AxisType) -> torch.Tensor:
        """The whole tensor, from the slices of all ranks."""
        whole = slices.movedim(0, cut.dim).flatten(cut.dim, cut.dim + 1).contiguous()
        return by_sub_shard(whole, cut, self.num_ranks) if cut.sub_shards else whole


class _Traced(torch.autograd.Function):
    """A traced step, and its backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, step: _TracedStep) -> torch.Tensor:
        ctx.step = step
        return step.run(tensor, backward=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.step.run(gradient, backward=True), None


def _waited(moved: Any) -> torch.Tensor:
    tensor: torch.Tensor = _OPS.wait_tensor(moved)
    return tensor
