"""The fixed pattern of Megatron-LM as a restriction of the search space: a baseline.

Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3: the last axis cuts weights, by
columns or by rows, attention by heads and embeddings by vocabulary; the residual stream
stays whole on it. The other axes cut the batch, with whole parameters. A weight goes by rows
where what it is applied to comes cut from an earlier one, and by columns otherwise.
"""

from autoshard.graph import Graph, Node
from autoshard.layouts import Action
from autoshard.ops import Dims, OperatorRule, call_of, rule_for, weights_of
from autoshard.plan.active_axes import ActiveAxes
from autoshard.plan.constraints.demands import CutDemand, Demand, Dim, can_cut
from autoshard.plan.constraints.origins import Origin, Origins
from autoshard.plan.constraints.pins import Place

MEGATRON_FORBIDS = (Action.REDUCE_SCATTER, Action.ALL_TO_ALL)
"""Collectives that the pattern does without: there is neither sequence parallelism nor ZeRO."""

_EMBEDDING = "aten.embedding.default"
_ATTENTION = "aten.scaled_dot_product_attention.default"
_NONE: frozenset[Dim] = frozenset()


def megatron_demands(
    graph: Graph, axes: ActiveAxes, *, batch_axis: str | None
) -> dict[Place, Demand]:
    """What the pattern demands of inputs and operators.

    Args:
        graph: the program.
        axes: the mesh. Its last axis is the one that cuts weights, except where that is
            the batch axis.
        batch_axis: name of the only axis that may cut the batch; if None, all others do,
            as far as they divide it.
    """
    return _Pattern(graph, axes, batch_axis).demands()


class _Pattern:
    def __init__(self, graph: Graph, axes: ActiveAxes, batch_axis: str | None) -> None:
        self._graph = graph
        self._sizes = axes.sizes
        self._origins = Origins(graph)
        self._parameters = weights_of(graph)
        # Parameters that go into products or are looked up; others are whole at rest.
        self._products: set[str] = set()
        # What comes cut from a weight by columns, followed in the order of the program.
        self._cut: set[tuple[str, int]] = set()
        names = [axes.mesh.axis_names[axis] for axis in axes.axes]
        others = [axis for axis, name in enumerate(names) if name != batch_axis]
        self._weights = others[-1] if others else None
        self._batch = self._dividing(
            [a for a, name in enumerate(names) if a != self._weights and batch_axis in (None, name)]
        )

    def demands(self) -> dict[Place, Demand]:
        demands: dict[Place, Demand] = {}
        for node in self._graph.nodes:
            demands["operator", node.name] = self._node(node)
        for graph_input in self._graph.inputs:
            if graph_input.name in self._graph.values:
                demands["input", graph_input.name] = self._input(graph_input.name)
        return demands

    def _dividing(self, axes: list[int]) -> list[int]:
        """The axes that together divide the batch."""
        left = self._origins.batch_size or 1
        found = []
        for axis in axes:
            if left % self._sizes[axis] == 0:
                found.append(axis)
                left //= self._sizes[axis]
        return found

    def _input(self, value: str) -> CutDemand:
        batch = self._origins.of_input(value, Origin.BATCH)
        of_model = self._origins.of_input(value, Origin.MODEL)
        weights = of_model if value in self._products else _NONE
        return self._demand(batch, set(self._batch), weights, _NONE)

    def _node(self, node: Node) -> CutDemand:
        batch = self._origins.of_call(node, Origin.BATCH)
        rule = rule_for(call_of(self._graph, node))
        cutting, left = set(), rule
        for axis in self._batch:
            after = can_cut(left, self._sizes[axis], batch)
            if after is not None:
                cutting.add(axis)
                left = after
        allowed = self._origins.of_call(node, Origin.MODEL)
        if node.operator == _EMBEDDING:
            allowed = frozenset({(0, 0)})
        if node.operator == _EMBEDDING or self._weight_dims(node, rule):
            self._products.update(self._parameters.get(value, "") for value in node.inputs)
        return self._demand(batch, cutting, allowed, self._weight_cuts(node, rule))

    def _weight_cuts(self, node: Node, rule: OperatorRule) -> frozenset[Dim]:
        """Dims of a product's weights of which one is cut; notes what is cut behind the call."""
        if self._weights is None:
            return _NONE
        parts = self._sizes[self._weights]
        letters = {
            letter
            for value, dims in zip(node.inputs, rule.inputs, strict=True)
            for dim, letter in _outermost(rule, dims).items()
            if (value, dim) in self._cut
        }
        if node.operator == _ATTENTION:
            heads = _outermost(rule, rule.inputs[0]).get(len(rule.inputs[0]) - 3)
            letters = {heads} if heads is not None else set()
        required = _NONE
        weights = self._weight_dims(node, rule)
        if weights:
            weights &= self._origins.of_call(node, Origin.MODEL)
            rows = frozenset(d for d in weights if not rule.contracted.isdisjoint(_at(rule, d)))
            by_rows = any(not letters.isdisjoint(_at(rule, d)) for d in rows)
            required = rows if by_rows else weights - rows
            if can_cut(rule, parts, required) is None:
                return _NONE
            letters = set() if by_rows else {_at(rule, d)[0] for d in required if _at(rule, d)}
        letters = _carried(rule, letters)
        for value, dims in zip(node.outputs, rule.outputs, strict=True):
            for dim, letter in _outermost(rule, dims).items():
                divides = rule.sizes[letter] % parts == 0
                if letter in letters and (divides or rule.can_cut(letter, parts)):
                    self._cut.add((value, dim))
        return required

    def _weight_dims(self, node: Node, rule: OperatorRule) -> frozenset[Dim]:
        """Dims of the weights in a product of weights and something else."""
        if not rule.contracted or node.operator == _EMBEDDING:
            return _NONE
        factors = [i for i in range(len(rule.inputs)) if i not in rule.addends]
        weights = [i for i in factors if node.inputs[i] in self._parameters]
        if len(weights) == len(factors):
            return _NONE
        return frozenset((i, dim) for i in weights for dim in range(len(rule.inputs[i])))

    def _demand(
        self,
        batch: frozenset[Dim],
        cutting: set[int],
        allowed: frozenset[Dim],
        required: frozenset[Dim],
    ) -> CutDemand:
        axes = range(len(self._sizes))
        return CutDemand(
            tuple(
                allowed if a == self._weights else batch if a in self._batch else _NONE
                for a in axes
            ),
            tuple(
                required if a == self._weights else batch if a in cutting else _NONE for a in axes
            ),
        )


def _at(rule: OperatorRule, dim: Dim) -> tuple[str, ...]:
    """Letters of a dim of an input."""
    return rule.inputs[dim[0]][dim[1]]


def _outermost(rule: OperatorRule, dims: Dims) -> dict[int, str]:
    """The letter of each dim that is cut first."""
    found = {}
    for dim, letters in enumerate(dims):
        letter = next((x for x in letters if rule.sizes[x] > 1), None)
        if letter is not None:
            found[dim] = letter
    return found


def _carried(rule: OperatorRule, letters: set[str]) -> set[str]:
    """What of a cut is there behind an operator: a letter, its pieces, or what they make up."""
    kept = letters - rule.whole - rule.contracted
    for letter, pieces in rule.pieces.items():
        named = {piece for _, piece in pieces if piece}
        if letter in letters:
            kept |= named
        elif named <= letters:
            kept.add(letter)
    return kept
