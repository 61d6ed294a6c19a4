"""The option `skip_fully_replicated`: ranks divide the work of operators that can be sharded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autoshard.constraints.constraints import (
    ChoiceId,
    ShardingConstraint,
    StrategyConstraint,
)
from autoshard.constraints.nontrivial_axes import NontrivialAxes
from autoshard.graph import Graph
from autoshard.ops import OperatorRule, Strategy, axis_rules, call_of, is_view, rule_for


@dataclass(frozen=True, slots=True)
class _DistributedWork:
    """Requires that axes distribute an operator's work over a number of ranks.

    Attributes:
        axes: non-trivial axes, and their sizes.
        ranks: the number of ranks that do different work, at least.
    """

    axes: tuple[tuple[int, int], ...]
    ranks: int

    def __call__(self, strategy: Strategy) -> bool:
        layouts = (*strategy.inputs, *strategy.outputs)
        distributing = (
            size
            for axis, size in self.axes
            if any(layout.types[axis].is_shard for layout in layouts)
        )
        return prod(distributing) >= self.ranks


def distributed_constraints(
    graph: Graph,
    axes: NontrivialAxes,
    wanted: Sequence[int] | None,
    batch: Mapping[ChoiceId, ShardingConstraint],
) -> dict[ChoiceId, StrategyConstraint]:
    """Constraints on all operators that an axis can shard, except views and scalars.

    Args:
        graph: the program.
        axes: the mesh.
        wanted: non-trivial axes that distribute the work of each operator, over as many of their
            ranks as it can be sharded; None if any one axis suffices.
        batch: which dims each axis may shard, if one axis shards the batch.
    """
    among = range(len(axes.sizes)) if wanted is None else wanted
    sized = tuple((axis, axes.sizes[axis]) for axis in among)
    found: dict[tuple[object, ...], _DistributedWork] = {}
    constraints: dict[ChoiceId, StrategyConstraint] = {}
    for number, node in enumerate(graph.nodes):
        outputs = [graph.values[value] for value in node.outputs]
        if is_view(node.operator) or not node.inputs or all(t.numel <= 1 for t in outputs):
            continue
        choice = ("operator", node.name)
        key = graph.kinds[number], batch.get(choice)
        if key not in found:
            most = _most_ranks(rule_for(call_of(graph, node)), sized, batch.get(choice))
            found[key] = _DistributedWork(sized, min(most, 2) if wanted is None else most)
        if found[key].ranks > 1:
            constraints[choice] = found[key]
    return constraints


def _most_ranks(
    rule: OperatorRule, axes: tuple[tuple[int, int], ...], batch: ShardingConstraint | None
) -> int:
    """The largest number of ranks over which axes of these sizes can shard an operator."""
    known: dict[tuple[object, ...], int] = {}

    def most(left: OperatorRule, remaining: tuple[tuple[int, int], ...]) -> int:
        key = remaining, tuple(left.sizes.values()), frozenset(left.uneven)
        if key not in known:
            known[key] = max(
                (
                    size * most(left.sharded(option.letter, size), rest)
                    for axis, size in remaining
                    for rest in [tuple(other for other in remaining if other[0] != axis)]
                    for option in axis_rules(left, size)
                    if option.letter and (batch is None or batch.allows(axis, option))
                ),
                default=1,
            )
        return known[key]

    return most(rule, axes)
