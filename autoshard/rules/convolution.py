"""Convolutions, pooling and resampling of images, sounds and videos.

Samples, channels and groups may be cut, and places where windows lie apart, as those of
patches and of kernels of size 1 do. Overlapping windows would need the neighbours' edges.
"""

from collections.abc import Mapping
from functools import partial
from itertools import chain
from math import prod

from autoshard.rules.call import Call, Rule
from autoshard.rules.rule import Dims, OperatorRule
from autoshard.rules.space import Shape, Space


def _convolution(call: Call, *, transposed: bool = False) -> OperatorRule:
    """input[n,(g i),*], weight[(g o),i,*] or transposed [(g i),o,*], bias -> [n,(g o),*].

    Summed over i and the kernel. A rank with a slice of the groups is told how many it has
    (`Kernel.GROUPS`). The flops are two per sample, group, pair of channels, kernel element
    and place: of the output, or of the input when transposed.
    """
    image, weight = (tensor.shape for tensor in call.inputs[:2])
    result = call.outputs[0].shape
    batch = len(image) - (len(weight) - 1)
    groups = call.integer("groups", 1)
    space = Space(call)
    samples = space.free_dims(image[:batch])
    group = space.free(groups) if batch else space.fixed(groups)
    inner, outer = space.free(image[batch] // groups), space.free(result[batch] // groups)
    if groups > 1:
        space.in_order(inner)  # or the kernel would take a slice of each group for groups
    first, second = (inner, outer) if transposed else (outer, inner)
    small, large = (image, result) if transposed else (result, image)
    places, covered = _places(call, space, weight[2:], small[batch + 1 :], large[batch + 1 :])
    before, after = (places, covered) if transposed else (covered, places)
    biases = call.positions("bias")
    return space.rule(
        [
            (*samples, (*group, *inner), *before),
            ((*group, *first), second, *space.fixed_dims(weight[2:])),
            *[((*group, *outer),) for _ in biases],
        ],
        [(*samples, (*group, *outer), *after)],
        contracted=inner,
        linear=[{0, *biases}, {1, *biases}],
        addends=biases,
        flops=2.0 * prod(small) * prod(weight[1:]),
    )


def _places(
    call: Call, space: Space, kernel: Shape, small: Shape, large: Shape
) -> tuple[Dims, Dims]:
    """Letters of the small image's places, and of the large one's, which has a window for each.

    Where windows lie apart, a place of the large image is (window, place in its stride).
    """
    strides = _per_dim(call, "stride", kernel)
    dilations = _per_dim(call, "dilation", [1] * len(kernel))
    extents = [1 + d * (k - 1) for k, d in zip(kernel, dilations, strict=True)]
    same = [extent - 1 for extent in extents] if call.argument("padding") == "same" else ()
    paddings = same or _per_dim(call, "padding", [0] * len(kernel))
    places, covered = [], []
    for dim, (few, many) in enumerate(zip(small, large, strict=True)):
        stride = strides[dim]
        apart = extents[dim] <= stride and not paddings[dim] and many == few * stride
        places.append(space.free(few) if apart else space.fixed(few))
        rest = space.fixed(stride if apart else many)
        covered.append((*places[-1], *rest) if apart else rest)
    return tuple(places), tuple(covered)


def _per_dim(call: Call, name: str, default: Shape) -> Shape:
    """A list with a number per dim, or one number for all of them."""
    given = call.integers(name)
    return given * len(default) if len(given) == 1 else given or default


def _pool(call: Call, *, rank: int, linear: bool) -> OperatorRule:
    """Windows over the last `rank` dims; samples and channels are independent."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    space = Space(call)
    kept = space.free_dims(before[:-rank])
    kernel = _per_dim(call, "kernel_size", [1] * rank)
    places, covered = _places(call, space, kernel, after[-rank:], before[-rank:])
    return space.rule([(*kept, *covered)], [(*kept, *places)], linear=[{0}] if linear else ())


def _adaptive_pool(call: Call, *, rank: int) -> OperatorRule:
    """As many places as asked for; a single one is a mean (`Kernel.SCALED`)."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    space = Space(call)
    kept = space.free_dims(before[:-rank])
    mean = set(after[-rank:]) == {1}
    pooled = (space.free_dims if mean else space.fixed_dims)(before[-rank:])
    return space.rule(
        [(*kept, *pooled)],
        [(*kept, *space.fixed_dims(after[-rank:]))],
        contracted=chain(*pooled) if mean else (),
        linear=[{0}],
    )


def _upsample(call: Call, *, rank: int, nearest: bool = False) -> OperatorRule:
    """Interpolates between places; the nearest place is repeated, if a whole number of times."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    space = Space(call)
    kept = space.free_dims(before[:-rank])
    small, large = [], []
    for few, many in zip(before[-rank:], after[-rank:], strict=True):
        apart = nearest and not call.integers("output_size") and many % few == 0
        small.append(space.free(few) if apart else space.fixed(few))
        rest = space.fixed(many // few if apart else many)
        large.append((*small[-1], *rest) if apart else rest)
    return space.rule([(*kept, *small)], [(*kept, *large)], linear=[{0}])


def _grid_sampler(call: Call) -> OperatorRule:
    """input[n,c,*], grid[n,places,rank] -> [n,c,places]: every place reads on its own."""
    image, grid = (tensor.shape for tensor in call.inputs)
    space = Space(call)
    sample, channel = space.free(image[0]), space.free(image[1])
    places = space.free_dims(grid[1:-1])
    return space.rule(
        [(sample, channel, *space.fixed_dims(image[2:])), (sample, *places, space.fixed(grid[-1]))],
        [(sample, channel, *places)],
        linear=[{0}],
    )


_transposed: Rule = partial(_convolution, transposed=True)
_RANKS = (1, 2, 3)

RULES: Mapping[str, Rule] = {
    **{f"aten.conv{r}d": _convolution for r in _RANKS},
    "aten.conv_transpose1d.default": _transposed,
    "aten.conv_transpose2d.input": _transposed,
    "aten.conv_transpose3d.input": _transposed,
    **{f"aten.max_pool{r}d.default": partial(_pool, rank=r, linear=False) for r in _RANKS},
    **{f"aten.avg_pool{r}d.default": partial(_pool, rank=r, linear=True) for r in _RANKS},
    **{f"aten.adaptive_avg_pool{r}d.default": partial(_adaptive_pool, rank=r) for r in _RANKS},
    "aten.upsample_linear1d.vec": partial(_upsample, rank=1),
    "aten.upsample_bilinear2d.vec": partial(_upsample, rank=2),
    "aten.upsample_bicubic2d.vec": partial(_upsample, rank=2),
    "aten.upsample_trilinear3d.vec": partial(_upsample, rank=3),
    **{f"aten.upsample_nearest{r}d.vec": partial(_upsample, rank=r, nearest=True) for r in _RANKS},
    "aten.grid_sampler.default": _grid_sampler,
}
