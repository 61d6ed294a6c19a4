"""Sliding windows of convolutions and pooling.

Window o of the small image (the output, or the input of a transposed convolution) covers the
positions `o * stride - padding` to `o * stride - padding + extent - 1` of the large image. If
both images are sharded into n parts, a rank lacks `padding` positions before its shard of the
large image, and `extent - stride - padding` after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from autoshard.graph import Argument

RANKS = (1, 2, 3)
"""Numbers of spatial dims."""

INTERPOLATIONS = ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
"""Interpolating upsampling operators, without the `upsample_` of their names."""


class HasArguments(Protocol):
    """The arguments of a call: a `Call` or a `Node`."""

    def argument(self, name: str, default: Argument = None) -> Argument:
        """Return the argument with a schema name, or `default` if it is absent."""
        ...


@dataclass(frozen=True, slots=True)
class Window:
    """The windows along one dim.

    Attributes:
        stride: positions from one window to the next.
        dilation: positions from one element of the kernel to the next.
        extent: positions from the first to the last element of the kernel.
        padding: positions before the image that windows may cover.
        trailing: positions after the image that windows may cover.
    """

    stride: int
    dilation: int
    extent: int
    padding: int
    trailing: int

    @property
    def behind(self) -> int:
        """Positions that the last window of a shard covers after it; negative if none."""
        return self.extent - self.stride - self.padding

    @property
    def is_apart(self) -> bool:
        """True if windows neither overlap nor extend beyond the image."""
        return self.extent <= self.stride and not self.padding

    def gathered(self) -> tuple[int, int]:
        """Halo before and after a shard of the large image, to compute the small one."""
        return self.padding, max(self.behind, 0)

    def scattered(self) -> tuple[int, int]:
        """Halo before and after a shard of the small image, to compute the large one."""
        before = (self.extent - 1 - self.padding) // self.stride
        return max(before, 0), -(-self.padding // self.stride)


def convolution_windows(call: HasArguments, kernel: Sequence[int]) -> tuple[Window, ...]:
    """The windows of a convolution with a kernel of this shape."""
    ones = (1,) * len(kernel)
    strides = per_dim(call, "stride", ones)
    dilations = per_dim(call, "dilation", ones)
    extents = [1 + d * (k - 1) for k, d in zip(kernel, dilations, strict=True)]
    if call.argument("padding") == "same":
        before = tuple((extent - 1) // 2 for extent in extents)
        behind = tuple(extent // 2 for extent in extents)
    else:
        before = behind = per_dim(call, "padding", (0,) * len(kernel))
    return tuple(
        Window(*each) for each in zip(strides, dilations, extents, before, behind, strict=True)
    )


def pooling_windows(call: HasArguments, rank: int) -> tuple[Window, ...]:
    """The windows of a pooling over `rank` dims."""
    kernel = per_dim(call, "kernel_size", (1,) * rank)
    strides = per_dim(call, "stride", kernel)
    dilations = per_dim(call, "dilation", (1,) * rank)
    paddings = per_dim(call, "padding", (0,) * rank)
    extents = [1 + d * (k - 1) for k, d in zip(kernel, dilations, strict=True)]
    return tuple(
        Window(*each) for each in zip(strides, dilations, extents, paddings, paddings, strict=True)
    )


def interpolation_reach(packet: str) -> int:
    """Number of neighbours per side that an interpolated position depends on.

    Args:
        packet: name of the operator, as in `upsample_bicubic2d`.
    """
    return 2 if "cubic" in packet else 1


def per_dim(call: HasArguments, name: str, default: Sequence[int]) -> tuple[int, ...]:
    """An argument that is one number per spatial dim, or one for all of them."""
    value = call.argument(name)
    items = value if isinstance(value, tuple) else () if value is None else (value,)
    given = tuple(item for item in items if isinstance(item, int))
    return given * len(default) if len(given) == 1 else given or tuple(default)
