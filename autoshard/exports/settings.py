"""The share of a plan that the settings of a framework with models of its own express."""

from autoshard.constraints import (
    MegatronAxes,
    ShardingConstraint,
    StrategyConstraint,
    dim_origins,
    megatron_pattern,
    sequence_parallel_pattern,
)
from autoshard.exports.expressed import Expressed, expressed, joined
from autoshard.exports.outline import Outline, OwnedParameter
from autoshard.graph import Graph, Node, Origin
from autoshard.layouts import I, Layout
from autoshard.ops import Strategy
from autoshard.plan.stage_plans import stage_plan


def settings_express(outline: Outline, *, sequence_parallel: bool, first_dim: bool) -> Expressed:
    """The share of a plan that is as in Megatron-LM, or in a framework with its pattern.

    The framework's model of the same architecture is meant. Weights are sharded by columns and
    rows, attention by heads and embeddings by vocabulary; all parameters are sharded over the
    axes for full sharding.

    Args:
        outline: the plan.
        sequence_parallel: True if activations between sharded layers are sharded along the
            sequence over the tensor-parallel axis.
        first_dim: True if full sharding is that of dim 0.
    """
    stages = stage_outlines(outline)
    return joined(
        [
            _ComparedStage(
                stage, sequence_parallel=sequence_parallel, first_dim=first_dim
            ).expressed()
            for stage in stages
        ]
    )


def stage_outlines(outline: Outline) -> list[Outline]:
    """The view of each stage of a plan."""
    if outline.plan.pipeline is None:
        return [outline]
    numbers = range(len(outline.plan.stages))
    return [Outline(stage_plan(outline.plan, number)[0]) for number in numbers]


class _ComparedStage:
    """A stage of a plan, compared with the pattern."""

    def __init__(self, outline: Outline, *, sequence_parallel: bool, first_dim: bool) -> None:
        self._outline = outline
        self._graph: Graph = outline.graph
        self._first_dim = first_dim
        roles = outline.roles
        self._data = (*roles.get("replicate", ()), *roles.get("shard", ()))
        self._full = roles.get("shard", ())
        tensor = roles.get("tensor", ())
        self._tensor = tensor[0] if tensor else None
        self._context = roles.get("context", ())
        purposes = MegatronAxes(self._tensor, tuple(self._data))
        self._pattern = megatron_pattern(self._graph, outline.sizes, purposes)
        self._operators = self._pattern
        if sequence_parallel and self._tensor is not None:
            found = sequence_parallel_pattern(self._graph, outline.sizes, self._tensor, self._data)
            self._operators = {("operator", name): each for name, each in found.items()}
        self._origins = dim_origins(self._graph)

    def expressed(self) -> Expressed:
        operators = frozenset(n.name for n in self._graph.nodes if self._runs(n))
        placed = [p for p in self._outline.parameters if self._is_placed(p)]
        return expressed(self._outline, placed, operators)

    def _runs(self, node: Node) -> bool:
        placed = self._outline.placed[node.name]
        inputs, outputs = (
            tuple(map(Layout.parse, texts)) for texts in (placed.inputs, placed.outputs)
        )
        constraint = self._with_context(self._operators["operator", node.name], node)
        return constraint(Strategy(inputs, outputs, {}))

    def _with_context(self, constraint: StrategyConstraint, node: Node) -> StrategyConstraint:
        """A constraint of the pattern, with sequences sharded over axes of context parallelism."""
        if not self._context or not isinstance(constraint, ShardingConstraint):
            return constraint
        sequence = self._origins.of_call(node, Origin.INPUT)
        allowed = tuple(
            sequence if axis in self._context else dims
            for axis, dims in enumerate(constraint.allowed)
        )
        return ShardingConstraint(allowed, constraint.required)

    def _is_placed(self, parameter: OwnedParameter) -> bool:
        types = parameter.layout.types
        if any(types[a].is_shard for a in self._data if a not in self._full):
            return False
        full = [types[axis] for axis in self._full]
        if any(not t.is_shard or (self._first_dim and t.dim != 0) for t in full):
            return False
        constraint = self._pattern.get(("input", parameter.placed.name))
        if self._tensor is None or constraint is None:
            return True
        narrowed = tuple(t if axis == self._tensor else I for axis, t in enumerate(types))
        return constraint(Strategy((), (Layout(narrowed),), {}))
