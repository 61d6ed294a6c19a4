"""Interpolation of a slice, whose places at the ends are made of the neighbours' too."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autoshard.ops.windows import interpolation_reach
from autoshard.runtime.local_node import LocalKernel, LocalNode
from autoshard.runtime.sharded_kernels.borders import Borders

_Tensors = tuple[torch.Tensor | None, ...]


def bind_interpolation(local: LocalNode) -> LocalKernel | None:
    """Linear and cubic interpolation; None where no neighbour is asked.

    Beyond the ends of the whole the last place is repeated, as kernels do.
    """
    node = local.node
    packet = node.operator.split(".")[1]
    factors = node.argument("scale_factors")
    if not isinstance(factors, tuple):
        return None
    scales = [float(factor) for factor in factors if isinstance(factor, (int, float))]
    reach = interpolation_reach(packet)
    edges = [(reach, reach) if scale != 1 else (0, 0) for scale in scales]
    borders = Borders.of(local, edges, [(1, int(scale)) for scale in scales], fill=None)
    if borders is None:
        return None
    interpolation = _Interpolation(borders, packet, tuple(scales), reach)

    def run(tensors: Sequence[torch.Tensor], _step: int) -> tuple[torch.Tensor, ...]:
        (image,) = tensors
        return (_Interpolated.apply(image, interpolation),)  # type: ignore[no-untyped-call]  # torch

    return run


@dataclass(frozen=True, slots=True)
class _Interpolation:
    """The interpolation of a slice.

    Attributes:
        borders: of the slice.
        packet: of ATen.
        scales: places made of each, by dim.
        reach: how many neighbours a place is made of, to either side.
    """

    borders: Borders
    packet: str
    scales: tuple[float, ...]
    reach: int

    def own(self, made: torch.Tensor) -> torch.Tensor:
        """What is made of the slice itself."""
        for border in self.borders.each:
            edge = self.reach * int(self.scales[border.dim])
            made = made.narrow(border.dim, edge, made.shape[border.dim] - 2 * edge)
        return made


class _Interpolated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: torch.Tensor, interpolation: _Interpolation) -> torch.Tensor:
        extended, _ = interpolation.borders.extend(image)
        operator = getattr(torch.ops.aten, interpolation.packet).vec
        made = operator(extended, None, False, list(interpolation.scales))
        ctx.interpolation, ctx.shape, ctx.made = interpolation, extended.shape, made.shape
        return interpolation.own(made).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> _Tensors:
        interpolation = ctx.interpolation
        whole = gradient.new_zeros(ctx.made)
        interpolation.own(whole).copy_(gradient)
        backward = getattr(torch.ops.aten, f"{interpolation.packet}_backward").default
        sizes = list(ctx.made[2:]), list(ctx.shape)
        to_image = backward(whole, *sizes, False, *interpolation.scales)
        return interpolation.borders.fold(to_image), None
