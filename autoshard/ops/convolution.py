"""Convolutions, pooling and resampling of images, sounds and videos.

Samples, channels and groups may be cut, and places where each stride of the large image has one
place of the small one. Where windows overlap, ranks exchange the edges of their slices (`Halo`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from math import prod

from autoshard.ops.call import Call, Rule
from autoshard.ops.halo import Edges, Halo
from autoshard.ops.rule import Dims, OperatorRule
from autoshard.ops.space import Shape, Space
from autoshard.ops.windows import (
    INTERPOLATIONS,
    RANKS,
    Window,
    convolution_windows,
    interpolation_reach,
    pooling_windows,
)


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
    windows = convolution_windows(call, weight[2:])
    exchanged = _is_symmetric(call, weight[2:], transposed=transposed)
    at = _Places(space, windows, small[batch + 1 :], large[batch + 1 :], exchanged=exchanged)
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
    """The rule with the edges that letters need, which are cut evenly.

    Args:
        rule: the rule.
        call: its call.
        edges: of each letter.
        trims: whether more is made of an extended slice than is the rank's.
        rebuilds: whether backward needs the first input.
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


def _upsample(call: Call, *, rank: int, reach: int = 0) -> OperatorRule:
    """Each place becomes a whole number of places, made of so many neighbours to either side."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    space = Space(call)
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
    **{
        f"aten.upsample_{name}.vec": partial(
            _upsample, rank=int(name[-2]), reach=interpolation_reach(name)
        )
        for name in INTERPOLATIONS
    },
    **{f"aten.upsample_nearest{r}d.vec": partial(_upsample, rank=r) for r in RANKS},
    "aten.grid_sampler.default": _grid_sampler,
}
