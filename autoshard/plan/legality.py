"""Whether given layouts of an operator's inputs and outputs follow from its rule."""

from collections.abc import Sequence
from itertools import permutations

from autoshard.layouts import Kind, Layout, R
from autoshard.rules import AxisRule, OperatorRule, axis_rules


def without_invariant(layout: Layout) -> Layout:
    """The layout as a tensor without a gradient shows it: I and R are one, written R."""
    types = tuple(R if t.kind is Kind.INVARIANT else t for t in layout.types)
    return Layout(types, layout.nesting)


def local_sizes(
    rule: OperatorRule,
    layouts: Sequence[Layout],
    gradients: Sequence[bool],
    axis_sizes: Sequence[int],
) -> dict[str, int] | None:
    """Letter sizes on one rank if the layouts are a strategy of the rule, else None.

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
            sizes = _walk(rule, order, axis_sizes, seen, gradients)
            if sizes is not None:
                return sizes
    return None


def _walk(
    rule: OperatorRule,
    order: tuple[int, ...],
    axis_sizes: Sequence[int],
    layouts: Sequence[Layout],
    gradients: Sequence[bool],
) -> dict[str, int] | None:
    if not order:
        return dict(rule.sizes)
    axis, rest = order[0], order[1:]
    for option in axis_rules(rule, axis_sizes[axis]):
        if _fits(option, axis, layouts, gradients):
            local = rule.cut(option.letter, axis_sizes[axis]) if option.letter else rule
            found = _walk(local, rest, axis_sizes, layouts, gradients)
            if found is not None:
                return found
    return None


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
