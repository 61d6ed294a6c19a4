"""Convolutions, pooling and resampling of images, audio and video.

Samples, channels and groups may be sharded, and spatial dims if strides divide them. If windows
overlap, ranks exchange the edges of their shards (`Halo`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from math import prod

from autoshard.graph import DType
from autoshard.ops.rules.collectives import Edges, Halo
from autoshard.ops.rules.index_space import IndexSpace
from autoshard.ops.rules.rule import Dims, OperatorRule
from autoshard.ops.rules.spec import (
    NOTHING_SAVED,
    Call,
    Gradients,
    Kernel,
    OperatorSpec,
    SavedByAutograd,
    like,
    saved_by_name,
)
from autoshard.ops.rules.strides import Shape
from autoshard.ops.rules.windows import (
    INTERPOLATIONS,
    RANKS,
    Window,
    convolution_windows,
    interpolation_reach,
    pooling_windows,
)


def _convolution(call: Call, *, transposed: bool = False) -> OperatorRule:
    """input[n,(g i),*], weight[(g o),i,*] or transposed [(g i),o,*], bias -> [n,(g o),*].

    Summed over i and the kernel. Ranks may have some of the groups (`Kernel.GROUPS`). The flops
    are two per sample, group, pair of channels, kernel element and position of the output, or of
    the input when transposed.
    """
    image, weight = (tensor.shape for tensor in call.inputs[:2])
    result = call.outputs[0].shape
    batch = len(image) - (len(weight) - 1)
    groups = call.integer("groups", 1)
    space = IndexSpace(call)
    samples = space.free_dims(image[:batch])
    group = space.free(groups) if batch else space.fixed(groups)
    inner, outer = space.free(image[batch] // groups), space.free(result[batch] // groups)
    if groups > 1:
        space.in_order(inner)  # the kernel takes contiguous groups
    first, second = (inner, outer) if transposed else (outer, inner)
    small, large = (image, result) if transposed else (result, image)
    windows = convolution_windows(call, weight[2:])
    exchanged = _is_symmetric(call, weight[2:], transposed=transposed)
    at = _SpatialLetters(
        space, windows, small[batch + 1 :], large[batch + 1 :], exchanged=exchanged
    )
    before, after = (at.small, at.large) if transposed else (at.large, at.small)
    biases, made = call.positions("bias"), (*group, *outer)
    rule = space.rule(
        [
            (*samples, (*group, *inner), *before),
            ((*group, *first), second, *space.fixed_dims(weight[2:])),
            *[(made,) for _ in biases],
        ],
        [(*samples, made, *after)],
        contracted=inner,
        linear=[{0, *biases}, {1, *biases}],
        addends=biases,
        flops=2.0 * prod(small) * prod(weight[1:]),
    )
    return at.with_halo(rule, call, scattered=transposed, rebuilds=True)


def _is_symmetric(call: Call, kernel: Shape, *, transposed: bool) -> bool:
    """True if a rank can run the operator on a shard with its halo instead of padding."""
    windows = convolution_windows(call, kernel)
    if transposed:
        # Otherwise positions at the end of the large image are in no window.
        return all(window.extent >= window.stride for window in windows)
    return all(window.padding == window.trailing for window in windows)


class _SpatialLetters:
    """Letters of the spatial dims of two images (see `autoshard.ops.rules.windows`).

    If the large image is `stride` times as large as the small one, its dim is (position of the
    small one, position in the stride), so that shards of both correspond.

    Args:
        space: allocates the letters.
        windows: the windows along each dim.
        small: spatial shape of the small image.
        large: spatial shape of the large image.
        exchanged: True if ranks may exchange halos if windows overlap.

    Attributes:
        small: letters of each dim of the small image.
        large: letters of each dim of the large one.
    """

    def __init__(
        self,
        space: IndexSpace,
        windows: Sequence[Window],
        small: Shape,
        large: Shape,
        *,
        exchanged: bool,
    ) -> None:
        places, covered = [], []
        self._windows: list[tuple[int, str, Window]] = []
        for dim, (window, few, many) in enumerate(zip(windows, small, large, strict=True)):
            overlaps = not window.is_apart
            fits = many == few * window.stride and (exchanged or not overlaps)
            places.append(space.free(few) if fits else space.fixed(few))
            rest = space.fixed(window.stride if fits else many)
            covered.append((*places[-1], *rest) if fits else rest)
            if fits and overlaps and places[-1]:
                space.in_order(places[-1])
                self._windows.append((dim - len(windows), places[-1][0], window))
        self.small: Dims = tuple(places)
        self.large: Dims = tuple(covered)

    def with_halo(
        self, rule: OperatorRule, call: Call, *, scattered: bool = False, rebuilds: bool = False
    ) -> OperatorRule:
        """The rule with the halos of overlapping windows.

        Args:
            rule: the rule.
            call: its call.
            scattered: True if the first input is the small image.
            rebuilds: True if backward needs the first input.
        """
        rank = len(call.inputs[0].shape)
        edges = {
            letter: Edges(rank + dim, *(window.scattered() if scattered else window.gathered()))
            for dim, letter, window in self._windows
        }
        return _with_halo(rule, call, edges, trims=scattered, rebuilds=rebuilds)


def _with_halo(
    rule: OperatorRule,
    call: Call,
    edges: Mapping[str, Edges],
    *,
    trims: bool = False,
    rebuilds: bool = False,
) -> OperatorRule:
    """The rule with halos for some letters, which must then be sharded evenly.

    Args:
        rule: the rule.
        call: its call.
        edges: width of the halo by letter.
        trims: True if the output of an extended shard is trimmed to the shard.
        rebuilds: True if backward needs the first input.
    """
    if not edges:
        return rule
    halo = Halo(
        edges=edges,
        image=rule.inputs[0],
        itemsize=call.inputs[0].dtype.itemsize,
        trimmed=rule.outputs[0] if trims else (),
        rebuilds=rebuilds,
    )
    return replace(rule, halo=halo, uneven=rule.uneven - edges.keys())


def _pool(call: Call, *, rank: int, linear: bool) -> OperatorRule:
    """Windows over the last `rank` dims; samples and channels are independent."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    space = IndexSpace(call)
    kept = space.free_dims(before[:-rank])
    windows = pooling_windows(call, rank)
    at = _SpatialLetters(
        space,
        windows,
        after[-rank:],
        before[-rank:],
        exchanged=not call.flag("ceil_mode")
        or (not linear and all(window.behind >= 0 for window in windows)),
    )
    rule = space.rule([(*kept, *at.large)], [(*kept, *at.small)], linear=[{0}] if linear else ())
    return at.with_halo(rule, call)


