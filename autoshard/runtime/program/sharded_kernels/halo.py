"""Convolutions, pooling and interpolation along sharded dims, with halo exchange.

Along sharded dims an operator runs without padding on the shard extended by its halo: the edges
that the neighbouring ranks send, see `autoshard.ops.rules.collectives.Halo` (as in GSPMD; Xu et
al., arXiv:2105.04663). The shard and the received edges are saved for backward, not the extended
shard.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from autoshard.errors import PlanError
from autoshard.ops.rules.windows import (
    Window,
    convolution_windows,
    interpolation_reach,
    per_dim,
    pooling_windows,
)
from autoshard.runtime.program.local_node import LocalKernel, LocalNode, Ranks, Received, Step
from autoshard.runtime.program.sharded_kernels.base import Gradients, ShardedKernel


@dataclass(frozen=True, slots=True)
class _Border:
    """The halo of one dim.

    Attributes:
        dim: negative index of the dim.
        axis: the mesh axis that shards it.
        before: number of halo elements before the shard.
        after: number of halo elements after it.
    """

    dim: int
    axis: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class _Halo:
    """The halo of a rank's shards.

    The first and the last rank of an axis have one neighbour only; the missing edge is padding.

    Attributes:
        borders: one per extended dim, ascending.
        ranks: communication with the other ranks.
        fill: value of the padding; None to repeat the outermost elements.
    """

    borders: tuple[_Border, ...]
    ranks: Ranks
    fill: float | None = 0.0

    @classmethod
    def of(
        cls,
        local: LocalNode,
        edges: Sequence[tuple[int, int]],
        ratios: Sequence[tuple[int, int]],
        fill: float | None = 0.0,
    ) -> "_Halo | None":
        """The halo of the last dims of the first input; None if none of them is sharded.

        Args:
            local: the operator.
            edges: numbers of elements needed before and after a shard, for each of these dims.
            ratios: ratio of input to output elements, for each of these dims.
            fill: value of the padding.

        Raises:
            PlanError: several axes shard a dim; or, at other sizes than the planned ones, a shard
                is shorter than the halo or the strides do not divide it.
        """
        found = []
        rank = len(local.input_shapes[0])
        for i, ((before, after), ratio) in enumerate(zip(edges, ratios, strict=True)):
            dim = i - len(edges)
            axes = local.axes_sharding((rank + dim,))
            if axes and (before or after):
                found.append(_Border(dim, _only(axes, local), before, after))
                _check(local, found[-1], ratio)
        return cls(tuple(found), local.place.ranks, fill) if found else None

    def extends(self, dim: int) -> bool:
        """True if the halo extends a dim, given by its negative index."""
        return any(border.dim == dim for border in self.borders)

    def shape(self, shape: Sequence[int]) -> list[int]:
        """The shape of a shard with its halo."""
        extended = list(shape)
        for border in self.borders:
            extended[border.dim] += border.before + border.after
        return extended

    def extend(self, values: torch.Tensor) -> tuple[torch.Tensor, list[Received]]:
        """Exchange edges; return the extended shard and the received edges."""
        received: list[Received] = []

        def exchange(number: int, own: torch.Tensor) -> Received:
            border = self.borders[number]
            to_before = own.narrow(border.dim, 0, border.after)
            to_after = _last(own, border.dim, border.before)
            came = self.ranks.exchange(to_before.contiguous(), to_after.contiguous(), border.axis)
            received.append(came)
            return came

        return self._filled(values, exchange), received

    def rebuild(self, values: torch.Tensor, received: Sequence[Received]) -> torch.Tensor:
        """The extended shard, from the saved edges."""
        return self._filled(values, lambda number, _: received[number])

    def fold(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of a shard, from that of the extended shard, which is overwritten."""
        # The other way round than forward: edges of a later dim contain the halo of earlier ones,
        # which is folded only afterwards.
        for border in reversed(self.borders):
            dim, before, after = border.dim, border.before, border.after
            first, last = gradient.narrow(dim, 0, before), _last(gradient, dim, after)
            own = gradient.narrow(dim, before, gradient.shape[dim] - before - after)
            from_before, from_after = self.ranks.exchange(
                first.contiguous(), last.contiguous(), border.axis
            )
            if from_before is not None:
                own.narrow(dim, 0, after).add_(from_before)
            elif self.fill is None:
                own.narrow(dim, 0, 1).add_(first.sum(dim, keepdim=True))
            if from_after is not None:
                _last(own, dim, before).add_(from_after)
            elif self.fill is None:
                _last(own, dim, 1).add_(last.sum(dim, keepdim=True))
            gradient = own
        return gradient.contiguous()

    def _filled(
        self, values: torch.Tensor, edges: Callable[[int, torch.Tensor], Received]
    ) -> torch.Tensor:
        """The extended shard; the edges of a dim include the halo of the preceding dims."""
        extended = values.new_empty(self.shape(values.shape))
        views = [extended]
        for border in reversed(self.borders):
            views.append(views[-1].narrow(border.dim, border.before, values.shape[border.dim]))
        own = views.pop()
        own.copy_(values)
        for number, (border, view) in enumerate(zip(self.borders, reversed(views), strict=True)):
            from_before, from_after = edges(number, own)
            first = view.narrow(border.dim, 0, border.before)
            last = _last(view, border.dim, border.after)
            self._put(first, from_before, own.narrow(border.dim, 0, 1))
            self._put(last, from_after, _last(own, border.dim, 1))
            own = view
        return extended

    def _put(self, place: torch.Tensor, edge: torch.Tensor | None, end: torch.Tensor) -> None:
        if edge is not None:
            place.copy_(edge)
        elif self.fill is None:
            place.copy_(end.expand_as(place))
        else:
            place.fill_(self.fill)


