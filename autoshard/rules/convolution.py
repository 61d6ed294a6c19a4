"""Convolutions, pooling and resampling of images, sounds and videos.

Samples, channels and groups may be cut, and places where each stride of the large image has one
place of the small one. Where windows overlap, ranks exchange the edges of their slices (`Halo`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from math import prod

from autoshard.rules.call import Call, Rule
from autoshard.rules.halo import Edges, Halo
from autoshard.rules.rule import Dims, OperatorRule
from autoshard.rules.space import Shape, Space
from autoshard.rules.windows import RANKS, Window, convolution_windows, pooling_windows


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
    at = _Places(
        space,
        convolution_windows(call, weight[2:]),
        small[batch + 1 :],
        large[batch + 1 :],
        exchanged=_is_symmetric(call, weight[2:], transposed=transposed),
    )
    before, after = (at.small, at.large) if transposed else (at.large, at.small)
    biases = call.positions("bias")
    rule = space.rule(
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
    return at.with_halo(rule, call, scattered=transposed, rebuilds=True)


def _is_symmetric(call: Call, kernel: Shape, *, transposed: bool) -> bool:
    """Whether a rank can run the operator on a slice with all edges instead of padding."""
    windows = convolution_windows(call, kernel)
    if transposed:
        # Otherwise places at the end of the large image belong to no window.
        return all(window.extent >= window.stride for window in windows)
    return all(window.padding == window.trailing for window in windows)


class _Places:
    """Letters of the places of two images, of which the large one has a window for each.

    Where each place of the small image has a stride of the large one, a place of the large one
    is (place of the small one, place in the stride). Then slices of both belong together.

    Args:
        space: where letters are from.
        windows: along each dim.
        small: the places of the small image.
        large: those of the large one.
        exchanged: whether ranks may exchange edges where windows overlap.

    Attributes:
        small: letters of each dim of the small image.
        large: letters of each dim of the large one.
    """

    def __init__(
        self,
        space: Space,
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
        """The rule with what ranks exchange.

        Args:
            rule: the rule.
            call: its call.
            scattered: whether the first input is the small image.
            rebuilds: whether backward needs the first input.
        """
        image = call.inputs[0]
        edges = {
            letter: Edges(
                len(image.shape) + dim, *(window.scattered() if scattered else window.gathered())
            )
            for dim, letter, window in self._windows
        }
        halo = Halo(
            edges=edges,
            image=rule.inputs[0],
            itemsize=image.dtype.itemsize,
            trimmed=rule.outputs[0] if scattered else (),
            rebuilds=rebuilds,
        )
        uneven = rule.uneven - edges.keys()
        return replace(rule, halo=halo, uneven=uneven) if edges else rule


def _pool(call: Call, *, rank: int, linear: bool) -> OperatorRule:
    """Windows over the last `rank` dims; samples and channels are independent."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    space = Space(call)
    kept = space.free_dims(before[:-rank])
    windows = pooling_windows(call, rank)
    at = _Places(
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

RULES: Mapping[str, Rule] = {
    **{f"aten.conv{r}d": _convolution for r in RANKS},
    "aten.conv_transpose1d.default": _transposed,
    "aten.conv_transpose2d.input": _transposed,
    "aten.conv_transpose3d.input": _transposed,
    **{f"aten.max_pool{r}d.default": partial(_pool, rank=r, linear=False) for r in RANKS},
    **{f"aten.avg_pool{r}d.default": partial(_pool, rank=r, linear=True) for r in RANKS},
    **{f"aten.adaptive_avg_pool{r}d.default": partial(_adaptive_pool, rank=r) for r in RANKS},
    "aten.upsample_linear1d.vec": partial(_upsample, rank=1),
    "aten.upsample_bilinear2d.vec": partial(_upsample, rank=2),
    "aten.upsample_bicubic2d.vec": partial(_upsample, rank=2),
    "aten.upsample_trilinear3d.vec": partial(_upsample, rank=3),
    **{f"aten.upsample_nearest{r}d.vec": partial(_upsample, rank=r, nearest=True) for r in RANKS},
    "aten.grid_sampler.default": _grid_sampler,
}
