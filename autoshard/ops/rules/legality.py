"""Checks that the layouts of an operator's inputs and outputs follow from its sharding rule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from autoshard.layouts import Kind, Layout, R
from autoshard.ops.rules.collectives import (
    InnerCollective,
)
from autoshard.ops.rules.rule import (
    AxisRule,
    Interleaved,
    OperatorRule,
    axis_rules,
)


def without_invariant(layout: Layout) -> Layout:
    """Replace I by R, which are the same for a tensor without a gradient."""
    types = tuple(R if t.kind is Kind.INVARIANT else t for t in layout.types)
    return Layout(types, layout.nesting)


@dataclass(frozen=True, slots=True)
class Share:
    """The part of an operator that one rank computes.

    Attributes:
        sizes: size of each index letter on the rank.
        collectives: the collectives inside the operator; their axes are those of the whole mesh.
    """

    sizes: Mapping[str, int]
    collectives: tuple[InnerCollective, ...]


def share_of(
    rule: OperatorRule,
    layouts: Sequence[Layout],
    gradients: Sequence[bool],
    axis_sizes: Sequence[int],
) -> Share | None:
    """One rank's part of an operator; None if its rule does not allow the layouts.

    Args:
        rule: the operator's rule.
        layouts: layout of each input, then of each output.
        gradients: for each of these tensors, True if it has a gradient.
        axis_sizes: size of each mesh axis; axes of size 1 are ignored.
    """
    seen = tuple(
        layout if gradient else without_invariant(layout)
        for layout, gradient in zip(layouts, gradients, strict=True)
    )
    interleaved: Interleaved = [{t for t in layout.types if t.sub_shards} for layout in seen]
    if not any(interleaved):
        interleaved = ()

    def search(
        local: OperatorRule, axes: tuple[int, ...]
    ) -> tuple[Mapping[str, int], tuple[tuple[int, str | None], ...]] | None:
        """Letter sizes on a rank and the letter of each axis; None if this order is illegal."""
        if not axes:
            return local.sizes, ()
        axis, rest = axes[0], axes[1:]
        for option in axis_rules(local, axis_sizes[axis], interleaved):
            if _fits(option, axis, seen, gradients):
                sharded = local.sharded(option.letter, axis_sizes[axis]) if option.letter else local
                found = search(sharded, rest)
                if found is not None:
                    sizes, letters = found
                    return sizes, ((axis, option.letter), *letters)
        return None

    nontrivial = [axis for axis, size in enumerate(axis_sizes) if size > 1]
    for order in permutations(nontrivial):
        if all(_nests(layout, order) for layout in seen):
            found = search(rule, order)
            if found is not None:
                sizes, letters = found
                return Share(sizes, rule.collectives(letters, sizes))
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
    """True if the axes that shard one dim are nested in this order."""
    for dim in {t.dim for t in layout.types if t.is_shard}:
        ranks = [order.index(axis) for axis in layout.sharding_axes(dim) if axis in order]
        if ranks != sorted(ranks):
            return False
    return True