def _only(axes: Sequence[int], local: LocalNode) -> int:
    if len(axes) > 1:
        raise PlanError(
            f"node {local.node.name!r} exchanges edges along a dim sharded on {len(axes)} mesh "
            f"axes; only one axis is supported"
        )
    return axes[0]


def _check(local: LocalNode, border: _Border, ratio: tuple[int, int]) -> None:
    size, made = (shapes[0][border.dim] for shapes in (local.input_shapes, local.output_shapes))
    reads, makes = ratio
    if size * makes != made * reads or size < max(border.before, border.after):
        raise PlanError(
            f"node {local.node.name!r} cannot compute shards of {made} elements from shards of "
            f"{size} with a halo of {border.before} before and {border.after} after; choose sizes "
            f"that strides and ranks divide, or make a plan for these sizes"
        )


def _last(tensor: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    return tensor.narrow(dim, tensor.shape[dim] - count, count)


def bind_convolution(local: LocalNode) -> LocalKernel | None:
    """Bind a (transposed) convolution; None if it needs no halo."""
    convolution = _Convolution.of(local, transposed="transpose" in local.node.operator)
    if convolution is None:
        return None
    batched = len(local.input_shapes[0]) == len(local.input_shapes[1])

    def run(tensors: Sequence[torch.Tensor], _step: Step) -> tuple[torch.Tensor, ...]:
        given = local.named(tensors)
        image = given["input"] if batched else given["input"].unsqueeze(0)
        result = convolution(image, given["weight"], given.get("bias"))
        return (result if batched else result.squeeze(0),)

    return run


@dataclass(frozen=True, slots=True)
class _Trim:
    """The rank's slice of a dim of the result of a transposed convolution.

    Attributes:
        dim: negative index of the dim.
        start: start of the slice.
        length: length of the slice.
        made: length of the whole dim before trimming.
    """

    dim: int
    start: int
    length: int
    made: int


@dataclass(frozen=True, slots=True)
class _Convolution(ShardedKernel):
    """A convolution of a shard.

    Attributes:
        halo: halo of the shard.
        settings: the arguments of `aten.convolution` from stride to groups, for the extended shard.
        trims: slices of its result, if it is transposed.
    """

    halo: _Halo
    settings: tuple[Any, ...]
    trims: tuple[_Trim, ...]

    @classmethod
    def of(cls, local: LocalNode, *, transposed: bool) -> "_Convolution | None":
        node, shape = local.node, local.input_shapes[0]
        windows = convolution_windows(node, local.shapes[1][2:])
        rank = len(windows)
        halo = _Halo.of(
            local,
            [w.scattered() if transposed else w.gathered() for w in windows],
            [(1, w.stride) if transposed else (w.stride, 1) for w in windows],
        )
        if halo is None:
            return None
        whole, own = local.shapes[0][-rank - 1], shape[-rank - 1]
        is_extended = [halo.extends(i - rank) for i in range(rank)]
        added = per_dim(node, "output_padding", (0,) * rank)
        settings = (
            [w.stride for w in windows],
            [
                0 if extended else w.padding
                for w, extended in zip(windows, is_extended, strict=True)
            ],
            [w.dilation for w in windows],
            transposed,
            [0 if extended else size for size, extended in zip(added, is_extended, strict=True)],
            max(local.integer("groups", 1) * own // whole, 1),
        )
        trims = [
            _trim(window, border.dim, shape[border.dim], (border.before, border.after))
            for border in halo.borders
            for window in [windows[border.dim]]
        ]
        return cls(halo, settings, tuple(trims) if transposed else ())

    def trimmed(self, made: torch.Tensor) -> torch.Tensor:
        """Trim the result to the rank's shard."""
        for trim in self.trims:
            made = made.narrow(trim.dim, trim.start, trim.length)
        return made.contiguous()

    def untrimmed(self, gradient: torch.Tensor) -> torch.Tensor:
        """Pad a gradient with zeros to the shape before trimming."""
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

    def forward(
        self,
        ctx: Any,
        image: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        extended, edges = self.halo.extend(image)
        made = torch.ops.aten.convolution.default(extended, weight, bias, *self.settings)
        needs_image, needs_weight, *_ = ctx.needs_input_grad
        kept = (image, *(edge for pair in edges for edge in pair)) if needs_weight else ()
        ctx.save_for_backward(weight if needs_image else None, *kept)
        ctx.image_shape = image.shape
        ctx.weight_shape = weight.shape
        ctx.biases = None if bias is None else list(bias.shape)
        return self.trimmed(made)

    def backward(self, ctx: Any, gradient: torch.Tensor) -> Gradients:
        weight, *kept = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:3])
        if kept:
            image, *edges = kept
            extended = self.halo.rebuild(image, list(zip(edges[::2], edges[1::2], strict=True)))
        else:
            extended = gradient.new_empty(self.halo.shape(ctx.image_shape))
        if weight is None:
            weight = gradient.new_empty(ctx.weight_shape)
        to_image, to_weight, to_bias = torch.ops.aten.convolution_backward.default(
            self.untrimmed(gradient),
            extended,
            weight,
            ctx.biases,
            *self.settings,
            needed,
        )
        return self.halo.fold(to_image) if needed[0] else None, to_weight, to_bias


def _trim(window: Window, dim: int, length: int, edges: tuple[int, int]) -> _Trim:
    made = (length + sum(edges) - 1) * window.stride + window.extent
    start = window.padding + edges[0] * window.stride
    return _Trim(dim, start, length * window.stride, made)


@dataclass(frozen=True, slots=True)
class _HaloPool(ShardedKernel):
    """Pooling of a shard over two or three dims.

    Attributes:
        halo: halo of the shard.
        operators: the ATen operators of forward and backward.
        settings: arguments of both operators after the extended shard.
    """

    halo: _Halo
    operators: tuple[Any, Any]
    settings: tuple[Any, ...]

    def forward(self, ctx: Any, image: torch.Tensor) -> torch.Tensor:
        """Compute the maximum of each window, and save the indices."""
        extended, _ = self.halo.extend(image)
        result: torch.Tensor
        result, indices = self.operators[0](extended, *self.settings)
        ctx.save_for_backward(indices)
        ctx.shape = extended.shape
        return result

    def backward(self, ctx: Any, gradient: torch.Tensor) -> Gradients:
        """The gradient of the shard."""
        # The operator reads only the shape of its input.
        extended = gradient.new_empty(ctx.shape)
        to_image = self.operators[1](gradient, extended, *self.settings, *ctx.saved_tensors)
        return (self.halo.fold(to_image),)


@dataclass(frozen=True, slots=True)
class _AvgPool(_HaloPool):
    """Average pooling of a shard.

    Attributes:
        scales: with `count_include_pad=False`, factors that correct the means of windows which
            reach into the padding of the global tensor.
    """

    scales: tuple[torch.Tensor, ...]

    def forward(self, ctx: Any, image: torch.Tensor) -> torch.Tensor:
        """Compute the mean of each window; saves no tensors."""
        extended, _ = self.halo.extend(image)
        ctx.shape = extended.shape
        return self._scaled(self.operators[0](extended, *self.settings))

    def backward(self, ctx: Any, gradient: torch.Tensor) -> Gradients:
        """The gradient of the shard."""
        return _HaloPool.backward(self, ctx, self._scaled(gradient))

    def _scaled(self, tensor: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            tensor = torch.mul(tensor, scale.to(tensor.dtype))
        return tensor


def bind_pool(local: LocalNode) -> LocalKernel | None:
    """Bind max or average pooling; None if it needs no halo."""
    operator = local.node.operator
    rank, is_mean = int(operator.removesuffix("d.default")[-1]), "avg_pool" in operator
    windows = pooling_windows(local.node, rank)
    ratios = [(window.stride, 1) for window in windows]
    edges = [window.gathered() for window in windows]
    halo = _Halo.of(local, edges, ratios, fill=0.0 if is_mean else -inf)
    if halo is None:
        return None
    pool = _pool(local, halo, windows, is_mean=is_mean)
    flat = rank == 1

    def run(tensors: Sequence[torch.Tensor], _step: Step) -> tuple[torch.Tensor, ...]:
        (image,) = tensors
        # ATen's pooling operators take two or three dims.
        result = pool(image.unsqueeze(-2) if flat else image)
        return (result.squeeze(-2) if flat else result,)

    return run


def _pool(local: LocalNode, halo: _Halo, windows: Sequence[Window], *, is_mean: bool) -> _HaloPool:
    node, rank = local.node, len(windows)
    kernel = [1 + (w.extent - 1) // w.dilation for w in windows]
    strides = [w.stride for w in windows]
    paddings = [0 if halo.extends(i - rank) else w.padding for i, w in enumerate(windows)]
    dilations = [w.dilation for w in windows]
    if rank == 1:
        kernel, strides, dilations = [1, *kernel], [1, *strides], [1, *dilations]
        paddings = [0, *paddings]
    packet = ("avg_pool{}d" if is_mean else "max_pool{}d_with_indices").format(max(rank, 2))
    ceil = bool(node.argument("ceil_mode", False))
    aten = torch.ops.aten
    operators = getattr(aten, packet).default, getattr(aten, f"{packet}_backward").default
    if not is_mean:
        return _HaloPool(halo, operators, (kernel, strides, paddings, dilations, ceil))
    counts = bool(node.argument("count_include_pad", True))
    divisor = node.argument("divisor_override")
    settings = (kernel, strides, paddings, ceil, counts, divisor)
    scales = () if counts or divisor is not None else _scales(local, halo, windows)
    return _AvgPool(halo, operators, settings, scales)


def _scales(local: LocalNode, halo: _Halo, windows: Sequence[Window]) -> tuple[torch.Tensor, ...]:
    """Size of each window over its elements inside the global tensor, along each sharded dim."""
    found = []
    shape, own, rank = local.shapes[0], local.input_shapes[0], len(local.shapes[0])
    for border in halo.borders:
        window, dim = windows[border.dim], border.dim
        first = torch.arange(own[dim] // window.stride, dtype=torch.float64) * window.stride
        first += local.start(rank + dim) - window.padding
        exist = (first + window.extent).clamp(max=shape[dim]) - first.clamp(min=0)
        share = (window.extent / exist).to(local.place.device)
        found.append(share.view(-1, *[1] * (-dim - 1)))
    return tuple(found)


def bind_interpolation(local: LocalNode) -> LocalKernel | None:
    """Bind linear or cubic interpolation; None if it needs no halo.

    At the ends of the global tensor the outermost element is repeated, as ATen does.
    """
    node = local.node
    packet = node.operator.split(".")[1]
    factors = node.argument("scale_factors")
    if not isinstance(factors, tuple):
        return None
    scales = [float(factor) for factor in factors if isinstance(factor, (int, float))]
    reach = interpolation_reach(packet)
    edges = [(reach, reach) if scale != 1 else (0, 0) for scale in scales]
    halo = _Halo.of(local, edges, [(1, int(scale)) for scale in scales], fill=None)
    if halo is None:
        return None
    interpolation = _Interpolation(halo, packet, tuple(scales), reach)

    def run(tensors: Sequence[torch.Tensor], _step: Step) -> tuple[torch.Tensor, ...]:
        (image,) = tensors
        return (interpolation(image),)

    return run


@dataclass(frozen=True, slots=True)
class _Interpolation(ShardedKernel):
    """The interpolation of a shard.

    Attributes:
        halo: halo of the shard.
        packet: name of the ATen operator without overload.
        scales: output elements per input element, by dim.
        reach: number of neighbours on either side that an output element depends on.
    """

    halo: _Halo
    packet: str
    scales: tuple[float, ...]
    reach: int

    def trimmed(self, made: torch.Tensor) -> torch.Tensor:
        """A view of the result without the part that belongs to the halo."""
        for border in self.halo.borders:
            edge = self.reach * int(self.scales[border.dim])
            made = made.narrow(border.dim, edge, made.shape[border.dim] - 2 * edge)
        return made

    def forward(self, ctx: Any, image: torch.Tensor) -> torch.Tensor:
        extended, _ = self.halo.extend(image)
        operator = getattr(torch.ops.aten, self.packet).vec
        made = operator(extended, None, False, list(self.scales))
        ctx.shape, ctx.made = extended.shape, made.shape
        return self.trimmed(made).contiguous()

    def backward(self, ctx: Any, gradient: torch.Tensor) -> Gradients:
        whole = gradient.new_zeros(ctx.made)
        self.trimmed(whole).copy_(gradient)
        backward = getattr(torch.ops.aten, f"{self.packet}_backward").default
        sizes = list(ctx.made[2:]), list(ctx.shape)
        to_image = backward(whole, *sizes, False, *self.scales)
        return (self.halo.fold(to_image),)
