"""A layout: one type per mesh axis, and how axes nest where several cut one dim."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import permutations, product
from math import prod

from autoshard.errors import LayoutError
from autoshard.layouts.types import AxisType, I, P, R, S, parse_type


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies over the mesh.

    Where several axes cut one dim, the outermost axis cuts the whole dim and the next one
    cuts each slice. Only the innermost can be gathered, and a new cut goes innermost.

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

    def local_shape(self, shape: Sequence[int], axis_sizes: Sequence[int]) -> tuple[int, ...]:
        """Shape of one rank's slice.

        Raises:
            LayoutError: an axis does not divide the dim it cuts.
        """
        local = list(shape)
        for axis, axis_type in enumerate(self.types):
            if not axis_type.is_shard:
                continue
            if axis_type.dim >= len(local) or local[axis_type.dim] % axis_sizes[axis]:
                raise LayoutError(
                    f"layout {self} does not divide shape {tuple(shape)} "
                    f"over axes of {tuple(axis_sizes)}"
                )
            local[axis_type.dim] //= axis_sizes[axis]
        return tuple(local)

    def local_slices(
        self, shape: Sequence[int], axis_sizes: Sequence[int], coordinate: Sequence[int]
    ) -> tuple[slice, ...]:
        """The part of the whole tensor that a rank holds, one slice per dim.

        Args:
            shape: global shape.
            axis_sizes: size of each mesh axis.
            coordinate: the rank's place on each mesh axis.

        Raises:
            LayoutError: an axis does not divide the dim it cuts.
        """
        local = self.local_shape(shape, axis_sizes)
        indices = (self.slice_index(dim, axis_sizes, coordinate) for dim in range(len(local)))
        return tuple(slice(i * n, (i + 1) * n) for i, n in zip(indices, local, strict=True))

    def slice_index(self, dim: int, axis_sizes: Sequence[int], coordinate: Sequence[int]) -> int:
        """Number of a rank's slice of one dim, counted along the dim."""
        index = 0
        for axis in self.cutting_axes(dim):
            index = index * axis_sizes[axis] + coordinate[axis]
        return index

    def is_legal(self, shape: Sequence[int], axis_sizes: Sequence[int]) -> bool:
        """Whether every axis divides the dim it cuts."""
        if len(self.types) != len(axis_sizes):
            return False
        return all(
            size % prod(axis_sizes[a] for a in self.cutting_axes(dim)) == 0
            for dim, size in enumerate(shape)
        ) and all(t.dim < len(shape) for t in self.types)

    def replace(self, axis: int, axis_type: AxisType) -> "Layout":
        """This layout after one step on one axis.

        Raises:
            LayoutError: the axis cuts a dim that another axis cuts further inside.
        """
        old = self.types[axis]
        if old.is_shard and self.cutting_axes(old.dim)[-1] != axis:
            raise LayoutError(f"axis {axis} of {self} is not innermost on dim {old.dim}")
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
) -> Iterator[Layout]:
    """Every layout that a tensor of this shape can have, in a fixed order.

    Args:
        shape: global shape.
        axis_sizes: size of each mesh axis.
        differentiable: without a gradient I and R are one type, written R.
        partial: whether the element type can be summed.
    """
    whole = [I, R] if differentiable else [R]
    options = [*whole, *[P] * partial, *(S(d) for d in range(len(shape)))]
    for types in product(options, repeat=len(axis_sizes)):
        if Layout(types).is_legal(shape, axis_sizes):
            yield from _nestings(types)


def _nestings(types: tuple[AxisType, ...]) -> Iterator[Layout]:
    dims = sorted({t.dim for t in types if t.is_shard})
    groups = [[a for a, t in enumerate(types) if t.dim == dim] for dim in dims]
    for orders in product(*(permutations(group) for group in groups)):
        yield Layout(types, tuple(o for o in orders if list(o) != sorted(o)))
