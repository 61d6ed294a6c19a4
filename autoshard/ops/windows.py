"""How the windows of convolutions and pooling lie over an image.

A dim has a window for each of its `few` places, over `many` places: place o of the few belongs
to the places `o * stride - padding` up to `o * stride - padding + extent - 1` of the many, where
these exist. A rank with every n-th part of both has all that its windows cover, but for
`padding` places before its own and `extent - stride - padding` behind them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from autoshard.graph import Argument

RANKS = (1, 2, 3)
"""Dims that windows may have."""

INTERPOLATIONS = ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
"""Operators that make places of their neighbours."""


class Arguments(Protocol):
    """What has the arguments of a call."""

    def argument(self, name: str, default: Argument = None) -> Argument:
        """The argument of that schema name, or the default where it was left out."""
        ...


@dataclass(frozen=True, slots=True)
class Window:
    """The windows along one dim.

    Attributes:
        stride: from one to the next.
        dilation: from one element of the kernel to the next.
        extent: places from the first to the last element of the kernel.
        padding: places before the first that windows may begin at.
        trailing: places behind the last that windows may end at.
    """

    stride: int
    dilation: int
    extent: int
    padding: int
    trailing: int

    @property
    def behind(self) -> int:
        """Places that the last window of a slice covers behind it; negative where none."""
        return self.extent - self.stride - self.padding

    @property
    def is_apart(self) -> bool:
        """Whether windows neither overlap nor lie beyond the image."""
        return self.extent <= self.stride and not self.padding

    def gathered(self) -> tuple[int, int]:
        """What a slice of the many lacks before and behind it, to make its part of the few."""
        return self.padding, max(self.behind, 0)

    def scattered(self) -> tuple[int, int]:
        """What a slice of the few lacks before and behind it, to make its part of the many."""
        before = (self.extent - 1 - self.padding) // self.stride
        return max(before, 0), -(-self.padding // self.stride)


def convolution_windows(call: Arguments, kernel: Sequence[int]) -> tuple[Window, ...]:
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


def pooling_windows(call: Arguments, rank: int) -> tuple[Window, ...]:
    """The windows of a pooling over so many dims."""
    kernel = per_dim(call, "kernel_size", (1,) * rank)
    strides = per_dim(call, "stride", kernel)
    dilations = per_dim(call, "dilation", (1,) * rank)
    paddings = per_dim(call, "padding", (0,) * rank)
    extents = [1 + d * (k - 1) for k, d in zip(kernel, dilations, strict=True)]
    return tuple(
        Window(*each) for each in zip(strides, dilations, extents, paddings, paddings, strict=True)
    )


def interpolation_reach(packet: str) -> int:
    """How many places to either side of its own a place of an interpolated image is made of.

    Args:
        packet: of ATen, as in `upsample_bicubic2d`.
    """
    return 2 if "cubic" in packet else 1


def per_dim(call: Arguments, name: str, default: Sequence[int]) -> tuple[int, ...]:
    """A list with a number per dim, or one number for all of them."""
    value = call.argument(name)
    items = value if isinstance(value, tuple) else () if value is None else (value,)
    given = tuple(item for item in items if isinstance(item, int))
    return given * len(default) if len(given) == 1 else given or tuple(default)
