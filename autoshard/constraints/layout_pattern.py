"""Sets of layouts as users write them: one part per mesh axis, some of them left open."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from autoshard.constraints.nontrivial_axes import NontrivialAxes
from autoshard.errors import LayoutError, OptionError
from autoshard.layouts import (
    AxisType,
    I,
    Layout,
    P,
    R,
    S,
    has_placements,
    largest_shard,
    layout_of_texts,
    legal_layouts,
    parse_type,
    placement_texts,
    shards_unevenly,
)

FREE = "*"
"""A part, or a nesting order, that is left open."""

_PARTS = re.compile(r",(?![^()]*\))")
_SHARD = re.compile(r"Shard\((?:dim=)?(\d+)\)")
_STRIDED_SHARD = re.compile(r"_StridedShard\((?:dim=)?(\d+), ?(?:sf|split_factor)=(\d+)\)")
_ANY_SHARD = frozenset({"S(*)", "Shard(*)"})
_PLACEMENTS = {"Replicate()": R, "Partial()": P, "Partial(sum)": P}


def has_sections(text: str) -> bool:
    """True if a pattern may name interleaved sections."""
    return "/" in text or "_StridedShard" in text


@dataclass(frozen=True, slots=True)
class LayoutPattern:
    """A set of layouts over the non-trivial axes, written `S(0),*` or `Shard(*),Replicate()`.

    Attributes:
        allowed: allowed types of each non-trivial axis; None if any type is allowed.
        orders: for each dim that several pinned axes shard, these axes, outermost first.
        sharding: the axes that shard the tensor along a dim that is left open, and their sizes.
        ranks: number of ranks over which those axes shard the tensor at least.
    """

    allowed: tuple[frozenset[AxisType] | None, ...]
    orders: tuple[tuple[int, ...], ...] = ()
    sharding: tuple[tuple[int, int], ...] = ()
    ranks: int = 1

    @classmethod
    def parse(cls, text: str, axes: NontrivialAxes, *, exact: bool) -> "LayoutPattern":
        """Read a pattern with one part per axis of the whole mesh.

        Args:
            text: parts separated by commas, then nesting orders as `Layout` writes them.
            axes: the mesh.
            exact: True if `I` and `R` are distinguished; `Replicate()` always matches both.

        Raises:
            OptionError: a part is not a type, or the number of parts is not that of the axes.
        """
        head, *orders = (part.strip() for part in text.split(";"))
        parts = [part.strip() for part in _PARTS.split(head)]
        names = axes.mesh.axis_names
        if len(parts) != len(names):
            raise OptionError(
                f"layout {text!r} has {len(parts)} parts, but the mesh has the axes "
                f"{', '.join(names)}; give one part per axis, {FREE!r} for one left free"
            )
        is_free = orders == [FREE]
        try:
            layout = _parse_parts(parts, axes.mesh.axis_sizes, [] if is_free else orders)
        except LayoutError as error:
            raise OptionError(f"layout {text!r}: {error}") from None
        numbered = list(zip(axes.axes, axes.sizes, strict=True))
        sharding = tuple(
            (i, size) for i, (axis, size) in enumerate(numbered) if parts[axis] in _ANY_SHARD
        )
        return cls(
            tuple(_allowed(parts[axis], layout.types[axis], exact=exact) for axis in axes.axes),
            () if is_free else _orders(axes.narrow(layout)),
            sharding,
            prod(size for _, size in sharding),
        )

    def matches(self, layout: Layout) -> bool:
        """True if a layout over the non-trivial axes matches the pattern."""
        return self._matches_parts(layout) and self._ranks_of(layout) >= self.ranks

    @property
    def sub_shards(self) -> tuple[AxisType, ...]:
        """The types with interleaved sub-shards that the pattern names."""
        named = (t for allowed in self.allowed for t in allowed or () if t.sub_shards)
        return tuple(dict.fromkeys(named))

    def fitted(self, shape: Sequence[int], axis_sizes: Sequence[int]) -> "LayoutPattern":
        """The pattern for a stored tensor, which need not be sharded over more ranks than it can.

        Args:
            shape: of the tensor, for which the pattern is possible.
            axis_sizes: sizes of the non-trivial axes.
        """
        if not self.sharding:
            return self
        layouts = legal_layouts(
            *(shape, axis_sizes),
            differentiable=False,
            partial=False,
            interleaved=self.sub_shards,
        )
        possible = (x for x in layouts if has_placements(x) and self._matches_parts(x))
        most = max(map(self._ranks_of, possible), default=self.ranks)
        return replace(self, ranks=min(most, self.ranks))

    def why_impossible(
        self, shape: Sequence[int], axis_sizes: Sequence[int], *, stored: bool = False
    ) -> str | None:
        """The reason why no tensor of this shape can match; None if one can.

        Args:
            shape: of the tensor.
            axis_sizes: sizes of the non-trivial axes.
            stored: True for an input, a parameter, a buffer or an output, which is a DTensor.
        """
        shards = [
            (t, size)
            for allowed, size in zip(self.allowed, axis_sizes, strict=True)
            for t in allowed or ()
            if t.is_shard
        ]
        for shard in dict.fromkeys(t for t, _ in shards):
            sizes = [size for t, size in shards if t == shard]
            why = _why_no_shard(shard, shape, sizes, stored=stored)
            if why is not None:
                return f"cannot use Shard({shard.dim}): {why}"
        return None

    def _matches_parts(self, layout: Layout) -> bool:
        return all(
            allowed is None or axis_type in allowed
            for axis_type, allowed in zip(layout.types, self.allowed, strict=True)
        ) and all(
            tuple(a for a in layout.sharding_axes(layout.types[order[0]].dim) if a in order)
            == order
            for order in self.orders
        )

    def _ranks_of(self, layout: Layout) -> int:
        """Number of ranks over which the axes with an open dim shard a tensor."""
        return prod(size for axis, size in self.sharding if layout.types[axis].is_shard)


def _parse_parts(parts: Sequence[str], axis_sizes: Sequence[int], orders: Iterable[str]) -> Layout:
    """The layout of parts over the whole mesh, with `R` for those that are left open.

    Raises:
        LayoutError: a part is not a type, or the parts do not fit together.
    """
    types = [R if part == FREE or part in _ANY_SHARD else _parse_part(part) for part in parts]
    if not any(_STRIDED_SHARD.fullmatch(part) for part in parts):
        return Layout.parse(";".join([",".join(map(str, types)), *orders]))
    # The placements of DTensor say how axes nest.
    texts = [
        f"_StridedShard(dim={found[1]}, sf={found[2]})"
        if (found := _STRIDED_SHARD.fullmatch(part))
        else placement_texts(Layout((axis_type,)), (size,))[0]
        for part, axis_type, size in zip(parts, types, axis_sizes, strict=True)
    ]
    return layout_of_texts(texts, axis_sizes, whole=R)


def _parse_part(part: str) -> AxisType:
    shard = _SHARD.fullmatch(part) or _STRIDED_SHARD.fullmatch(part)
    if shard is not None:
        return S(int(shard[1]))
    return _PLACEMENTS[part] if part in _PLACEMENTS else parse_type(part)


def _allowed(part: str, axis_type: AxisType, *, exact: bool) -> frozenset[AxisType] | None:
    if part == FREE or part in _ANY_SHARD:
        return None
    if axis_type.is_replicated and (part in _PLACEMENTS or not exact):
        return frozenset({I, R})
    return frozenset({axis_type})


def _orders(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """For each dim that several axes shard, these axes, outermost first."""
    dims = sorted({t.dim for t in layout.types if t.is_shard})
    orders = (layout.sharding_axes(dim) for dim in dims)
    return tuple(order for order in orders if len(order) > 1)


def _why_no_shard(
    shard: AxisType, shape: Sequence[int], sizes: Sequence[int], *, stored: bool
) -> str | None:
    """The reason why axes of these sizes cannot shard a dim together; None if they can."""
    if shard.dim >= len(shape):
        return f"the tensor is {len(shape)}-D, it has no dim {shard.dim}"
    size, sections = shape[shard.dim], "+".join(map(str, shard.sub_shards))
    if stored and sections and (len(sizes) > 1 or len(set(shard.sub_shards)) > 1):
        return (
            f"DTensor has no placement for sections {sections} of different sizes or over several "
            f"axes; pin the operators that read the tensor instead (nodes)"
        )
    is_even = size % (prod(sizes) * shard.num_units) == 0
    is_single = len(sizes) == 1 and not sections
    if is_even or (is_single and shards_unevenly(size, sizes[0])):
        return None
    into = f"size {size} does not divide into {prod(sizes)} shards"
    if sections:
        return f"{into} of each of the sections {sections}"
    if is_single:
        largest = largest_shard(size, sizes[0])
        return f"{into}, and shards of {largest} leave nothing for the last rank"
    return f"{into}, and unequal shards need a single axis on the dim, and no interleaving"
