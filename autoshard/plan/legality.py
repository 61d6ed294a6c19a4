"""Whether given layouts of an operator's inputs and outputs follow from its rule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from autoshard.layouts import Kind, Layout, R
from autoshard.ops import AxisRule, Chunked, InnerCollective, OperatorRule, axis_rules


def without_invariant(layout: Layout) -> Layout:
    """The layout as a tensor without a gradient shows it: I and R are one, written R."""
    types = tuple(R if t.kind is Kind.INVARIANT else t for t in layout.types)
    return Layout(types, layout.nesting)


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank does of an operator.

    Attributes:
        sizes: letter sizes on the rank.
        collectives: what ranks run inside, by axis of the whole mesh.
    """

    sizes: Mapping[str, int]
    collectives: tuple[InnerCollective, ...]


def share_of(
    rule: OperatorRule,
    layouts: Sequence[Layout],
    gradients: Sequence[bool],
    axis_sizes: Sequence[int],
) -> Share | None:
    """What a rank does if the layouts are a strategy of the rule, else None.

    Args:
        rule: the operator's rule.
        layouts: of all inputs, then of all outputs.
        gradients: for each of them, whether a gradient flows through it.
        axis_sizes: size of each mesh axis; those of one rank are not looked at.
    """
    seen = tuple(
        layout if gradient else without_invariant(layout)
        for layout, gradient in zip(layouts, gradients, strict=True)
    )
    active = [axis for axis, size in enumerate(axis_sizes) if size > 1]
    for order in permutations(active):
        if all(_nests(layout, order) for layout in seen):
            found = _walk(rule, order, axis_sizes, seen, gradients)
            if found is not None:
                sizes, cuts = found
                return Share(sizes, rule.collectives(cuts, sizes))
    return None


_Walked = tuple[Mapping[str, int], tuple[tuple[int, str | None], ...]]
"""Letter sizes on a rank, and the letter that each axis cuts."""


def _walk(
    rule: OperatorRule,
    order: tuple[int, ...],
    axis_sizes: Sequence[int],
    layouts: Sequence[Layout],
    gradients: Sequence[bool],
) -> _Walked | None:
    if not order:
        return rule.sizes, ()
    axis, rest = order[0], order[1:]
    for option in axis_rules(rule, axis_sizes[axis], _chunked(layouts)):
        if _fits(option, axis, layouts, gradients):
            local = rule.cut(option.letter, axis_sizes[axis]) if option.letter else rule
            found = _walk(local, rest, axis_sizes, layouts, gradients)
            if found is not None:
                sizes, cuts = found
                return sizes, ((axis, option.letter), *cuts)
    return None


def _chunked(layouts: Sequence[Layout]) -> Chunked:
    """The types with chunks that there are."""
    types = [{t for t in layout.types if t.chunks} for layout in layouts]
    return types if any(types) else ()


def _fits(
    option: AxisRule, axis: int, layouts: Sequence[Layout], gradients: Sequence[bool]
) -> bool:
    for wanted, layout, gradient in zip(
        (*option.inputs, *option.outputs), layouts, gradients, strict=True
    ):
        shown = R if wanted.kind is Kind.INVARIANT and not gradient else wanted
        if layout.types[axis] != shown:
            return False
    return True


def _nests(layout: Layout, order: tuple[int, ...]) -> bool:
    """Whether the axes that cut one dim do so in this order."""
    rank = {axis: i for i, axis in enumerate(order)}
    for dim in {t.dim for t in layout.types if t.is_shard}:
        ranks = [rank[axis] for axis in layout.cutting_axes(dim) if axis in rank]
        if ranks != sorted(ranks):
            return False
    return True
