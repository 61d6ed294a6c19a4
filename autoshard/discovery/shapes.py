"""Small shapes that stand for the large ones of a call.

Sizes that are equal stay equal, larger ones stay larger, a size that divides another still
does, and each keeps how it compares with the integers among the call's attributes: a window of
64 stays shorter than the sequence, and 8 heads still divide the width. Sizes up to `KEPT` stay
as they are, and others become multiples of 4, so that halves can be halved.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from math import prod

from autoshard.graph import Argument

_STEP = 4

KEPT = 8
"""Sizes up to this one are small already."""

TIMES = 3
"""Factor of the sizes in a second look: a claim about a size needs two of them."""

FEW_ELEMENTS = 1 << 16
"""Elements that the tensors of a call may have together without a look for smaller ones."""

FAR = (64, 16)
"""Factors of a last look, at sizes nearer to the real ones: it finds limits that an operator
does not tell, such as a first block that is special. The first that is small enough counts."""

FAR_ELEMENTS = 1 << 18
"""Elements that the tensors of a call may have together at such a look."""

MAX_ELEMENTS = 1 << 23
"""Elements that they may have together at all."""

Shapes = tuple[tuple[int, ...], ...]


def smaller_sizes(
    shapes: Sequence[Sequence[int]],
    attributes: Sequence[int],
    *,
    larger: Collection[int] = (),
    times: int = TIMES,
) -> dict[int, int]:
    """A small size for each size of some shapes.

    Args:
        shapes: of all tensors that go in.
        attributes: integers that the call was given; they stay.
        larger: sizes that become at least so many times as large as they would otherwise.
        times: how many times.
    """
    if larger:
        least = smaller_sizes(shapes, attributes)
        return _smaller(shapes, attributes, {size: times * least[size] for size in larger})
    return _smaller(shapes, attributes, {})


def _smaller(
    shapes: Sequence[Sequence[int]], attributes: Sequence[int], least: Mapping[int, int]
) -> dict[int, int]:
    bounds = sorted({abs(value) for value in attributes if abs(value) > 1})
    sizes = sorted({size for shape in shapes for size in shape})
    chosen = {size: size for size in sizes if size <= KEPT or size in bounds}
    for size in sizes:
        if size not in chosen:
            chosen[size] = _smallest(size, chosen, bounds, least.get(size, _STEP))
    return chosen


def _smallest(size: int, chosen: Mapping[int, int], bounds: Sequence[int], least: int) -> int:
    """The first multiple of a number that behaves as this size does."""
    for small in count(least, least):
        if small >= size:
            return size
        if small in chosen.values():
            continue
        if all(
            _ordered(size, small, bound, bound) and (size % bound == 0) == (small % bound == 0)
            for bound in bounds
        ) and all(
            _ordered(size, small, other, smaller) and (size % other or small % smaller == 0)
            for other, smaller in chosen.items()
            if other
        ):
            return small
    raise AssertionError("counting does not end")


def _ordered(size: int, small: int, other: int, other_small: int) -> bool:
    """Whether two sizes compare as their small ones do."""
    return (size > other) == (small > other_small) and (size < other) == (small < other_small)


def with_sizes(shapes: Sequence[Sequence[int]], sizes: Mapping[int, int]) -> Shapes:
    """The shapes with every size replaced."""
    return tuple(tuple(sizes[size] for size in shape) for shape in shapes)


def num_elements(shapes: Sequence[Sequence[int]]) -> int:
    """Elements of tensors of these shapes together."""
    return sum(prod(shape) for shape in shapes)


def integers_in(argument: Argument) -> Iterator[int]:
    """The integers in an argument, through nested lists; flags are none."""
    if isinstance(argument, tuple):
        for item in argument:
            yield from integers_in(item)
    elif isinstance(argument, int) and not isinstance(argument, bool):
        yield argument


def replace_integers(argument: Argument, sizes: Mapping[int, int]) -> Argument:
    """The argument with the integers that are sizes replaced."""
    if isinstance(argument, tuple):
        return tuple(replace_integers(item, sizes) for item in argument)
    if isinstance(argument, int) and not isinstance(argument, bool):
        return sizes.get(argument, argument)
    return argument
