"""Small shapes that replace the large shapes of a call.

Equal sizes stay equal, the order of sizes and their divisibility are preserved, and so is the
relation of each size to the integers among the call's attributes: a window of 64 stays shorter than
the sequence, and 8 heads still divide the width. Sizes up to `SMALL_SIZE` do not change; others
become multiples of 4, so that a shard can be sharded again.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count
from math import prod

from autoshard.graph import Argument

_STEP = 4

SMALL_SIZE = 8
"""Sizes up to this one are not changed."""

GROWTH = 3
"""Factor between the two sizes in which the number of shards of a dim is tried."""

FEW_ELEMENTS = 1 << 16
"""Number of elements of all inputs up to which attributes that equal sizes are kept."""

VALIDATION_GROWTH = (64, 16)
"""Size factors for validating an option in a larger call, closer to the original; this finds
special cases such as a first block that is treated differently. The first factor that fits is
used."""

MAX_VALIDATION_ELEMENTS = 1 << 18
"""Maximum number of elements of all inputs in such a larger call."""

MAX_ELEMENTS = 1 << 23
"""Maximum number of elements of all inputs of a probe."""

Shapes = tuple[tuple[int, ...], ...]


def smaller_sizes(
    shapes: Sequence[Sequence[int]],
    attributes: Sequence[int],
    *,
    larger: Collection[int] = (),
    times: int = GROWTH,
) -> dict[int, int]:
    """Return a small size for each size of some shapes.

    Args:
        shapes: shapes of all inputs.
        attributes: integers among the attributes, which do not change.
        larger: sizes to enlarge.
        times: minimum factor by which they grow.
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
    chosen = {size: size for size in sizes if size <= SMALL_SIZE or size in bounds}
    for size in sizes:
        if size not in chosen:
            chosen[size] = _smallest(size, chosen, bounds, least.get(size, _STEP))
    return chosen


def _smallest(size: int, chosen: Mapping[int, int], bounds: Sequence[int], least: int) -> int:
    """First multiple of `least` with the same order and divisibility as `size`."""
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
    """True if two sizes compare like their small replacements."""
    return (size > other) == (small > other_small) and (size < other) == (small < other_small)


def with_sizes(shapes: Sequence[Sequence[int]], sizes: Mapping[int, int]) -> Shapes:
    """Replace every size in shapes."""
    return tuple(tuple(sizes[size] for size in shape) for shape in shapes)


def num_elements(shapes: Sequence[Sequence[int]]) -> int:
    """Total number of elements of tensors with these shapes."""
    return sum(prod(shape) for shape in shapes)


def integers_in(argument: Argument) -> Iterator[int]:
    """Yield the integers in an argument and its nested lists, without booleans."""
    if isinstance(argument, tuple):
        for item in argument:
            yield from integers_in(item)
    elif isinstance(argument, int) and not isinstance(argument, bool):
        yield argument


def floats_in(argument: Argument) -> Iterator[float]:
    """Yield the floating-point numbers in an argument and its nested lists."""
    if isinstance(argument, tuple):
        for item in argument:
            yield from floats_in(item)
    elif isinstance(argument, float):
        yield argument


def replace_integers(argument: Argument, sizes: Mapping[int, int]) -> Argument:
    """Replace the integers of an argument that are keys of `sizes`."""
    if isinstance(argument, tuple):
        return tuple(replace_integers(item, sizes) for item in argument)
    if isinstance(argument, int) and not isinstance(argument, bool):
        return sizes.get(argument, argument)
    return argument
