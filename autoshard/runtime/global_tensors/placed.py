"""A rank's part of a global tensor, and its exact, differentiable resharding to other layouts."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from autoshard.errors import LayoutError
from autoshard.layouts import AxisType, I, Layout, P, R, from_placements, to_placements
from autoshard.runtime.resharding import bind_step

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """This rank's part of a global tensor.

    A plain tensor is the same on all ranks: its layout is `I` on every axis, and its gradient is
    the one that autograd computes on one device.

    Attributes:
        local: the part.
        layout: its layout; partial only until `reduced`.
        shape: global shape.
        mesh: the devices.
    """

    local: torch.Tensor
    layout: Layout
    shape: Shape
    mesh: DeviceMesh

    @classmethod
    def of(cls, tensor: DTensor) -> "Placed":
        """The part of a DTensor; gradients flow back into it.

        Sums over ranks are reduced. Placements that no layout has (another reduction than a sum, a
        rank without any row) are replicated first, by DTensor itself.
        """
        mesh, shape = tensor.device_mesh, tuple(tensor.shape)
        layout = _layout(tuple(tensor.placements), shape, tuple(mesh.shape))
        if layout is None:
            layout = Layout((I,) * mesh.ndim)
            tensor = DTensor.redistribute(tensor, placements=[Replicate()] * mesh.ndim)
        local: torch.Tensor = DTensor.to_local(tensor)
        return cls(local, layout, shape, mesh).reduced()

    @classmethod
    def plain(cls, tensor: torch.Tensor, mesh: DeviceMesh) -> "Placed":
        """A tensor that is whole, and the same on all ranks."""
        return cls(tensor, Layout((I,) * mesh.ndim), tuple(tensor.shape), mesh)

    @property
    def is_sharded(self) -> bool:
        """True if an axis shards the tensor."""
        return any(t.is_shard for t in self.layout.types)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The layout as DTensor writes it."""
        return to_placements(self.layout, tuple(self.mesh.shape))

    def resharded(self, layout: Layout) -> "Placed":
        """The tensor in another layout; backward runs the opposite collectives."""
        local = self.local
        for step in _steps(self.layout, layout):
            if self.mesh.size(step[0]) > 1:
                local = _moved(local, step, self.mesh, self.shape)
        return Placed(local, layout, self.shape, self.mesh)

    def reduced(self) -> "Placed":
        """The tensor with its sums over ranks computed."""
        types = tuple(I if t == P else t for t in self.layout.types)
        return self.resharded(Layout(types, self.layout.nesting))

    def full(self) -> torch.Tensor:
        """The whole tensor on every rank; contiguous unless it was whole before."""
        whole = self.resharded(Layout((I,) * self.mesh.ndim)).local
        return whole.contiguous() if self.is_sharded else whole

    def moved_bytes(self, layout: Layout | None = None) -> int:
        """Bytes that a rank receives in a resharding to a layout; to the full tensor if None."""
        layout = layout or Layout((I,) * self.mesh.ndim)
        total, own = 0, self.local.nbytes
        for axis, source, target in _steps(self.layout, layout):
            size = self.mesh.size(axis)
            if source.is_shard and target.is_replicated:
                total, own = total + own * (size - 1), own * size
            elif target.is_shard:
                own //= size
        return total


def _moved(
    local: torch.Tensor, step: tuple[int, AxisType, AxisType], mesh: DeviceMesh, shape: Shape
) -> torch.Tensor:
    """The result of one step."""
    axis, source, target = step
    return bind_step(source, target, mesh.get_group(axis), shape)(local)


@lru_cache(maxsize=1 << 12)
def _layout(
    placements: tuple[Placement, ...], shape: Shape, axis_sizes: tuple[int, ...]
) -> Layout | None:
    """The layout of a DTensor; None if no layout has its placements for this shape."""
    try:
        layout = from_placements(placements, axis_sizes)
    except LayoutError:
        return None
    return layout if layout.is_legal(shape, axis_sizes) else None


@lru_cache(maxsize=1 << 12)
def _steps(source: Layout, target: Layout) -> tuple[tuple[int, AxisType, AxisType], ...]:
    """The steps between two layouts, each on one axis: reductions, gathers, then slices.

    Only the innermost axis of a dim can be gathered, and only a new innermost one can shard it, so
    the axes that two layouts have in common from the outermost on stay.
    """
    dims = sorted({t.dim for t in (*source.types, *target.types) if t.is_shard})
    kept = {axis for dim in dims for axis in _common_axes(source, target, dim)}
    removed = [axis for dim in dims for axis in reversed(source.sharding_axes(dim))]
    added = [axis for dim in dims for axis in target.sharding_axes(dim)]
    partial = [axis for axis, t in enumerate(source.types) if t == P]
    moves = [
        *((axis, R if target.types[axis] == R else I) for axis in (*partial, *removed)),
        *((axis, t) for axis, t in enumerate(target.types) if t.is_replicated),
        *((axis, target.types[axis]) for axis in added),
    ]
    current, steps = list(source.types), []
    for axis, new in moves:
        if axis not in kept and current[axis] != new:
            steps.append((axis, current[axis], new))
            current[axis] = new
    return tuple(steps)


def _common_axes(source: Layout, target: Layout, dim: int) -> list[int]:
    """The axes that shard a dim alike in two layouts, from the outermost to the first other one."""
    pairs = zip(source.sharding_axes(dim), target.sharding_axes(dim), strict=False)
    alike = takewhile(lambda pair: pair[0] == pair[1], pairs)
    return [axis for axis, _ in alike if source.types[axis] == target.types[axis]]
