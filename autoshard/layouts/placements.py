"""Translation of layouts to DTensor placements and back.

A layout has more information than placements: `I` and `R` are both `Replicate()`, since DTensor
does not track the type of the gradient. In the other direction the caller chooses I or R.

DTensor shards a dim by its axes in mesh order. If a layout nests them in another order, an axis
that is inner to axes later in the mesh is `_StridedShard(dim, split_factor=k)`, where k is the
number of slices that those later axes make. An interleaved shard with k equal sub-shards has the
same form. Sub-shards of different sizes have no placement. Several axes with sub-shards of one dim
would have one, but torch 2.13 reassembles it in the wrong order, so it is treated as unsupported.
"""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from math import prod
from typing import TYPE_CHECKING

from autoshard.errors import LayoutError
from autoshard.layouts.layout import AxisType, I, Kind, Layout, P, S

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

_TEXT = re.compile(
    r"Replicate\(\)|Partial\(sum\)|Shard\(dim=(?P<dim>\d+)\)"
    r"|_StridedShard\(dim=(?P<strided>\d+), sf=(?P<factor>\d+)\)"
)


def placement_texts(layout: Layout, axis_sizes: Sequence[int]) -> tuple[str, ...]:
    """Return the text of the DTensor placement of a layout on each mesh axis.

    Raises:
        LayoutError: DTensor has no placement for the sub-shards.
    """
    return tuple(
        _text(layout, axis, axis_type, axis_sizes) for axis, axis_type in enumerate(layout.types)
    )


def _text(layout: Layout, axis: int, axis_type: AxisType, axis_sizes: Sequence[int]) -> str:
    if axis_type.is_replicated:
        return "Replicate()"
    if axis_type.kind is Kind.PARTIAL:
        return "Partial(sum)"
    factor = _split_factor(layout, axis, axis_sizes)
    if factor == 1:
        return f"Shard(dim={axis_type.dim})"
    return f"_StridedShard(dim={axis_type.dim}, sf={factor})"


def _split_factor(layout: Layout, axis: int, axis_sizes: Sequence[int]) -> int:
    """DTensor's `split_factor` of a shard: number of sub-shards, or slices of later mesh axes."""
    shard = layout.types[axis]
    if shard.sub_shards:
        if not has_placements(layout):
            raise LayoutError(f"{layout}: DTensor has no placement for these sub-shards")
        return len(shard.sub_shards)
    order = layout.sharding_axes(shard.dim)
    outer = order[: order.index(axis)]
    return prod(axis_sizes[other] for other in outer if other > axis)


def has_placements(layout: Layout) -> bool:
    """True if DTensor can express a layout: equal sub-shards, and one axis per interleaved dim."""
    return all(
        len(set(t.sub_shards)) <= 1 and (not t.sub_shards or len(layout.sharding_axes(t.dim)) == 1)
        for t in layout.types
    )


def layout_of_texts(
    texts: Sequence[str], axis_sizes: Sequence[int], *, whole: AxisType = I
) -> Layout:
    """Return the layout for the text of DTensor placements.

    Args:
        texts: one per mesh axis, as `placement_texts` writes them.
        axis_sizes: size of each mesh axis.
        whole: type to use for `Replicate()`, I or R.

    Raises:
        LayoutError: a text is not a placement, or no nesting order gives these split factors.
    """
    types: list[AxisType] = []
    factors: list[int] = []
    for text in texts:
        match = _TEXT.fullmatch(text)
        if match is None:
            raise LayoutError(f"{text!r} is not a placement that a layout can express")
        dim = match["dim"] or match["strided"]
        types.append(S(int(dim)) if dim else whole if text == "Replicate()" else P)
        factors.append(int(match["factor"] or 1))
    alone = {t for t, count in Counter(types).items() if t.is_shard and count == 1}
    types = [
        S(t.dim, (1,) * factor) if t in alone else t
        for t, factor in zip(types, factors, strict=True)
    ]
    for layout in _orders(types):
        if placement_texts(layout, axis_sizes) == tuple(texts):
            return layout
    raise LayoutError(f"no nesting of the axes gives the placements {tuple(texts)}")


def _orders(types: Sequence[AxisType]) -> list[Layout]:
    axes = range(len(types))
    return list(dict.fromkeys(Layout.nested(types, order) for order in permutations(axes)))


def to_placements(layout: Layout, axis_sizes: Sequence[int]) -> tuple["Placement", ...]:
    """Return the DTensor placement of a layout on each mesh axis.

    Raises:
        LayoutError: DTensor has no placement for the sub-shards.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: PLC0415  torch is slow

    from autoshard.torch_private import strided_shard  # noqa: PLC0415

    placements: list[Placement] = []
    for axis, axis_type in enumerate(layout.types):
        if axis_type.is_replicated:
            placements.append(Replicate())
        elif axis_type.kind is Kind.PARTIAL:
            placements.append(Partial("sum"))
        elif (factor := _split_factor(layout, axis, axis_sizes)) == 1:
            placements.append(Shard(axis_type.dim))
        else:
            placements.append(strided_shard(axis_type.dim, factor))
    return tuple(placements)


def from_placements(placements: Sequence["Placement"], axis_sizes: Sequence[int]) -> Layout:
    """Return the layout for DTensor placements; `Replicate()` is I.

    Raises:
        LayoutError: no layout can express a placement, such as a partial maximum.
    """
    return layout_of_texts([_describe(p) for p in placements], axis_sizes)


def _describe(placement: "Placement") -> str:
    if placement.is_replicate():
        return "Replicate()"
    # The partial norm of DTensor is a subclass, of ranks whose norms are no summands.
    if placement.is_partial("sum") and type(placement).__name__ == "Partial":
        return "Partial(sum)"
    factor = getattr(placement, "split_factor", None)
    dim = getattr(placement, "dim", None)
    if dim is None:
        return str(placement)
    return f"Shard(dim={dim})" if factor is None else f"_StridedShard(dim={dim}, sf={factor})"
