"""The share of a plan that the settings of a framework with models of its own express."""

from autoshard.constraints import (
    MegatronAxes,
    framework_pattern,
    megatron_pattern,
)
from autoshard.exports.expressed import Expressed, expressed, joined
from autoshard.exports.outline import Outline, OwnedParameter
from autoshard.graph import Graph, Node
from autoshard.layouts import I, Layout
from autoshard.ops import Strategy
from autoshard.plan.stage_plans import stage_plan


def settings_express(outline: Outline, *, sequence_parallel: bool, by_rows: bool) -> Expressed:
    """The share of a plan that is as in Megatron-LM, or in a framework with its pattern.

    The framework's model of the same architecture is meant. Weights are sharded by columns and
    rows, attention by heads and embeddings by vocabulary; all parameters are sharded over the
    axes for full sharding.

    Args:
        outline: the plan.
        sequence_parallel: True if activations between sharded layers are sharded along the
            sequence over the tensor-parallel axis.
        by_rows: True if full sharding is FSDP2's of dim 0, also over the axis of context
            parallelism, and embeddings are sharded by vocabulary in any case, as in torchtitan.
    """
    stages = stage_outlines(outline)
    return joined(
        [
            _ComparedStage(stage, sequence_parallel=sequence_parallel, by_rows=by_rows).expressed()
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

    def __init__(self, outline: Outline, *, sequence_parallel: bool, by_rows: bool) -> None:
        self._outline = outline
        self._graph: Graph = outline.graph
        self._by_rows = by_rows
        roles = outline.roles
        self._data = (*roles.get("replicate", ()), *roles.get("shard", ()))
        context = roles.get("context", ())
        is_full = by_rows or bool(outline.state_axes)
        self._full = (*roles.get("shard", ()), *context) if is_full else ()
        self._tensor = next(iter(roles.get("tensor", ())), None)
        purposes = MegatronAxes(
            *(self._tensor, self._data, next(iter(context), None)), by_sequence=sequence_parallel
        )
        self._pattern = megatron_pattern(self._graph, outline.sizes, purposes)
        self._operators = self._pattern
        if by_rows:
            found = framework_pattern(self._graph, outline.sizes, purposes)
            self._operators = {("operator", name): each for name, each in found.items()}

    def expressed(self) -> Expressed:
        operators = frozenset(n.name for n in self._graph.nodes if self._runs(n))
        placed = [p for p in self._outline.parameters if self._is_placed(p)]
        return expressed(self._outline, placed, operators)

    def _runs(self, node: Node) -> bool:
        placed = self._outline.placed[node.name]
        inputs, outputs = (
            tuple(map(Layout.parse, texts)) for texts in (placed.inputs, placed.outputs)
        )
        return self._operators["operator", node.name](Strategy(inputs, outputs, {}))

    def _is_placed(self, parameter: OwnedParameter) -> bool:
        types = parameter.layout.types
        whole = {*self._data, *self._outline.roles.get("context", ())} - {*self._full}
        if any(types[axis].is_shard for axis in whole):
            return False
        full = [types[axis] for axis in self._full]
        if any(not t.is_shard or (self._by_rows and t.dim != 0) for t in full):
            return False
        constraint = self._pattern.get(("input", parameter.placed.name))
        if self._tensor is None or constraint is None:
            return True
        narrowed = tuple(t if axis == self._tensor else I for axis, t in enumerate(types))
        return constraint(Strategy((), (Layout(narrowed),), {}))
