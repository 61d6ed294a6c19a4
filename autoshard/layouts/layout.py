"""Layouts: one SPMD type per mesh axis, and the nesting order of axes that shard the same dim.

An SPMD type describes how one mesh axis divides a tensor and its gradient:

| type | forward value on the axis | its gradient on the axis |
|------|---------------------------|--------------------------|
| I    | same on every rank        | same on every rank       |
| R    | same on every rank        | partial: to be summed    |
| S(d) | slice along dim d         | slice along dim d        |
| P    | partial: to be summed     | same on every rank       |

The types, and the collectives that convert one to another, are those of the `spmd_types` package.

A dim may concatenate several sections, such as the queries, keys and values of a fused
projection. `S(d)/1+1+1` is an interleaved shard: each of three equal sections of dim d is sharded,
and a rank's shard consists of one sub-shard of each section, in order.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, lru_cache
from itertools import permutations, product
from math import gcd, prod

from autoshard.base.limits import count_made
from autoshard.errors import LayoutError


class Kind(StrEnum):
    """Kind of an SPMD type."""

    INVARIANT = "I"
    REPLICATE = "R"
    SHARD = "S"
    PARTIAL = "P"

    # Types are hashed often, and the hash of an enumeration is slow Python code.
    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True)
class AxisType:
    """SPMD type of a tensor on one mesh axis.

    Attributes:
        kind: invariant, replicated, sharded or partial.
        dim: the sharded tensor dim; -1 unless the kind is a shard.
        sub_shards: relative sizes of the sub-shards of an interleaved shard, without a common
            divisor; empty if the shard is one contiguous slice.
    """

    kind: Kind
    dim: int = -1
    sub_shards: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.kind is not Kind.SHARD:
            return self.kind.value
        sub_shards = "/" + "+".join(map(str, self.sub_shards)) if self.sub_shards else ""
        return f"S({self.dim}){sub_shards}"

    @property
    def num_units(self) -> int:
        """Sum of the relative sizes of the sub-shards; 1 for a contiguous shard."""
        return max(sum(self.sub_shards), 1)

    @property
    def is_shard(self) -> bool:
        """True if the axis shards a dim."""
        return self.kind is Kind.SHARD

    @property
    def is_replicated(self) -> bool:
        """True for `I` and `R`: every rank of the axis has the full value."""
        return self.kind in (Kind.INVARIANT, Kind.REPLICATE)


I = AxisType(Kind.INVARIANT)
R = AxisType(Kind.REPLICATE)
P = AxisType(Kind.PARTIAL)


@cache
def S(dim: int, sub_shards: tuple[int, ...] = ()) -> AxisType:  # noqa: N802  the usual notation
    """Return the type of a tensor that is sharded along a dim.

    Args:
        dim: the sharded dim, counted from 0.
        sub_shards: relative sizes of interleaved sub-shards; a single one is a contiguous shard.

    Raises:
        LayoutError: the dim is negative, or a sub-shard is empty.
    """
    if dim < 0:
        raise LayoutError(f"S({dim}): negative dims are not supported; count dims from 0")
    return AxisType(Kind.SHARD, dim, relative_sizes(sub_shards))


def relative_sizes(sub_shards: Sequence[int]) -> tuple[int, ...]:
    """Return sizes divided by their greatest common divisor; () for a single size.

    Raises:
        LayoutError: a size is less than 1.
    """
    if any(size < 1 for size in sub_shards):
        raise LayoutError(
            f"sub-shards of sizes {'+'.join(map(str, sub_shards))}: all must be at least 1"
        )
    common = gcd(*sub_shards)
    return tuple(size // common for size in sub_shards) if len(sub_shards) > 1 else ()


_SHARD = re.compile(r"S\((\d+)\)(?:/(\d+(?:\+\d+)+))?")
_PLAIN = {"I": I, "R": R, "P": P}


def parse_type(text: str) -> AxisType:
    """Parse the text form of a type: I, R, P, S(dim) or S(dim)/1+1.

    Raises:
        LayoutError: the text is none of these.
    """
    if text in _PLAIN:
        return _PLAIN[text]
    match = _SHARD.fullmatch(text)
    if match is None:
        raise LayoutError(f"{text!r} is not a type; write I, R, P, S(dim) or S(dim)/1+1")
    sub_shards = tuple(int(size) for size in match[2].split("+")) if match[2] else ()
    return S(int(match[1]), sub_shards)


@dataclass(frozen=True, slots=True)
class Layout:
    """SPMD types of a tensor on all mesh axes.

    If several axes shard one dim, the outermost axis shards the whole dim and the next axis shards
    each slice. Only the innermost axis can be gathered, and an axis that starts to shard the dim
    becomes the innermost one. All axes that shard one dim have the same sub-shards.

    Attributes:
        types: one type per mesh axis.
        nesting: for each dim whose axes do not nest in ascending order (dims ascending), its axes
            from outermost to innermost. Empty for nearly all layouts.
    """

    types: tuple[AxisType, ...]
    nesting: tuple[tuple[int, ...], ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Layouts are hashed far more often than constructed.
        object.__setattr__(self, "_hash", hash((self.types, self.nesting)))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        text = ",".join(str(t) for t in self.types)
        orders = "".join(";" + ">".join(map(str, order)) for order in self.nesting)
        return text + orders

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Parse the text form of a layout: `S(0),R` or `S(0),S(0);1>0`.

        Raises:
            LayoutError: the text is not a layout.
        """
        return _parse(text)

    @classmethod
    def nested(cls, types: Sequence[AxisType], order: Sequence[int]) -> "Layout":
        """Return the layout with these types whose axes nest in `order`, outermost first."""
        rank = {axis: i for i, axis in enumerate(order)}
        nesting = []
        for dim in sorted({t.dim for t in types if t.is_shard}):
            axes = sorted((a for a, t in enumerate(types) if t.dim == dim), key=rank.__getitem__)
            if axes != sorted(axes):
                nesting.append(tuple(axes))
        return cls(tuple(types), tuple(nesting))

    @property
    def is_partial(self) -> bool:
        """True if some axis is `P`: the tensor is the sum over the ranks of that axis."""
        return any(t.kind is Kind.PARTIAL for t in self.types)

    def sharding_axes(self, dim: int) -> tuple[int, ...]:
        """Mesh axes that shard a dim, outermost first."""
        axes = tuple(a for a, t in enumerate(self.types) if t.is_shard and t.dim == dim)
        return next((order for order in self.nesting if set(order) == set(axes)), axes)

    def sub_shards(self, dim: int) -> tuple[int, ...]:
        """Relative sizes of the interleaved sub-shards of a dim; () if it has none."""
        return next((t.sub_shards for t in self.types if t.dim == dim), ())

    def local_shape(self, shape: Sequence[int], axis_sizes: Sequence[int]) -> tuple[int, ...]:
        """Shape of the largest shard: that of every rank, except the last if shards are uneven.

        Raises:
            LayoutError: the size of an axis does not divide the dim or section that it shards,
                and uneven shards are not allowed there (`shards_unevenly`).
        """
        local = list(shape)
        for axis, axis_type in enumerate(self.types):
            if not axis_type.is_shard:
                continue
            dim, num_ranks = axis_type.dim, axis_sizes[axis]
            if dim >= len(local) or (
                local[dim] % (num_ranks * axis_type.num_units)
                and not self._shards_unevenly(dim, shape[dim], axis_sizes)
            ):
                raise LayoutError(
                    f"layout {self} does not divide shape {tuple(shape)} "
                    f"over axes of {tuple(axis_sizes)}"
                )
            local[dim] = largest_shard(local[dim], num_ranks)
        return tuple(local)

    def _shards_unevenly(self, dim: int, size: int, axis_sizes: Sequence[int]) -> bool:
        """True if a dim has uneven shards, which a single axis may have."""
        parts = [axis_sizes[axis] for axis in self.sharding_axes(dim) if axis_sizes[axis] > 1]
        return len(parts) == 1 and not self.sub_shards(dim) and shards_unevenly(size, parts[0])

    def local_slices(
        self, shape: Sequence[int], axis_sizes: Sequence[int], coordinate: Sequence[int]
    ) -> tuple[tuple[slice, ...], ...]:
        """Return the slices of the global tensor that make up a rank's shard.

        Args:
            shape: global shape.
            axis_sizes: size of each mesh axis.
            coordinate: coordinate of the rank on each mesh axis.

        Returns:
            For each dim, one slice per sub-shard, in order; a single slice if the dim is not
            interleaved.

        Raises:
            LayoutError: the shape cannot have this layout (see `local_shape`).
        """
        local = self.local_shape(shape, axis_sizes)
        return tuple(
            self._dim_slices(dim, size, local[dim], axis_sizes, coordinate)
            for dim, size in enumerate(shape)
        )

    def _dim_slices(
        self,
        dim: int,
        size: int,
        local_size: int,
        axis_sizes: Sequence[int],
        coordinate: Sequence[int],
    ) -> tuple[slice, ...]:
        sub_shards = self.sub_shards(dim) or (1,)
        index, start, slices = self.slice_index(dim, axis_sizes, coordinate), 0, []
        for relative in sub_shards:
            length = local_size * relative // sum(sub_shards)
            end = start + size * relative // sum(sub_shards)
            # The last slice of an uneven shard is shorter.
            slices.append(slice(start + index * length, min(start + (index + 1) * length, end)))
            start = end
        return tuple(slices)

    def slice_index(self, dim: int, axis_sizes: Sequence[int], coordinate: Sequence[int]) -> int:
        """Index of a rank's slice along a dim (or along each section of it)."""
        index = 0
        for axis in self.sharding_axes(dim):
            index = index * axis_sizes[axis] + coordinate[axis]
        return index

    def is_legal(self, shape: Sequence[int], axis_sizes: Sequence[int]) -> bool:
        """True if a tensor of this shape can have this layout.

        The axes of each dim must divide it, unless a single axis shards it unevenly
        (`shards_unevenly`), and must have the same sub-shards.
        """
        if len(self.types) != len(axis_sizes) or any(t.dim >= len(shape) for t in self.types):
            return False
        divides = all(
            size % self.num_parts(dim, axis_sizes) == 0
            or self._shards_unevenly(dim, size, axis_sizes)
            for dim, size in enumerate(shape)
        )
        return divides and not self.mixes_sub_shards

    def num_parts(self, dim: int, axis_sizes: Sequence[int]) -> int:
        """Number that the size of a dim must be a multiple of for even shards."""
        units = max((t.num_units for t in self.types if t.dim == dim), default=1)
        return units * prod(axis_sizes[axis] for axis in self.sharding_axes(dim))

    @property
    def mixes_sub_shards(self) -> bool:
        """True if two axes shard one dim with different sub-shards, which is illegal."""
        if not any(t.sub_shards for t in self.types):
            return False
        shards = {t for t in self.types if t.is_shard}
        return len(shards) > len({t.dim for t in shards})

    def replace_all(self, axes: Sequence[int], axis_type: AxisType) -> "Layout":
        """Return this layout with the type of several axes of one type replaced.

        Args:
            axes: the axes, outermost first.
            axis_type: their new type.

        Raises:
            LayoutError: the axes have different types, they are not the innermost ones, in this
                order, on the dim that they shard, or as for `replace`.
        """
        old = {self.types[axis] for axis in axes}
        if len(old) > 1:
            raise LayoutError(f"axes {tuple(axes)} of {self} have different types")
        self._check_sub_shards(axis_type)
        # Taken off innermost first, and put on outermost first, since only the innermost axis of a
        # dim may change. Meanwhile they are P, which shards nothing.
        layout = self
        for axis in reversed(axes):
            layout = layout.replace(axis, P)
        for axis in axes:
            layout = layout.replace(axis, axis_type)
        return layout

    def replace(self, axis: int, axis_type: AxisType) -> "Layout":
        """Return this layout with the type of one axis replaced.

        Raises:
            LayoutError: the axis is not the innermost one on the dim that it shards, or its new
                sub-shards differ from those of the dim's other axes.
        """
        old = self.types[axis]
        if old.is_shard and self.sharding_axes(old.dim)[-1] != axis:
            raise LayoutError(f"axis {axis} of {self} is not innermost on dim {old.dim}")
        self._check_sub_shards(axis_type)
        types = list(self.types)
        types[axis] = axis_type
        orders = {self.types[order[0]].dim: order for order in self.nesting}
        if old.is_shard and old.dim in orders:
            orders[old.dim] = orders[old.dim][:-1]
        if axis_type.is_shard:
            orders[axis_type.dim] = (*self.sharding_axes(axis_type.dim), axis)
        nesting = tuple(o for _, o in sorted(orders.items()) if list(o) != sorted(o))
        return Layout(tuple(types), nesting)

    def _check_sub_shards(self, axis_type: AxisType) -> None:
        if any(t.dim == axis_type.dim and t.sub_shards != axis_type.sub_shards for t in self.types):
            raise LayoutError(
                f"{self} and {axis_type} have different sub-shards of dim {axis_type.dim}"
            )


