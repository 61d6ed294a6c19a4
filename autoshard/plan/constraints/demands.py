"""What steering demands of one choice: hashable tests of a strategy over the active axes."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from autoshard.layouts import Layout
from autoshard.ops import OperatorRule, Strategy, axis_rules
from autoshard.plan.constraints.patterns import LayoutPattern

Dim = tuple[int, int]
"""A tensor of a call, inputs before outputs, and one of its dims."""


class Demand(Protocol):
    """A test that a strategy must pass."""

    def __call__(self, strategy: Strategy) -> bool:
        """Whether the strategy passes."""
        ...

    def __hash__(self) -> int:
        """Demands that ask the same are looked at once."""
        ...


@dataclass(frozen=True, slots=True)
class LayoutDemand:
    """Layouts of inputs and outputs; None, or no entry at all, where any will do."""

    inputs: tuple[LayoutPattern | None, ...] = ()
    outputs: tuple[LayoutPattern | None, ...] = ()

    def __call__(self, strategy: Strategy) -> bool:
        """Whether every layout that is asked for is there."""
        return _match(self.inputs, strategy.inputs) and _match(self.outputs, strategy.outputs)


def _match(patterns: Sequence[LayoutPattern | None], layouts: Sequence[Layout]) -> bool:
    return all(p is None or p.matches(x) for p, x in zip(patterns, layouts, strict=False))


@dataclass(frozen=True, slots=True)
class CutDemand:
    """What each axis may cut, and must cut.

    Attributes:
        allowed: for each axis the dims that it may cut; None for all.
        required: for each axis dims of which it must cut at least one; empty for none.
    """

    allowed: tuple[frozenset[Dim] | None, ...]
    required: tuple[frozenset[Dim], ...]

    def __call__(self, strategy: Strategy) -> bool:
        """Whether every axis cuts what it must and nothing that it may not."""
        tensors = (*strategy.inputs, *strategy.outputs)
        for axis, (allowed, required) in enumerate(zip(self.allowed, self.required, strict=True)):
            types = [layout.types[axis] for layout in tensors]
            cut = {(i, t.dim) for i, t in enumerate(types) if t.is_shard}
            if allowed is not None and not cut <= allowed:
                return False
            if required and cut.isdisjoint(required):
                return False
        return True


@dataclass(frozen=True, slots=True)
class ShareDemand:
    """A rank does less than all of the work.

    Attributes:
        points: points of the operator's whole index space.
    """

    points: int

    def __call__(self, strategy: Strategy) -> bool:
        """Whether some letter is cut."""
        return prod(strategy.sizes.values()) < self.points


def can_cut(rule: OperatorRule, parts: int, dims: frozenset[Dim]) -> OperatorRule | None:
    """The operator that is left after an axis cut one of these dims; None where none can."""
    for option in axis_rules(rule, parts):
        types = (*option.inputs, *option.outputs)
        if option.letter and any(types[i].is_shard and types[i].dim == d for i, d in dims):
            return rule.cut(option.letter, parts)
    return None


def can_share(rule: OperatorRule, axis_sizes: Sequence[int]) -> bool:
    """Whether some axis can cut some letter."""
    return any(option.letter for parts in axis_sizes for option in axis_rules(rule, parts))
