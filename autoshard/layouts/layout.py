"""A layout: one type per mesh axis, and how axes nest where several cut one dim."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import permutations, product
from math import gcd, prod

from autoshard.errors import LayoutError
from autoshard.layouts.types import AxisType, I, P, R, S, parse_type


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

    def cutting_axes(self, dim: int) -> tuple[int, ...]:
        """The axes that cut a dim, outermost first."""
        axes = tuple(a for a, t in enumerate(self.types) if t.is_shard and t.dim == dim)
        return next((order for order in self.nesting if set(order) == set(axes)), axes)

    def chunks(self, dim: int) -> tuple[int, ...]:
        """Relative sizes of the chunks of a dim that are cut one by one; () where it is one."""
        return next((t.chunks for t in self.types if t.dim == dim), ())

    def local_shape(self, shape: Sequence[int], axis_sizes: Sequence[int]) -> tuple[int, ...]:
        """Shape of one rank's slice.

        Raises:
            LayoutError: an axis does not divide the dim it cuts, or a chunk of it.
        """
        local = list(shape)
        for axis, axis_type in enumerate(self.types):
            if not axis_type.is_shard:
                continue
            parts = axis_sizes[axis] * axis_type.num_units
            if axis_type.dim >= len(local) or local[axis_type.dim] % parts:
                raise LayoutError(
                    f"layout {self} does not divide shape {tuple(shape)} "
                    f"over axes of {tuple(axis_sizes)}"
                )
            local[axis_type.dim] //= axis_sizes[axis]
        return tuple(local)

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
            LayoutError: an axis does not divide the dim it cuts, or a chunk of it.
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
            slices.append(slice(start + index * part, start + (index + 1) * part))
            start += size * chunk // sum(chunks)
        return tuple(slices)

    def slice_index(self, dim: int, axis_sizes: Sequence[int], coordinate: Sequence[int]) -> int:
        """Number of a rank's slice of one dim, or of each chunk of it, counted along the dim."""
        index = 0
        for axis in self.cutting_axes(dim):
            index = index * axis_sizes[axis] + coordinate[axis]
        return index

    def is_legal(self, shape: Sequence[int], axis_sizes: Sequence[int]) -> bool:
        """Whether every axis divides the dim it cuts, and axes cut a dim in the same chunks."""
        if len(self.types) != len(axis_sizes) or any(t.dim >= len(shape) for t in self.types):
            return False
        parts = (
            max((t.num_units for t in self.types if t.dim == dim), default=1)
            * prod(axis_sizes[a] for a in self.cutting_axes(dim))
            for dim in range(len(shape))
        )
        divides = all(size % n == 0 for size, n in zip(shape, parts, strict=True))
        return divides and not self.mixes_chunks

    @property
    def mixes_chunks(self) -> bool:
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
        if old.is_shard and self.cutting_axes(old.dim)[-1] != axis:
            raise LayoutError(f"axis {axis} of {self} is not innermost on dim {old.dim}")
        if any(t.dim == axis_type.dim and t.chunks != axis_type.chunks for t in self.types):
            raise LayoutError(f"{self} cuts dim {axis_type.dim} in other chunks than {axis_type}")
        types = list(self.types)
        types[axis] = axis_type
        orders = {self.types[order[0]].dim: order for order in self.nesting}
        if old.is_shard and old.dim in orders:
            orders[old.dim] = orders[old.dim][:-1]
        if axis_type.is_shard:
            orders[axis_type.dim] = (*self.cutting_axes(axis_type.dim), axis)
        nesting = tuple(o for _, o in sorted(orders.items()) if list(o) != sorted(o))
        return Layout(tuple(types), nesting)


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
    if layout.mixes_chunks:
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
    return _legal_layouts(tuple(gcd(size, parts) for size in shape), tuple(axis_sizes), options)


@lru_cache(maxsize=1 << 10)
def _legal_layouts(
    shape: tuple[int, ...], axis_sizes: tuple[int, ...], options: tuple[AxisType, ...]
) -> tuple[Layout, ...]:
    """The legal layouts whose types are among the options, in their order."""
    alone = [
        [t for t in options if not t.is_shard or shape[t.dim] % (n * t.num_units) == 0]
        for n in axis_sizes
    ]
    found: list[Layout] = []
    for types in product(*alone):
        dims = [t.dim for t in types if t.is_shard]
        if len(set(dims)) == len(dims):
            found.append(Layout(types))
        elif Layout(types).is_legal(shape, axis_sizes):
            found.extend(_nestings(types))
    return tuple(found)


def _nestings(types: tuple[AxisType, ...]) -> Iterator[Layout]:
    dims = sorted({t.dim for t in types if t.is_shard})
    groups = [[a for a, t in enumerate(types) if t.dim == dim] for dim in dims]
    for orders in product(*(permutations(group) for group in groups)):
        yield Layout(types, tuple(o for o in orders if list(o) != sorted(o)))
