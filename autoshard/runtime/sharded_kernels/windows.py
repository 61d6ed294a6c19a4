"""Convolutions and pooling of a slice whose windows reach into the neighbours' slices.

Along dims that are cut an operator runs on the slice with its borders, without padding. What is
kept for backward is the slice and the edges that came, not the extended slice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autoshard.ops.windows import Window, convolution_windows, per_dim, pooling_windows
from autoshard.runtime.exchange import Received
from autoshard.runtime.local_node import LocalKernel, LocalNode
from autoshard.runtime.sharded_kernels.borders import Borders

_Tensors = tuple[torch.Tensor | None, ...]


def bind_convolution(local: LocalNode) -> LocalKernel | None:
    """A convolution, perhaps transposed; None where no neighbour is asked."""
    convolution = _Convolution.of(local, transposed="transpose" in local.node.operator)
    if convolution is None:
        return None
    batched = len(local.input_shapes[0]) == len(local.input_shapes[1])

    def run(tensors: Sequence[torch.Tensor], _step: int) -> tuple[torch.Tensor, ...]:
        given = local.named(tensors)
        image = given["input"] if batched else given["input"].unsqueeze(0)
        made = _Convolved.apply(image, given["weight"], given.get("bias"), convolution)  # type: ignore[no-untyped-call]  # torch
        return (made if batched else made.squeeze(0),)

    return run


@dataclass(frozen=True, slots=True)
class _Trim:
    """A dim of a transposed convolution of a slice, which is made too long.

    Attributes:
        dim: counted from the last.
        start: where the rank's part begins.
        length: of the rank's part.
        made: length before it is trimmed.
    """

    dim: int
    start: int
    length: int
    made: int


@dataclass(frozen=True, slots=True)
class _Convolution:
    """A convolution of a slice.

    Attributes:
        borders: of the slice.
        settings: stride, padding, dilation, whether transposed, output padding and groups of the
            convolution of the extended slice.
        trims: of its result.
    """

    borders: Borders
    settings: tuple[Any, ...]
    trims: tuple[_Trim, ...]

    @classmethod
    def of(cls, local: LocalNode, *, transposed: bool) -> "_Convolution | None":
        node, shape = local.node, local.input_shapes[0]
        windows = convolution_windows(node, local.shapes[1][2:])
        rank = len(windows)
        borders = Borders.of(
            local,
            [w.scattered() if transposed else w.gathered() for w in windows],
            [(1, w.stride) if transposed else (w.stride, 1) for w in windows],
        )
        if borders is None:
            return None
        whole, own = local.shapes[0][-rank - 1], shape[-rank - 1]
        groups = node.argument("groups", 1)
        assert isinstance(groups, int)
        is_cut = [borders.cuts(i - rank) for i in range(rank)]
        added = per_dim(node, "output_padding", (0,) * rank)
        settings = (
            [w.stride for w in windows],
            [0 if cut else w.padding for w, cut in zip(windows, is_cut, strict=True)],
            [w.dilation for w in windows],
            transposed,
            [0 if cut else size for size, cut in zip(added, is_cut, strict=True)],
            max(groups * own // whole, 1),
        )
        trims = [
            _trim(window, border.dim, shape[border.dim], (border.before, border.after))
            for border in borders.each
            for window in [windows[border.dim]]
        ]
        return cls(borders, settings, tuple(trims) if transposed else ())

    def trimmed(self, made: torch.Tensor) -> torch.Tensor:
        """The rank's part."""
        for trim in self.trims:
            made = made.narrow(trim.dim, trim.start, trim.length)
        return made.contiguous()

    def untrimmed(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of all that is made: that of what was trimmed is zero."""
        if not self.trims:
            return gradient
        shape = list(gradient.shape)
        for trim in self.trims:
            shape[trim.dim] = trim.made
        whole = own = gradient.new_zeros(shape)
        for trim in self.trims:
            own = own.narrow(trim.dim, trim.start, trim.length)
        own.copy_(gradient)
        return whole


def _trim(window: Window, dim: int, length: int, edges: tuple[int, int]) -> _Trim:
    made = (length + sum(edges) - 1) * window.stride + window.extent
    start = window.padding + edges[0] * window.stride
    return _Trim(dim, start, length * window.stride, made)


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        image: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        convolution: _Convolution,
    ) -> torch.Tensor:
        extended, edges = convolution.borders.extend(image)
        made = torch.ops.aten.convolution.default(extended, weight, bias, *convolution.settings)
        needs_image, needs_weight, *_ = ctx.needs_input_grad
        kept = (image, *(edge for pair in edges for edge in pair)) if needs_weight else ()
        ctx.save_for_backward(weight if needs_image else None, *kept)
        ctx.convolution, ctx.like_image = convolution, (image.shape, image.dtype)
        ctx.like_weight = weight.shape
        ctx.biases = None if bias is None else list(bias.shape)
        return convolution.trimmed(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> _Tensors:
        convolution, borders = ctx.convolution, ctx.convolution.borders
        weight, *kept = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:3])
        if kept:
            image, *edges = kept
            extended = borders.rebuild(image, _pairs(edges))
        else:
            extended = gradient.new_empty(borders.shape(ctx.like_image[0]))
        if weight is None:
            weight = gradient.new_empty(ctx.like_weight)
        to_image, to_weight, to_bias = torch.ops.aten.convolution_backward.default(
            convolution.untrimmed(gradient),
            extended,
            weight,
            ctx.biases,
            *convolution.settings,
            needed,
        )
        return borders.fold(to_image) if needed[0] else None, to_weight, to_bias, None


def _pairs(edges: Sequence[torch.Tensor | None]) -> list[Received]:
    return list(zip(edges[::2], edges[1::2], strict=True))


def bind_max_pool(local: LocalNode) -> LocalKernel | None:
    """The largest of each window; None where no neighbour is asked."""
    return _bind_pool(local, _MaxPooled, -inf)


def bind_avg_pool(local: LocalNode) -> LocalKernel | None:
    """The mean of each window; None where no neighbour is asked."""
    return _bind_pool(local, _AvgPooled, 0.0)


@dataclass(frozen=True, slots=True)
class _Pool:
    """A pooling of a slice over two or three dims.

    Attributes:
        borders: of the slice.
        operators: of ATen, forward and backward.
        settings: what both take behind the extended slice.
        shares: of means, by how much those of the rank are too small at the ends of the whole,
            where windows reach beyond and only what exists counts.
    """

    borders: Borders
    operators: tuple[Any, Any]
    settings: tuple[Any, ...]
    shares: tuple[torch.Tensor, ...] = ()


def _bind_pool(
    local: LocalNode, function: type[torch.autograd.Function], fill: float
) -> LocalKernel | None:
    rank = int(local.node.operator.removesuffix("d.default")[-1])
    windows = pooling_windows(local.node, rank)
    ratios = [(window.stride, 1) for window in windows]
    borders = Borders.of(local, [window.gathered() for window in windows], ratios, fill)
    if borders is None:
        return None
    pool = _pool(local, borders, windows, is_mean=function is _AvgPooled)
    flat = rank == 1

    def run(tensors: Sequence[torch.Tensor], _step: int) -> tuple[torch.Tensor, ...]:
        (image,) = tensors
        # Kernels are for planes and volumes.
        made = function.apply(image.unsqueeze(-2) if flat else image, pool)  # type: ignore[no-untyped-call]  # torch
        return (made.squeeze(-2) if flat else made,)

    return run


def _pool(local: LocalNode, borders: Borders, windows: Sequence[Window], *, is_mean: bool) -> _Pool:
    node, rank = local.node, len(windows)
    kernel = [1 + (w.extent - 1) // w.dilation for w in windows]
    strides = [w.stride for w in windows]
    paddings = [0 if borders.cuts(i - rank) else w.padding for i, w in enumerate(windows)]
    dilations = [w.dilation for w in windows]
    if rank == 1:
        kernel, strides, dilations = [1, *kernel], [1, *strides], [1, *dilations]
        paddings = [0, *paddings]
    packet = ("avg_pool{}d" if is_mean else "max_pool{}d_with_indices").format(max(rank, 2))
    ceil = bool(node.argument("ceil_mode", False))
    aten = torch.ops.aten
    operators = getattr(aten, packet).default, getattr(aten, f"{packet}_backward").default
    if not is_mean:
        return _Pool(borders, operators, (kernel, strides, paddings, dilations, ceil))
    counts = bool(node.argument("count_include_pad", True))
    divisor = node.argument("divisor_override")
    settings = (kernel, strides, paddings, ceil, counts, divisor)
    shares = () if counts or divisor is not None else _shares(local, borders, windows)
    return _Pool(borders, operators, settings, shares)


def _shares(
    local: LocalNode, borders: Borders, windows: Sequence[Window]
) -> tuple[torch.Tensor, ...]:
    """Elements of each window over those of them that exist, along each dim that is cut."""
    found = []
    shape, own, rank = local.shapes[0], local.input_shapes[0], len(local.shapes[0])
    for border in borders.each:
        window, dim = windows[border.dim], border.dim
        first = torch.arange(own[dim] // window.stride, dtype=torch.float64) * window.stride
        first += local.start(rank + dim) - window.padding
        exist = (first + window.extent).clamp(max=shape[dim]) - first.clamp(min=0)
        share = (window.extent / exist).to(local.place.device)
        found.append(share.view(-1, *[1] * (-dim - 1)))
    return tuple(found)


class _MaxPooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: torch.Tensor, pool: _Pool) -> torch.Tensor:
        extended, _ = pool.borders.extend(image)
        made: torch.Tensor
        made, places = pool.operators[0](extended, *pool.settings)
        ctx.save_for_backward(places)
        ctx.pool, ctx.shape = pool, extended.shape
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> _Tensors:
        (places,) = ctx.saved_tensors
        pool = ctx.pool
        # Only its shape is looked at.
        extended = gradient.new_empty(ctx.shape)
        to_image = pool.operators[1](gradient, extended, *pool.settings, places)
        return pool.borders.fold(to_image), None


class _AvgPooled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: torch.Tensor, pool: _Pool) -> torch.Tensor:
        extended, _ = pool.borders.extend(image)
        made = pool.operators[0](extended, *pool.settings)
        ctx.pool, ctx.shape = pool, extended.shape
        return _enlarged(made, pool)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> _Tensors:
        pool = ctx.pool
        extended = gradient.new_empty(ctx.shape)
        to_image = pool.operators[1](_enlarged(gradient, pool), extended, *pool.settings)
        return pool.borders.fold(to_image), None


def _enlarged(tensor: torch.Tensor, pool: _Pool) -> torch.Tensor:
    for share in pool.shares:
        tensor = torch.mul(tensor, share.to(tensor.dtype))
    return tensor
