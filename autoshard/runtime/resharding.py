"""Running the steps of a resharding on local tensors.

Every pair of types in `autoshard.layouts.STEPS` is a function of the `spmd_types` package
with exactly the table's forward and backward, so nothing here talks to a process group
itself. It knows dims that are cut as one, into equal slices. Where chunks of a dim are cut one
by one, the slices are put in the other order around it; where slices differ in length, they are
filled up with zeros before it, and trimmed behind it.
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
from autoshard.layouts import AxisType, Kind, largest_share, parse_type
from autoshard.plan import PlannedStep
from autoshard.runtime.shards import by_chunk, by_rank
from autoshard.runtime.traced import TracedStep

LocalFunction = Callable[[torch.Tensor], torch.Tensor]

_WHOLE = {Kind.INVARIANT: spmd.I, Kind.REPLICATE: spmd.R, Kind.PARTIAL: spmd.P}


def bind_steps(
    steps: Sequence[PlannedStep], mesh: DeviceMesh, shape: Sequence[int]
) -> tuple[LocalFunction, ...]:
    """The functions that run a resharding's steps on a rank's tensor, in order.

    A function is differentiable where its argument requires a gradient. Steps on axes of
    one rank change nothing and are left out.

    Args:
        steps: as a plan lists them.
        mesh: carries the process group of each axis by name.
        shape: global shape of what is resharded.

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


def bind_step(
    source: AxisType, target: AxisType, group: ProcessGroup, shape: Sequence[int]
) -> LocalFunction:
    """The function that runs one step.

    Args:
        source: type before.
        target: type after.
        group: the ranks of the axis.
        shape: global shape of what is resharded.
    """
    ends = [
        _Uneven(t.dim, shape[t.dim], group.size(), group.rank())
        for t in (source, target)
        if t.is_shard and shape[t.dim] % group.size()
    ]
    plain = _bind_even(source, target, group)
    if not ends:
        return plain
    if source.is_whole:
        (cut,) = ends
        if source.kind is Kind.REPLICATE:
            return cut.own
        gather = _bind_even(target, source, group)
        return lambda tensor: _Slice.apply(tensor, cut, gather)  # type: ignore[no-untyped-call]  # torch

    def run(tensor: torch.Tensor) -> torch.Tensor:
        for cut in ends:
            tensor = cut.filled(tensor)
        tensor = plain(tensor)
        for cut in ends:
            tensor = cut.trimmed(tensor, is_whole=cut.dim != target.dim)
        return tensor

    return run


@dataclass(frozen=True, slots=True)
class _Uneven:
    """A dim that an axis cuts into slices of unequal length.

    Attributes:
        dim: which one.
        size: of the whole.
        num_ranks: of the axis.
        rank: this one.
    """

    dim: int
    size: int
    num_ranks: int
    rank: int

    @property
    def _share(self) -> int:
        return largest_share(self.size, self.num_ranks)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rank's slice of a whole tensor; its gradient is written into zeros."""
        start = self.rank * self._share
        own = tensor.narrow(self.dim, start, min(self._share, self.size - start))
        # Not a view, which would keep the whole tensor alive.
        return own.clone(memory_format=torch.contiguous_format)

    def filled(self, tensor: torch.Tensor) -> torch.Tensor:
        """A slice, or the whole, as if the size were the next one that the axis divides."""
        length = tensor.shape[self.dim]
        wanted = self._share * (self.num_ranks if length == self.size else 1)
        missing = wanted - length
        if not missing:
            return tensor
        return torch.nn.functional.pad(tensor, (*(0, 0) * (tensor.ndim - 1 - self.dim), 0, missing))

    def trimmed(self, tensor: torch.Tensor, *, is_whole: bool) -> torch.Tensor:
        """What is left of a filled slice, or of the filled whole."""
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
        whole = ctx.gather(ctx.cut.filled(gradient))
        return ctx.cut.trimmed(whole, is_whole=True), None, None


def _bind_even(source: AxisType, target: AxisType, group: ProcessGroup) -> LocalFunction:
    before, after = _spmd_type(source), _spmd_type(target)
    num_ranks = group.size()
    traced = TracedStep(source, target, group.group_name, num_ranks, group.rank())

    def run(tensor: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return traced(tensor)
        if target.chunks:
            tensor = by_rank(tensor, target, num_ranks)
        # Reductions of gradients run in the tensor's own dtype, as the plan counted them;
        # spmd_types wants to hear that where the dtype is narrower than float32.
        resharded: torch.Tensor = redistribute(
            tensor.contiguous(),
            group,
            src=before,
            dst=after,
            backward_options={"op_dtype": tensor.dtype},
        )
        if resharded.requires_grad:
            # The all-reduce of a gradient takes contiguous memory only, and autograd
            # hands over whatever it has, such as an expanded scalar.
            resharded.register_hook(made_contiguous)  # type: ignore[no-untyped-call]  # torch
        return by_chunk(resharded, source, num_ranks) if source.chunks else resharded

    return run


def made_contiguous(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A hook for tensors whose gradient must be contiguous; one that is not reached has none."""
    return None if gradient is None else gradient.contiguous()


def _spmd_type(axis_type: AxisType) -> object:
    return spmd.S(axis_type.dim) if axis_type.is_shard else _WHOLE[axis_type.kind]