def _adaptive_pool(call: Call, *, rank: int) -> OperatorRule:
    """A given number of positions; a single one is a mean (`Kernel.SCALED`)."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    space = IndexSpace(call)
    kept = space.free_dims(before[:-rank])
    mean = set(after[-rank:]) == {1}
    pooled = (space.free_dims if mean else space.fixed_dims)(before[-rank:])
    return space.rule(
        [(*kept, *pooled)],
        [(*kept, *space.fixed_dims(after[-rank:]))],
        contracted=chain(*pooled) if mean else (),
        linear=[{0}],
    )


def _upsample(call: Call, *, rank: int, reach: int = 0) -> OperatorRule:
    """Each position becomes an integer number of positions, from `reach` neighbours per side."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    space = IndexSpace(call)
    kept = space.free_dims(before[:-rank])
    aligned = bool(reach) and call.flag("align_corners")
    factors = call.argument("scale_factors")
    small, large, edges = [], [], {}
    for dim, (few, many) in enumerate(zip(before[-rank:], after[-rank:], strict=True)):
        apart = (
            not aligned
            and not call.integers("output_size")
            and isinstance(factors, tuple)
            and many % few == 0
            and factors[dim] == many // few
        )
        small.append(space.free(few) if apart else space.fixed(few))
        rest = space.fixed(many // few if apart else many)
        large.append((*small[-1], *rest) if apart else rest)
        if apart and reach and small[-1] and many > few:
            (letter,) = space.in_order(small[-1])
            edges[letter] = Edges(len(kept) + dim, reach, reach)
    rule = space.rule([(*kept, *small)], [(*kept, *large)], linear=[{0}])
    return _with_halo(rule, call, edges, trims=True)


def _grid_sampler(call: Call) -> OperatorRule:
    """input[n,c,*], grid[n,places,rank] -> [n,c,places]: output positions are independent."""
    image, grid = (tensor.shape for tensor in call.inputs)
    space = IndexSpace(call)
    sample, channel = space.free(image[0]), space.free(image[1])
    places = space.free_dims(grid[1:-1])
    return space.rule(
        [(sample, channel, *space.fixed_dims(image[2:])), (sample, *places, space.fixed(grid[-1]))],
        [(sample, channel, *places)],
        linear=[{0}],
    )


def _adaptive_pool_saves(call: Call, gradients: Gradients) -> SavedByAutograd:
    """Nothing for a single position, which is a mean."""
    if set(call.integers("output_size")) == {1}:
        return NOTHING_SAVED
    return saved_by_name("self", call, gradients)


def _max_pool_saves(call: Call, gradients: Gradients) -> SavedByAutograd:
    """Also the index of each maximum."""
    indices = like(call, len(call.inputs), DType.INT64.itemsize)
    return saved_by_name("self", call, gradients, indices)


_UNEVEN_WINDOWS = (
    "Spatial dims if a shard would need more than its neighbours have, if strides do not divide "
    "the image into as many positions as there are windows (no padding, odd sizes), and, if "
    "windows overlap, unequal shards and sharding by two axes."
)
_NO_FACTOR = (
    "Spatial dims if an output size is given, or corners are aligned: scales are then no integers."
)


def _upsampling(rank: int, arguments: str = "") -> str:
    """An example that doubles each spatial dim."""
    dims = "xyz"[:rank]
    small, large = ",".join(dims), ",".join(f"({dim} 2)" for dim in dims)
    factors = ",".join(["2.0"] * rank)
    return (
        f"input[b,c,{small}] output_size=None {arguments}scale_factors=({factors},)"
        f" -> [b,c,{large}]"
    )


SPECS = (
    OperatorSpec(
        "conv2d conv1d conv3d",
        _convolution,
        saves="input weight",
        kernel=Kernel.SHARDED_DIM,
        kernel_argument="groups",
        unsharded=_UNEVEN_WINDOWS,
        examples="""
            conv2d.default: input[b,i,x,y] weight[o,i,3,3] bias[o] padding=(1,1) -> [b,o,x,y]
            conv2d.default: input[b,i,(x 2),(y 2)] weight[o,i,2,2] stride=(2,2) -> [b,o,x,y]
            conv2d.default: input[b,g,x,y] weight[(g m),1,3,3] padding=(1,1) groups=g \
                -> [b,(g m),x,y]
            conv2d.padding: input[b,i,x,y] weight[o,i,3,3] padding='same' -> [b,o,x,y]
            conv1d.default: input[b,i,x] weight[o,i,3] bias[o] padding=(1,) -> [b,o,x]
        """,
    ),
    OperatorSpec(
        "conv_transpose2d.input conv_transpose1d.default conv_transpose3d.input",
        partial(_convolution, transposed=True),
        saves="input weight",
        kernel=Kernel.SHARDED_DIM,
        kernel_argument="groups",
        examples="input[b,i,x,y] weight[i,o,2,2] stride=(2,2) -> [b,o,(x 2),(y 2)]",
    ),
    *(
        OperatorSpec(
            f"max_pool{rank}d.default",
            partial(_pool, rank=rank, linear=False),
            saves=_max_pool_saves,
            kernel=Kernel.SHARDED_DIM,
            unsharded=_UNEVEN_WINDOWS,
            examples=example,
        )
        for rank, example in enumerate(
            (
                "self[b,c,(x 2)] kernel_size=(2,) -> [b,c,x]",
                """
                self[b,c,(x 2),(y 2)] kernel_size=(2,2) -> [b,c,x,y]
                self[b,c,(x 2),(y 2)] kernel_size=(3,3) stride=(2,2) padding=(1,1) -> [b,c,x,y]
                """,
                "self[b,c,(x 2),(y 2),(z 2)] kernel_size=(2,2,2) -> [b,c,x,y,z]",
            ),
            start=1,
        )
    ),
    *(
        OperatorSpec(
            f"avg_pool{rank}d.default",
            partial(_pool, rank=rank, linear=True),
            saves="self",
            kernel=Kernel.SHARDED_DIM,
            unsharded=_UNEVEN_WINDOWS,
            examples=example,
        )
        for rank, example in zip(
            RANKS,
            (
                "self[b,c,(x 2)] kernel_size=(2,) -> [b,c,x]",
                "self[b,c,(x 2),(y 2)] kernel_size=(2,2) -> [b,c,x,y]",
                "self[b,c,(x 2),(y 2),(z 2)] kernel_size=(2,2,2) -> [b,c,x,y,z]",
            ),
            strict=True,
        )
    ),
    *(
        OperatorSpec(
            f"adaptive_avg_pool{rank}d.default",
            partial(_adaptive_pool, rank=rank),
            saves=_adaptive_pool_saves,
            kernel=Kernel.SCALED,
            examples=example,
        )
        for rank, example in zip(
            RANKS,
            (
                "self[b,c,x] output_size=(1,) -> [b,c,1]",
                "self[b,c,x,y] output_size=(7,7) -> [b,c,7,7]",
                "self[b,c,x,y,z] output_size=(1,1,1) -> [b,c,1,1,1]",
            ),
            strict=True,
        )
    ),
    *(
        OperatorSpec(
            f"upsample_{name}.vec",
            partial(_upsample, rank=int(name[-2]), reach=interpolation_reach(name)),
            saves="",
            kernel=Kernel.SHARDED_DIM,
            unsharded=_NO_FACTOR,
            examples=_upsampling(int(name[-2]), "align_corners=False "),
        )
        for name in INTERPOLATIONS
    ),
    *(
        OperatorSpec(
            f"upsample_nearest{rank}d.vec",
            partial(_upsample, rank=rank),
            saves="",
            examples=_upsampling(rank),
        )
        for rank in RANKS
    ),
    OperatorSpec(
        "grid_sampler.default",
        _grid_sampler,
        saves="input grid",
        examples="""
            input[b,c,x,y] grid[b,u,v,2] interpolation_mode=0 padding_mode=0 align_corners=False \
                -> [b,c,u,v]
        """,
    ),
)