def largest_shard(size: int, parts: int) -> int:
    """Size of each shard of a dim except the last, which may be smaller (as in `torch.chunk`)."""
    return -(-size // parts)


def shards_unevenly(size: int, parts: int) -> bool:
    """True if a dim is not divisible by an axis and every rank still gets a non-empty shard.

    As in DTensor, each rank except the last has `largest_shard(size, parts)` elements and the last
    one has the remainder. Allowed only if a single axis shards the dim, without sub-shards.

    Args:
        size: size of the dim.
        parts: number of ranks of the axis.
    """
    return size % parts != 0 and (parts - 1) * largest_shard(size, parts) < size


def can_be_sharded(size: int, parts: int) -> bool:
    """True if a single axis of `parts` ranks can shard a dim, evenly or unevenly."""
    return size % parts == 0 or shards_unevenly(size, parts)


@lru_cache(maxsize=65536)
def _parse(text: str) -> Layout:
    head, *orders = text.split(";")
    try:
        nesting = tuple(tuple(int(axis) for axis in order.split(">")) for order in orders)
    except ValueError:
        raise LayoutError(f"{text!r}: a nesting order must look like ';1>0'") from None
    types = tuple(parse_type(part) for part in head.split(",")) if head else ()
    return _checked(Layout(types, nesting), text)


def _checked(layout: Layout, text: str) -> Layout:
    if layout.mixes_sub_shards:
        raise LayoutError(f"{text!r} shards one dim with different sub-shards")
    dims: list[int] = []
    for order in layout.nesting:
        sharded = {layout.types[a].dim if a < len(layout.types) else -1 for a in order}
        axes = [a for a, t in enumerate(layout.types) if t.is_shard and {t.dim} == sharded]
        if len(sharded) != 1 or sorted(order) != axes or list(order) == axes:
            raise LayoutError(
                f"{text!r}: {order} is not a non-ascending order of the axes that shard one dim"
            )
        dims.extend(sharded)
    if dims != sorted(set(dims)):
        raise LayoutError(f"{text!r}: list one nesting order per dim, dims ascending")
    return layout


def legal_layouts(
    shape: Sequence[int],
    axis_sizes: Sequence[int],
    *,
    differentiable: bool,
    partial: bool = True,
    interleaved: Collection[AxisType] = (),
) -> tuple[Layout, ...]:
    """Return all layouts that a tensor of this shape can have, in a deterministic order.

    Args:
        shape: global shape.
        axis_sizes: size of each mesh axis.
        differentiable: True if the tensor has a gradient; if not, I and R are the same, written R.
        partial: True if the element type can be summed, so that `P` is possible.
        interleaved: interleaved shard types to include.
    """
    whole = (I, R) if differentiable else (R,)
    options = (*whole, *[P] * partial, *(S(d) for d in range(len(shape))), *interleaved)
    # Only the common divisors with the axes matter, so many shapes share one cache entry.
    parts = prod(axis_sizes) * prod(sum(t.sub_shards) for t in interleaved)
    divisors = tuple(gcd(size, parts) for size in shape)
    return _legal_layouts(divisors, uneven_shards(shape, axis_sizes), tuple(axis_sizes), options)


def uneven_shards(shape: Sequence[int], axis_sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the (axis, dim) pairs where the axis alone would shard the dim unevenly."""
    return tuple(
        (axis, dim)
        for axis, parts in enumerate(axis_sizes)
        for dim, size in enumerate(shape)
        if shards_unevenly(size, parts)
    )


@lru_cache(maxsize=1 << 10)
def _legal_layouts(
    divisors: tuple[int, ...],
    uneven: tuple[tuple[int, int], ...],
    axis_sizes: tuple[int, ...],
    options: tuple[AxisType, ...],
) -> tuple[Layout, ...]:
    """Legal layouts whose types are among the options, in the order of the options."""

    def divides(axis: int, shard: AxisType) -> bool:
        even = divisors[shard.dim] % (axis_sizes[axis] * shard.num_units) == 0
        return even or (not shard.sub_shards and (axis, shard.dim) in uneven)

    alone = [
        [t for t in options if not t.is_shard or divides(axis, t)]
        for axis in range(len(axis_sizes))
    ]
    found: list[Layout] = []
    for types in product(*alone):
        count_made(0)
        dims = [t.dim for t in types if t.is_shard]
        shared = {dim for dim in dims if dims.count(dim) > 1}
        layout = Layout(types)
        if not shared:
            count_made()
            found.append(layout)
        elif not layout.mixes_sub_shards and all(
            divisors[dim] % layout.num_parts(dim, axis_sizes) == 0 for dim in shared
        ):
            found.extend(_nestings(types))
    return tuple(found)


def _nestings(types: tuple[AxisType, ...]) -> Iterator[Layout]:
    dims = sorted({t.dim for t in types if t.is_shard})
    groups = [[a for a, t in enumerate(types) if t.dim == dim] for dim in dims]
    for orders in product(*(permutations(group) for group in groups)):
        count_made()
        yield Layout(types, tuple(o for o in orders if list(o) != sorted(o)))
