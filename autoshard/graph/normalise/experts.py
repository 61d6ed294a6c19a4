"""Detection of mixtures of experts, which are rewritten with the operators of `graph.experts`.

In an export, the rows of tokens are sorted by expert, multiplied group by group and restored to
token order with a sort, a division and indexing by data. Sharding rules of these operators cannot
express expert parallelism. A block is recognised by its structure,

    ids[T, k] -> flat -> sort -> by_expert[T k], order[T k]
    tokens[order // k] -> rows                    histc(by_expert).cumsum -> ends of groups
    grouped products of rows, biases[by_expert], operators that act on each row separately
    rows * weights.flat[order].unsqueeze -> [inverse of order] -> view(T, k, d) -> sum(1)

and left unchanged if any part of it differs from this.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import ClassVar

from autoshard.graph.experts import (
    COMBINE,
    DISPATCH,
    EXPERT_BIAS,
    GROUPED_MM,
    acts_within_rows,
    groups_of_rows,
)
from autoshard.graph.ir import Argument, Graph, Node, Ref, Tensor


def group_experts(graph: Graph) -> Graph:
    """Rewrite recognised mixtures of experts with the operators of `autoshard.graph.experts`.

    Nodes that are no longer needed are left for `drop_dead_code`.
    """
    finder = _Finder(graph)
    for node in graph.nodes:
        finder.visit(node)
    nodes: dict[str, Node] = {}
    values = dict(graph.values)
    for block in finder.blocks:
        if block.is_complete:
            nodes |= block.finished()
            values |= {name: block.ragged(graph.values[name]) for name in block.rows}
    if not nodes:
        return graph
    kept = tuple(nodes.get(node.name, node) for node in graph.nodes)
    return replace(graph, nodes=kept, values=values)


class _Role(Enum):
    """Role of a value in the exported pattern; shape [T k] unless stated otherwise."""

    ORDER = auto()
    SORTED = auto()
    COUNTS = auto()
    """Rows of each expert, of shape [E]."""
    ENDS = auto()
    """End index of the rows of each expert, of shape [E]."""
    TOKEN = auto()
    PICKED = auto()
    """Weights by expert."""
    WEIGHT = auto()
    """The same, of shape [T k, 1]."""
    INVERSE = auto()
    ROWS = auto()
    """By expert, of shape [T k, d]."""
    WEIGHTED = auto()
    """The same, times weights."""
    BACK = auto()
    """The same, by token."""
    SLOTS = auto()
    """The same, of shape [T, k, d]."""
    DONE = auto()
    """The result, of shape [T, d]."""


_CARRIES_ROWS = frozenset({_Role.ROWS, _Role.WEIGHTED, _Role.BACK, _Role.SLOTS})


_MATRIX = 2
"""Dims of a matrix."""
_FACTORS = frozenset({"self", "mat2", "input", "weight", "offs"})
_SORTS = frozenset({"aten.sort.default", "aten.sort.stable"})


@dataclass
class _ExpertsBlock:
    """One mixture of experts.

    Attributes:
        ids: experts of each token.
        tokens: T.
        slots: k.
        num_experts: E; 0 while unknown.
        weights: routing weights of each token; empty while unknown.
        last: the rows that are weighted; empty while unknown.
        nodes: new calls, by the name of the call that each replaces.
        rows: values with rows ordered by expert.
        is_sound: True while all users of rows match the pattern.
    """

    ids: str
    tokens: int
    slots: int
    num_experts: int = 0
    weights: str = ""
    last: str = ""
    nodes: dict[str, Node] = field(default_factory=dict)
    rows: list[str] = field(default_factory=list)
    is_sound: bool = True

    @property
    def num_rows(self) -> int:
        return self.tokens * self.slots

    @property
    def is_complete(self) -> bool:
        made = [node.operator for node in self.nodes.values()]
        ends = made.count(DISPATCH) == made.count(COMBINE) == 1
        return self.is_sound and ends and GROUPED_MM in made

    def ragged(self, rows: Tensor) -> Tensor:
        """Convert the shape of rows from [T k, d] to [A, B, d]."""
        groups = groups_of_rows(self.num_experts, self.num_rows)
        return replace(rows, shape=(*groups, *rows.shape[1:]))

    def add(self, node: Node, operator: str, arguments: Mapping[str, Argument]) -> None:
        """Replace a call."""
        self.nodes[node.name] = replace(node, operator=operator, arguments=tuple(arguments.items()))

    def finished(self) -> dict[str, Node]:
        """Return the new calls; dispatch and combine get the number of experts."""
        experts = ("num_experts", self.num_experts)
        return {
            name: replace(node, arguments=(*node.arguments, experts))
            if node.operator in (DISPATCH, COMBINE)
            else node
            for name, node in self.nodes.items()
        }


class _Finder:
    """Matches the nodes of a graph, in program order, with the pattern of a mixture of experts.

    Attributes:
        blocks: the candidates that have been found.
    """

    def __init__(self, graph: Graph) -> None:
        self.blocks: list[_ExpertsBlock] = []
        self._values = graph.values
        self._makers = {name: node for node in graph.nodes for name in node.outputs}
        self._returned = {output.name for output in graph.outputs}
        self._known: dict[str, tuple[_ExpertsBlock, _Role]] = {}

    def visit(self, node: Node) -> None:
        """Match the next node."""
        if node.operator in _SORTS:
            self._begin(node)
            return
        known = [self._known[name] for name in node.inputs if name in self._known]
        if not known:
            return
        block = known[0][0]
        role = None
        if all(other is block for other, _ in known):
            role = self.steps.get(node.operator, _Finder._within)(self, node, block)
        if role is not None:
            self._known.update((name, (block, role)) for name in node.outputs)
        carries = {r for _, r in known} & _CARRIES_ROWS
        leaves = role in _CARRIES_ROWS and not self._returned.isdisjoint(node.outputs)
        if leaves or (carries and role is None):
            for other, _ in known:
                other.is_sound = False

    def _begin(self, node: Node) -> None:
        ids = self._flattened(node.inputs[0])
        if ids is not None and not node.argument("descending"):
            tokens, slots = self._shape(ids)
            block = _ExpertsBlock(ids, tokens, slots)
            self.blocks.append(block)
            for name, role in zip(node.outputs, (_Role.SORTED, _Role.ORDER), strict=True):
                self._known[name] = block, role

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._values[name].shape

    def _roles(self, node: Node) -> list[_Role | None]:
        """Known role of each input."""
        return [self._known[name][1] if name in self._known else None for name in node.inputs]

    def _flattened(self, name: str) -> str | None:
        """The matrix of which a vector is the flattened form, or None."""
        maker = self._makers.get(name)
        if maker is None or maker.operator != "aten.reshape.default":
            return None
        is_flat = len(self._shape(name)) == 1 and len(self._shape(maker.inputs[0])) == _MATRIX
        return maker.inputs[0] if is_flat else None

    def _token(self, node: Node, block: _ExpertsBlock) -> _Role | None:
        """Match the order divided by k: the token of each row."""
        floors = node.argument("rounding_mode", "floor") == "floor"
        matches = self._roles(node) == [_Role.ORDER] and node.argument("other") == block.slots
        return _Role.TOKEN if matches and floors else None

    def _cast(self, node: Node, block: _ExpertsBlock) -> _Role | None:
        (role,) = self._roles(node)
        return role if role is _Role.SORTED else self._within(node, block)

    def _counted(self, node: Node, block: _ExpertsBlock) -> _Role | None:
        """Match the number of rows of each expert."""
        bins = node.argument("bins")
        bounds = node.argument("min", 0), node.argument("max", 0)
        if self._roles(node) != [_Role.SORTED] or not isinstance(bins, int):
            return None
        if bounds != (0, bins - 1) or block.num_experts not in (0, bins):
            return None
        block.num_experts = bins
        return _Role.COUNTS

    def _ends(self, node: Node, _block: _ExpertsBlock) -> _Role | None:
        return _Role.ENDS if self._roles(node) == [_Role.COUNTS] else None

    def _column(self, node: Node, _block: _ExpertsBlock) -> _Role | None:
        matches = self._roles(node) == [_Role.PICKED] and node.argument("dim") == 1
        return _Role.WEIGHT if matches else None

    def _inverse(self, node: Node, block: _ExpertsBlock) -> _Role | None:
        """Match the inverse permutation of the order."""
        if node.argument("indices") != (Ref(node.inputs[1]),) or node.argument("accumulate"):
            return None
        numbers = self._makers.get(node.inputs[2])
        counts_up = (
            numbers is not None
            and numbers.operator == "aten.arange.default"
            and numbers.argument("end") == block.num_rows
        )
        matches = self._roles(node)[1:] == [_Role.ORDER, None] and counts_up
        return _Role.INVERSE if matches else None

    def _read(self, node: Node, block: _ExpertsBlock) -> _Role | None:
        """Match an index operation with known indices."""
        source, *indices = node.inputs
        known, *at = self._roles(node)
        if node.argument("indices") != tuple(map(Ref, indices)) or len(at) != 1:
            return None
        if known is not None:
            return _Role.BACK if (known, *at) == (_Role.WEIGHTED, _Role.INVERSE) else None
        if at == [_Role.ORDER]:
            return self._pick(source, block)
        return self._read_rows(node, block) if len(self._shape(source)) == _MATRIX else None

    def _read_rows(self, node: Node, block: _ExpertsBlock) -> _Role | None:
        """Match tokens by expert, or the bias of each row's expert."""
        source, at = node.inputs[0], self._roles(node)[1]
        given = {"ids": Ref(block.ids)}
        if at is _Role.TOKEN and self._shape(source)[0] == block.tokens:
            return self._rows(node, block, DISPATCH, {"tokens": Ref(source), **given})
        if at is _Role.SORTED:
            return self._rows(node, block, EXPERT_BIAS, {"bias": Ref(source), **given})
        return None

    def _pick(self, source: str, block: _ExpertsBlock) -> _Role | None:
        weights = self._flattened(source)
        if weights is None or self._shape(weights) != (block.tokens, block.slots):
            return None
        if block.weights not in ("", weights):
            return None
        block.weights = weights
        return _Role.PICKED

    def _product(self, node: Node, block: _ExpertsBlock) -> _Role | None:
        """Match a grouped product without a bias."""
        others = (value for key, value in node.arguments if key not in _FACTORS)
        if self._roles(node) != [_Role.ROWS, None, _Role.ENDS] or any(others):
            return None
        rows, matrices = map(Ref, node.inputs[:2])
        if self._shape(matrices.name)[0] != block.num_experts:
            return None
        given = {"rows": rows, "matrices": matrices, "ids": Ref(block.ids)}
        return self._rows(node, block, GROUPED_MM, given)

    def _weighted(self, node: Node, block: _ExpertsBlock) -> _Role | None:
        """Match the product of rows and weights, which occurs once."""
        roles = self._roles(node)
        if set(roles) != {_Role.ROWS, _Role.WEIGHT}:
            return self._within(node, block)
        if block.last:
            return None
        block.last = node.inputs[roles.index(_Role.ROWS)]
        return _Role.WEIGHTED

    def _slots(self, node: Node, block: _ExpertsBlock) -> _Role | None:
        shape = self._shape(node.outputs[0])
        matches = shape[:-1] == (block.tokens, block.slots)
        return _Role.SLOTS if self._roles(node) == [_Role.BACK] and matches else None

    def _sum(self, node: Node, block: _ExpertsBlock) -> _Role | None:
        dtypes = {self._values[name].dtype for name in (*node.inputs, *node.outputs)}
        over = node.argument("dim"), bool(node.argument("keepdim")), len(dtypes)
        if self._roles(node) != [_Role.SLOTS] or over != ((1,), False, 1):
            return None
        given = {"rows": Ref(block.last), "ids": Ref(block.ids), "weights": Ref(block.weights)}
        block.add(node, COMBINE, given)
        return _Role.DONE

    def _within(self, node: Node, block: _ExpertsBlock) -> _Role | None:
        """Match an operator that acts on each row separately."""
        roles = set(self._roles(node))
        others = [self._shape(name) for name in node.inputs if name not in self._known]
        if (
            not roles <= {_Role.ROWS, None}
            or not acts_within_rows(node, _MATRIX)
            or any(len(shape) > _MATRIX or set(shape[:-1]) > {1} for shape in others)
            or any(self._shape(name)[0] != block.num_rows for name in node.outputs)
        ):
            return None
        moved = {"dim": 2} if node.argument("dim") is not None else {}
        return self._rows(node, block, node.operator, {**dict(node.arguments), **moved})

    def _rows(
        self, node: Node, block: _ExpertsBlock, operator: str, arguments: Mapping[str, Argument]
    ) -> _Role:
        block.add(node, operator, arguments)
        block.rows.extend(node.outputs)
        return _Role.ROWS

    steps: ClassVar[Mapping[str, Callable[["_Finder", Node, _ExpertsBlock], _Role | None]]] = {
        "aten.floor_divide.default": _token,
        "aten.div.Scalar_mode": _token,
        "aten.div.Tensor_mode": _token,
        "aten.to.dtype": _cast,
        "aten.histc.default": _counted,
        "aten.cumsum.default": _ends,
        "aten.unsqueeze.default": _column,
        "aten.index_put.default": _inverse,
        "aten.index.Tensor": _read,
        "aten._grouped_mm.default": _product,
        "transformers.grouped_mm_fallback.default": _product,
        "aten.mul.Tensor": _weighted,
        "aten.reshape.default": _slots,
        "aten.sum.dim_IntList": _sum,
    }
    """Matchers by operator; all other operators must act on each row separately."""
