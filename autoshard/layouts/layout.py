"""Layouts: one SPMD type per mesh axis, and how axes nest where several shard one dim.

A type says how one axis divides a tensor, forward and backward:

| type | forward value on the axis | its gradient on the axis |
|------|---------------------------|--------------------------|
| I    | same on every rank        | same on every rank       |
| R    | same on every rank        | partial: to be summed    |
| S(d) | slice along dim d         | slice along dim d        |
| P    | partial: to be summed     | same on every rank       |

These are the types of the `spmd_types` package, which also defines the collectives that
lead from one to another.

A dim may hold several things one after the other, as the queries, keys and values that one
product makes. `S(d)/1+1+1` cuts each of three equal chunks of dim d: a rank holds its slice of
the first, then of the second, then of the third.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, lru_cache
from itertools import permutations, product
from math import gcd, prod

from autoshard.errors import LayoutError


class Kind(StrEnum):
    """The four kinds of type."""

    INVARIANT = "I"
    REPLICATE = "R"
    SHARD = "S"
    PARTIAL = "P"

    # Types are hashed often, and an enumeration would do it in Python.
    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True)
class AxisType:
    """One type.

    Attributes:
        kind: which of the four.
        dim: what is cut; set exactly when the kind is a shard.
        chunks: relative sizes of the chunks of the dim that are cut one by one, without a
            common divisor; empty where the dim is cut as one.
    """

    kind: Kind
    dim: int = -1
    chunks: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.kind is not Kind.SHARD:
            return self.kind.value
        return f"S({self.dim})" + ("/" + "+".join(map(str, self.chunks)) if self.chunks else "")

    @property
    def num_units(self) -> int:
        """The least size of a dim that can be made of the chunks."""
        return max(sum(self.chunks), 1)

    @property
    def is_shard(self) -> bool:
        """Whether the axis cuts a dim."""
        return self.kind is Kind.SHARD

    @property
    def is_whole(self) -> bool:
        """Whether every rank of the axis holds the whole value."""
        return self.kind in (Kind.INVARIANT, Kind.REPLICATE)


I = AxisType(Kind.INVARIANT)
R = AxisType(Kind.REPLICATE)
P = AxisType(Kind.PARTIAL)


@cache
def S(dim: int, chunks: tuple[int, ...] = ()) -> AxisType:  # noqa: N802  its name in every paper
    """The type that cuts dim `dim` (counted from 0), or each chunk of it, into equal slices.

    Args:
        dim: what is cut.
        chunks: sizes of the chunks, up to a common factor; one chunk is the whole dim.

    Raises:
        LayoutError: the dim is negative, or a chunk is empty.
    """
    if dim < 0:
        raise LayoutError(f"S({dim}) counts from the end; give the dim from the front")
    return AxisType(Kind.SHARD, dim, reduced(chunks))


def reduced(chunks: Sequence[int]) -> tuple[int, ...]:
    """Relative sizes of chunks without a common divisor; () for a single chunk.

    Raises:
        LayoutError: a chunk is empty.
    """
    if any(size < 1 for size in chunks):
        raise LayoutError(f"chunks of the sizes {'+'.join(map(str, chunks))}: none may be empty")
    common = gcd(*chunks)
    return tuple(size // common for size in chunks) if len(chunks) > 1 else ()


_SHARD = re.compile(r"S\((\d+)\)(?:/(\d+(?:\+\d+)+))?")
_PLAIN = {"I": I, "R": R, "P": P}


def parse_type(text: str) -> AxisType:
    """Read a type as `str` writes it: I, R, P, S(dim) or S(dim)/1+1."""
    if text in _PLAIN:
        return _PLAIN[text]
    match = _SHARD.fullmatch(text)
    if match is None:
        raise LayoutError(f"{text!r} is not a type; write I, R, P, S(dim) or S(dim)/1+1")
    chunks = tuple(int(size) for size in match[2].split("+")) if match[2] else ()
    return S(int(match[1]), chunks)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies over the mesh.

    Where several axes cut one dim, the outermost axis cuts the whole dim and the next one
    cuts each slice. Only the innermost can be gathered, and a new cut goes innermost. All
    axes that cut one dim cut the same chunks of it.

    Attributes:
        types: one type per mesh axis.
        nesting: for each dim whose cutting axes do not nest in ascending order (dims
            ascending), those axes from outermost to innermost. Empty for nearly all layouts.
    """

    types: tuple[AxisType, ...]
    nesting: tuple[tuple[int, ...], ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Layouts are looked up far more often than made.
        object.__setattr__(self, "_hash", hash((self.types, self.nesting)))

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        text = ",".join(str(t) for t in self.types)
        orders = "".join(";" + ">".join(map(str, order)) for order in self.nesting)
        return text + orders

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read a layout as `str` writes it: `S(0),R` or `S(0),S(0);1>0`."""
        return _parse(text)

    @classmethod
    def nested(cls, types: Sequence[AxisType], order: Sequence[int]) -> "Layout":
        """The layout with these types whose axes nest in `order`, outermost first."""
        rank = {axis: i for i, axis in enumerate(order)}
        nesting = []
        for dim in sorted({t.dim for t in types if t.is_shard}):
            axes = sorted((a for a, t in enumerate(types) if t.dim == dim), key=rank.__getitem__)
            if axes != sorted(axes):
                nesting.append(tuple(axes))
        return cls(tuple(types), tuple(nesting))

    @property
    def is_partial(self) -> bool:
        """Whether the tensor is a sum over the ranks of some axis."""
        return any(t.kind is Kind.PARTIAL for t in self.types)

    def sharding_axes(self, dim: int) -> tuple[int, ...]:
        """The axes that cut a dim, outermost first."""
        axes = tuple(a for a, t in enumerate(self.types) if t.is_shard and t.dim == dim)
        return next((order for order in self.nesting if set(order) == set(axes)), axes)

    def chunks(self, dim: int) -> tuple[int, ...]:
        """Relative sizes of the chunks of a dim that are cut one by one; () where it is one."""
        return next((t.chunks for t in self.types if t.dim == dim), ())

    def local_shape(self, shape: Sequence[int], axis_sizes: Sequence[int]) -> tuple[int, ...]:
        """Shape of the largest slice that a rank holds: that of all ranks, or of all but the last.

        Raises:
            LayoutError: an axis does not divide the dim it cuts, or a chunk of it, and may not
                cut it into slices of unequal length (`shards_unevenly`).
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
            local[dim] = largest_share(local[dim], num_ranks)
        return tuple(local)

    def _shards_unevenly(self, dim: int, size: int, axis_sizes: Sequence[int]) -> bool:
        """Whether a dim is cut into slices of unequal length, as one axis alone may."""
        parts = [axis_sizes[axis] for axis in self.sharding_axes(dim) if axis_sizes[axis] > 1]
        return len(parts) == 1 and not self.chunks(dim) and shards_unevenly(size, parts[0])

    def local_slices(
        self, shape: Sequence[int], axis_sizes: Sequence[int], coordinate: Sequence[int]
    ) -> tuple[tuple[slice, ...], ...]:
        """The part of the whole tensor that a rank holds.

        Args:
            shape: global shape.
            axis_sizes: size of each mesh axis.
            coordinate: the rank's place on each mesh axis.

        Returns:
            For each dim what is held of each of its chunks, in order; of most dims there is
            one.

        Raises:
            LayoutError: as `local_shape`.
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
        held: int,
        axis_sizes: Sequence[int],
        coordinate: Sequence[int],
    ) -> tuple[slice, ...]:
        chunks = self.chunks(dim) or (1,)
        index, start, slices = self.slice_index(dim, axis_sizes, coordinate), 0, []
        for chunk in chunks:
            part = held * chunk // sum(chunks)
            end = start + size * chunk // sum(chunks)
            # The last slice is shorter where an axis does not divide the dim.
            slices.append(slice(start + index * part, min(start + (index + 1) * part, end)))
            start = end
        return tuple(slices)

    def slice_index(self, dim: int, axis_sizes: Sequence[int], coordinate: Sequence[int]) -> int:
        """Number of a rank's slice of one dim, or of each chunk of it, counted along the dim."""
        index = 0
        for axis in self.sharding_axes(dim):
            index = index * axis_sizes[axis] + coordinate[axis]
        return index

    def is_legal(self, shape: Sequence[int], axis_sizes: Sequence[int]) -> bool:
        """Whether axes may cut the dims as they do, and cut a dim in the same chunks.

        They divide it, or one alone cuts it into slices of unequal length (`shards_unevenly`).
        """
        if len(self.types) != len(axis_sizes) or any(t.dim >= len(shape) for t in self.types):
            return False
        may_cut = all(
            size % self.num_parts(dim, axis_sizes) == 0
            or self._shards_unevenly(dim, size, axis_sizes)
            for dim, size in enumerate(shape)
        )
        return may_cut and not self.mixes_sub_shards

    def num_parts(self, dim: int, axis_sizes: Sequence[int]) -> int:
        """What a dim must be a multiple of to be cut into equal slices."""
        units = max((t.num_units for t in self.types if t.dim == dim), default=1)
        return units * prod(axis_sizes[axis] for axis in self.sharding_axes(dim))

    @property
    def mixes_sub_shards(self) -> bool:
        """Whether axes cut one dim in different chunks, which no tensor can lie in."""
        if not any(t.chunks for t in self.types):
            return False
        cuts = {t for t in self.types if t.is_shard}
        return len(cuts) > len({t.dim for t in cuts})

    def replace(self, axis: int, axis_type: AxisType) -> "Layout":
        """This layout after one step on one axis.

        Raises:
            LayoutError: the axis cuts a dim that another axis cuts further inside, or would
                cut a dim in other chunks than it is cut in.
        """
        old = self.types[axis]
        if old.is_shard and self.sharding_axes(old.dim)[-1] != axis:
            raise LayoutError(f"axis {axis} of {self} is not innermost on dim {old.dim}")
        if any(t.dim == axis_type.dim and t.chunks != axis_type.chunks for t in self.types):
            raise LayoutError(f"{self} cuts dim {axis_type.dim} in other chunks than {axis_type}")
        types = list(self.types)
        types[axis] = axis_type
        orders = {self.types[order[0]].dim: order for order in self.nesting}
        if old.is_shard and old.dim in orders:
            orders[old.dim] = orders[old.dim][:-1]
        if axis_type.is_shard:
            orders[axis_type.dim] = (*self.sharding_axes(axis_type.dim), axis)
        nesting = tuple(o for _, o in sorted(orders.items()) if list(o) != sorted(o))
        return Layout(tuple(types), nesting)


def largest_share(size: int, parts: int) -> int:
    """Length of the slices of a dim but the last, which may be shorter: that of `torch.chunk`."""
    return -(-size // parts)


def shards_unevenly(size: int, parts: int) -> bool:
    """Whether an axis cuts a dim that it does not divide, as DTensor does: none gets nothing.

    Each rank but the last has `largest_share(size, parts)`, the last one what is left. Only an
    axis that alone cuts a dim, and cuts it as one, may do so.

    Args:
        size: of the dim.
        parts: ranks of the axis.
    """
    return size % parts != 0 and (parts - 1) * largest_share(size, parts) < size


def can_be_sharded(size: int, parts: int) -> bool:
    """Whether an axis of so many ranks may alone cut a dim, into slices of equal length or not."""
    return size % parts == 0 or shards_unevenly(size, parts)


@lru_cache(maxsize=65536)
def _parse(text: str) -> Layout:
    head, *orders = text.split(";")
    try:
        nesting = tuple(tuple(int(axis) for axis in order.split(">")) for order in orders)
    except ValueError:
        raise LayoutError(f"{text!r}: a nesting order reads like ';1>0'") from None
    types = tuple(parse_type(part) for part in head.split(",")) if head else ()
    return _checked(Layout(types, nesting), text)


def _checked(layout: Layout, text: str) -> Layout:
    if layout.mixes_sub_shards:
        raise LayoutError(f"{text!r} cuts one dim in different chunks")
    dims: list[int] = []
    for order in layout.nesting:
        cut = {layout.types[a].dim if a < len(layout.types) else -1 for a in order}
        axes = [a for a, t in enumerate(layout.types) if t.is_shard and {t.dim} == cut]
        if len(cut) != 1 or sorted(order) != axes or list(order) == axes:
            raise LayoutError(f"{text!r}: {order} does not reorder the axes that cut one dim")
        dims.extend(cut)
    if dims != sorted(set(dims)):
        raise LayoutError(f"{text!r}: nesting orders are listed once per dim, dims ascending")
    return layout


def legal_layouts(
    shape: Sequence[int],
    axis_sizes: Sequence[int],
    *,
    differentiable: bool,
    partial: bool = True,
    chunked: Collection[AxisType] = (),
) -> tuple[Layout, ...]:
    """Every layout that a tensor of this shape can have, in a fixed order.

    Args:
        shape: global shape.
        axis_sizes: size of each mesh axis.
        differentiable: without a gradient I and R are one type, written R.
        partial: whether the element type can be summed.
        chunked: the types with chunks that there may be.
    """
    whole = (I, R) if differentiable else (R,)
    options = (*whole, *[P] * partial, *(S(d) for d in range(len(shape))), *chunked)
    # Of a size only the divisors count that cuts can have, so many shapes are one.
    parts = prod(axis_sizes) * prod(sum(t.chunks) for t in chunked)
    divisors = tuple(gcd(size, parts) for size in shape)
    return _legal_layouts(divisors, uneven_shards(shape, axis_sizes), tuple(axis_sizes), options)


def uneven_shards(shape: Sequence[int], axis_sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The axes that cut a dim into slices of unequal length, where they alone do: (axis, dim)."""
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
    """The legal layouts whose types are among the options, in their order."""

    def divides(axis: int, cut: AxisType) -> bool:
        even = divisors[cut.dim] % (axis_sizes[axis] * cut.num_units) == 0
        return even or (not cut.chunks and (axis, cut.dim) in uneven)

    alone = [
        [t for t in options if not t.is_shard or divides(axis, t)]
        for axis in range(len(axis_sizes))
    ]
    found: list[Layout] = []
    for types in product(*alone):
        dims = [t.dim for t in types if t.is_shard]
        shared = {dim for dim in dims if dims.count(dim) > 1}
        layout = Layout(types)
        if not shared:
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
        yield Layout(types, tuple(o for o in orders if list(o) != sorted(o)))
