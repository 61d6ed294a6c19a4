"""Saved tensors: the tensors of a program that backward needs, and those it can recompute."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoshard.base.memo import kept_in_argument
from autoshard.graph import Block, Graph
from autoshard.lowering.recompute import AS_IN_EAGER, Keeps, recomputed_part, saved_for
from autoshard.ops import (
    SavedByAutograd,
    Strides,
    call_of,
    made_strides,
    view_strides,
)
from autoshard.pricing.prices import Prices


@dataclass(frozen=True, slots=True)
class CheckpointSpan:
    """Nodes that can be checkpointed together: an instance of a repeated block, or a module.

    Attributes:
        nodes: indices of the nodes.
        reading: the nodes whose inputs are recomputed in backward.
        recomputed: the nodes that run again in backward.
    """

    nodes: range
    reading: range
    recomputed: range


class SavedTensors:
    """Tensors that backward needs, independent of the strategies of a plan.

    Args:
        prices: of a program in training mode.
        blocks: its repeated blocks.
        units: nodes of each unit that may be checkpointed.
        negligible: maximum total bytes of the small values that are not counted.

    Attributes:
        saved: the tensors that autograd saves for each node.
        is_view: for each node, True if it only makes a view of its first input.
        spans: for each node, the span to which it belongs; None if it belongs to none.
        negligible: values that are assumed to be available in backward without using memory.
        needed_in_backward: other values that backward needs, unless they are recomputed.
    """

    def __init__(
        self,
        prices: Prices,
        blocks: Sequence[Block],
        units: Sequence[range] = (),
        *,
        negligible: float = 0.0,
    ) -> None:
        self._graph = graph = prices.graph
        self._blocks = blocks
        gradients = prices.gradients
        saves = _saved_in_eager(graph)
        self._saving = saving = prices.saving
        is_same = saving == AS_IN_EAGER
        own = saves if is_same else [saved_for(graph, node, saving) for node in graph.nodes]
        self.saved = tuple(
            saved if gradients.flows(node) else SavedByAutograd()
            for node, saved in zip(graph.nodes, own, strict=True)
        )
        self.is_view = _views(graph)
        self.spans: list[CheckpointSpan | None] = [None] * len(graph.nodes)
        for nodes in units:
            reading, recomputed = recomputed_part(nodes, lambda i: Keeps.of(saves[i]))
            if reading:
                span = CheckpointSpan(nodes, reading, recomputed)
                self.spans[nodes.start : nodes.stop] = [span] * len(nodes)
        self.negligible = self._find_negligible(negligible)
        self.needed_in_backward = self._find_needed()
        self._narrow: set[str] = set()
        self._find_narrow()

    def span_of(self, value: str) -> CheckpointSpan | None:
        """The span in which a value is produced."""
        maker = self._graph.makers.get(value)
        return None if maker is None else self.spans[maker]

    def first_reader_inside(self, value: str) -> int | None:
        """The first node that reads a value in the span in which it is produced."""
        span = self.span_of(value)
        readers = (i for i, _ in self._graph.consumers[value])
        return None if span is None else min((i for i in readers if i in span.nodes), default=None)

    def leaves(self, value: str) -> bool:
        """True if a value is read outside of the span in which it is produced."""
        span = self.span_of(value)
        if span is None or self._is_returned(value):
            return True
        return any(i not in span.nodes for i, _ in self._graph.consumers[value])

    def needs(self, node: int, position: int) -> bool:
        """True if backward needs the memory of an input of a node."""
        if self._graph.nodes[node].inputs[position] in self.negligible:
            return False
        if position in self.saved[node].inputs:
            return True
        outputs = self._graph.nodes[node].outputs
        is_needed_view = not self.needed_in_backward.isdisjoint(outputs)
        return self.is_view[node] and position == 0 and is_needed_view

    def share(self, node: int | None, value: str) -> float:
        """Bytes that are kept of a value at least, relative to those of the value.

        Args:
            node: the node that it is kept for; None for all that read it.
            value: an input of the node.
        """
        graph, in_float8 = self._graph, self._saving.in_float8
        if not in_float8:
            return 1.0
        if node is None:
            return 0.5 if value in self._narrow else 1.0
        if self.is_view[node]:
            needed = [v for v in graph.nodes[node].outputs if v in self.needed_in_backward]
            return 0.5 if needed and self._narrow.issuperset(needed) else 1.0
        inputs = graph.nodes[node].inputs
        positions = in_float8.get(graph.nodes[node].name, ())
        return 0.5 if any(inputs[position] == value for position in positions) else 1.0

    def needed_until(self, node: int, position: int) -> int:
        """The first node whose backward needs an input of a node in every plan.

        Returns:
            Index of the node; -1 for the end of the step.
        """
        outputs = self._graph.nodes[node].outputs
        if position in self.saved[node].inputs or not self.is_view[node]:
            return node
        return max(self.value_needed_until(value) for value in outputs)

    def value_needed_until(self, value: str) -> int:
        """The first node whose backward needs a value in every plan.

        Returns:
            Index of the node; the number of nodes if none needs it, and -1 if it is only kept
            because it is an output of the program.
        """
        readers = [
            self.needed_until(i, position)
            for i, position in self._graph.consumers[value]
            if self.needs(i, position) or self._enters(i, value)
        ]
        return max(readers, default=-1 if self._is_returned(value) else len(self._graph.nodes))

    def _is_returned(self, value: str) -> bool:
        return any(output.name == value for output in self._graph.outputs)

    def _enters(self, node: int, value: str) -> bool:
        """True if a node reads a value that is produced before the node's span."""
        span = self.spans[node]
        return span is not None and self._graph.makers.get(value, -1) < span.nodes.start

    def _find_negligible(self, limit: float) -> frozenset[str]:
        """The smallest values with at most `limit` bytes in total; all or none of equal size."""
        graph = self._graph
        total: Counter[int] = Counter()
        for value, tensor in graph.values.items():
            maker = graph.makers.get(value)
            if maker is None or not self.is_view[maker]:
                total[tensor.nbytes] += tensor.nbytes
        largest = -1
        for size, nbytes in sorted(total.items()):
            limit -= nbytes
            if limit < 0:
                break
            largest = size
        return frozenset(v for v, tensor in graph.values.items() if tensor.nbytes <= largest)

    def _find_needed(self) -> frozenset[str]:
        needed = {v.name for v in self._graph.outputs if v.name} - self.negligible
        size = -1
        while len(needed) > size:
            size = len(needed)
            for i in range(len(self._graph.nodes) - 1, -1, -1):
                needed.update(v for v in self._needed_by(i, needed) if v not in self.negligible)
            self._add_twins(needed)
        return frozenset(needed)

    def _find_narrow(self) -> None:
        """Find the values that are saved in float8 only, directly or as views."""
        nodes = self._graph.nodes
        for i in reversed(range(len(nodes)) if self._saving.in_float8 else ()):
            for position, value in enumerate(nodes[i].outputs):
                consumers = self._graph.consumers[value]
                readers = [j for j, at in consumers if self.needs(j, at)]
                is_wide = position in self.saved[i].outputs or self._is_returned(value)
                if readers and not is_wide and all(self.share(j, value) < 1 for j in readers):
                    self._narrow.add(value)

    def _needed_by(self, i: int, needed: set[str]) -> Iterator[str]:
        node, span = self._graph.nodes[i], self.spans[i]
        yield from (node.inputs[position] for position in self.saved[i].inputs)
        if self.is_view[i] and not needed.isdisjoint(node.outputs):
            yield node.inputs[0]
        if span is not None and i in span.reading:
            yield from (value for value in node.inputs if self._enters(i, value))

    def _add_twins(self, needed: set[str]) -> None:
        """Add the corresponding values of all instances of a block, so that instances are equal."""
        nodes = self._graph.nodes
        for block in self._blocks:
            for twins in zip(*block.instances(), strict=True):
                for values in zip(*(nodes[i].outputs for i in twins), strict=True):
                    if not needed.isdisjoint(values):
                        needed.update(values)


@kept_in_argument
def _saved_in_eager(graph: Graph) -> tuple[SavedByAutograd, ...]:
    """The tensors that autograd saves for each node if operators run as in eager mode."""
    return tuple(saved_for(graph, node) for node in graph.nodes)


@kept_in_argument
def _views(graph: Graph) -> tuple[bool, ...]:
    """For each node, True if it makes a view of its first input when no tensor is sharded."""
    strides: dict[str, Strides] = {}
    views: list[bool] = []
    for node in graph.nodes:
        call = call_of(graph, node)
        shapes = [tensor.shape for tensor in call.inputs]
        given = [strides.get(value) for value in node.inputs]
        made = [tensor.shape for tensor in call.outputs]
        seen = view_strides(call, shapes[0], given[0], made) if node.inputs else None
        views.append(seen is not None)
        for i, (value, shape) in enumerate(zip(node.outputs, made, strict=True)):
            strides[value] = made_strides(call, shapes, given, shape) if seen is None else seen[i]
    return tuple(views)
