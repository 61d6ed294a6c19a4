"""Layouts with free axes, as users write them: `S(0),*` or `Shard(0),Replicate()`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from autoshard.errors import LayoutError, OptionError
from autoshard.layouts import (
    AxisType,
    I,
    Kind,
    Layout,
    P,
    R,
    S,
    cuts_unevenly,
    largest_share,
    parse_type,
)
from autoshard.plan.active_axes import ActiveAxes

FREE = "*"
_SHARD = re.compile(r"Shard\((?:dim=)?(\d+)\)")
_WORDS = {"Replicate()": R, "Partial()": P, "Partial(sum)": P}


@dataclass(frozen=True, slots=True)
class LayoutPattern:
    """A set of layouts over the active axes.

    Attributes:
        text: as the user wrote it.
        allowed: types of each active axis; None where the axis is free.
        orders: for each dim that several of the pinned axes cut, these axes from the
            outermost to the innermost.
    """

    text: str
    allowed: tuple[frozenset[AxisType] | None, ...]
    orders: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def parse(cls, text: str, axes: ActiveAxes, *, exact: bool) -> "LayoutPattern":
        """Read a layout with one part per axis of the whole mesh.

        Args:
            text: parts separated by commas, then nesting orders as `Layout` writes them.
            axes: the mesh.
            exact: whether `I` and `R` are told apart; `Replicate()` is always both.

        Raises:
            OptionError: a part is no type, or there is not one per axis.
        """
        head, *orders = text.split(";")
        parts = [part.strip() for part in head.split(",")]
        names = axes.mesh.axis_names
        if len(parts) != len(names):
            raise OptionError(
                f"layout {text!r} has {len(parts)} parts, but the mesh has the axes "
                f"{', '.join(names)}; give one part per axis, {FREE!r} for one left free"
            )
        try:
            types = [R if part == FREE else _read_type(part) for part in parts]
            layout = Layout.parse(";".join([",".join(map(str, types)), *orders]))
        except LayoutError as error:
            raise OptionError(f"layout {text!r}: {error}") from None
        allowed = tuple(_allowed(parts[axis], types[axis], exact=exact) for axis in axes.axes)
        return cls(text, allowed, _orders(axes.narrow(layout)))

    def matches(self, layout: Layout) -> bool:
        """Whether a layout over the active axes is one of the set."""
        return all(
            allowed is None or axis_type in allowed
            for axis_type, allowed in zip(layout.types, self.allowed, strict=True)
        ) and all(self._nests(layout, order) for order in self.orders)

    def why_impossible(self, shape: Sequence[int], axis_sizes: Sequence[int]) -> str | None:
        """Why no tensor of this shape can lie so, or None where one can."""
        cuts: dict[int, list[int]] = {}
        chunked = set()
        for allowed, size in zip(self.allowed, axis_sizes, strict=True):
            for axis_type in allowed or ():
                if axis_type.kind is Kind.SHARD:
                    cuts.setdefault(axis_type.dim, []).append(size)
                    chunked.update([axis_type.dim] if axis_type.chunks else [])
        for dim, sizes in cuts.items():
            if dim >= len(shape):
                return f"it has no dim {dim}"
            if shape[dim] % prod(sizes):
                why = _why_uneven(shape[dim], sizes, in_chunks=dim in chunked)
                if why is not None:
                    return (
                        f"its dim {dim} of size {shape[dim]} does not divide into "
                        f"{prod(sizes)} slices, and {why}"
                    )
        return None

    @staticmethod
    def _nests(layout: Layout, order: tuple[int, ...]) -> bool:
        dim = layout.types[order[0]].dim
        return tuple(axis for axis in layout.cutting_axes(dim) if axis in order) == order


def _why_uneven(size: int, sizes: Sequence[int], *, in_chunks: bool) -> str | None:
    """Why axes may not cut a dim into slices of unequal length; None where they may."""
    if len(sizes) > 1 or in_chunks:
        return "only an axis that cuts it alone, and as one, may make slices of unequal length"
    if not cuts_unevenly(size, sizes[0]):
        return f"slices of {largest_share(size, sizes[0])} leave nothing for the last rank"
    return None


def _read_type(part: str) -> AxisType:
    shard = _SHARD.fullmatch(part)
    if shard is not None:
        return S(int(shard[1]))
    return _WORDS[part] if part in _WORDS else parse_type(part)


def _allowed(part: str, axis_type: AxisType, *, exact: bool) -> frozenset[AxisType] | None:
    if part == FREE:
        return None
    if axis_type.is_whole and (part in _WORDS or not exact):
        return frozenset({I, R})
    return frozenset({axis_type})


def _orders(layout: Layout) -> tuple[tuple[int, ...], ...]:
    dims = sorted({t.dim for t in layout.types if t.is_shard})
    orders = (layout.cutting_axes(dim) for dim in dims)
    return tuple(order for order in orders if len(order) > 1)
