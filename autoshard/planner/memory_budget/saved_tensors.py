"""What backward needs of the tensors of a program, and which nodes it can run once more."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoshard.graph import Block, Graph
from autoshard.ops import Saved, Strides, call_of, made_strides, saved_by, view_strides
from autoshard.plan.gradients import Gradients
from autoshard.plan.memory.recompute import Keeps, taken_again


@dataclass(frozen=True, slots=True)
class Span:
    """Nodes that can be checkpointed together: one instance of a repeated block.

    Attributes:
        nodes: their indices.
        taking: those of them that take once more what they read.
        running: those of them that run once more.
    """

    nodes: range
    taking: range
    running: range


class Retention:
    """What is known of a program before anything is chosen.

    Args:
        graph: the program.
        gradients: of the program, in training.
        blocks: its repeated blocks.
        checkpoints: whether instances of blocks may be checkpointed.
        negligible: bytes that all values together may take that are not worth a choice.

    Attributes:
        saved: what autograd keeps of each node's call.
        looks: whether each node only looks at the memory of its first input.
        spans: by node, the span that it is in; None outside of all.
        small: values that are taken to be there in backward and to need no memory.
        wanted: other values whose memory backward needs, unless they are made again.
    """

    def __init__(
        self,
        graph: Graph,
        gradients: Gradients,
        blocks: Sequence[Block],
        *,
        checkpoints: bool,
        negligible: float,
    ) -> None:
        self._graph = graph
        self._blocks = blocks
        self._saves = tuple(
            saved_by(call_of(graph, node), [gradients.exists(v) for v in node.inputs])
            for node in graph.nodes
        )
        self.saved = tuple(
            saved if gradients.flows(node) else Saved()
            for node, saved in zip(graph.nodes, self._saves, strict=True)
        )
        self.looks = tuple(_looks(graph))
        self.spans: list[Span | None] = [None] * len(graph.nodes)
        if checkpoints:
            self._add_spans()
        self.small = self._find_small(negligible)
        self.wanted = self._find_wanted()

    def span_of(self, value: str) -> Span | None:
        """The span in which a value is made."""
        maker = self._graph.makers.get(value)
        return None if maker is None else self.spans[maker]

    def first_reader_inside(self, value: str) -> int | None:
        """The first node that reads a value in the span in which it is made."""
        span = self.span_of(value)
        readers = (i for i, _ in self._graph.consumers[value])
        return None if span is None else min((i for i in readers if i in span.nodes), default=None)

    def leaves(self, value: str) -> bool:
        """Whether a value is read outside of the span in which it is made."""
        span = self.span_of(value)
        if span is None or any(output.name == value for output in self._graph.outputs):
            return True
        return any(i not in span.nodes for i, _ in self._graph.consumers[value])

    def needs(self, node: int, position: int) -> bool:
        """Whether the memory of what a node reads is needed in backward."""
        if self._graph.nodes[node].inputs[position] in self.small:
            return False
        if position in self.saved[node].inputs:
            return True
        outputs = self._graph.nodes[node].outputs
        return self.looks[node] and position == 0 and not self.wanted.isdisjoint(outputs)

    def needed_until(self, node: int, position: int) -> int:
        """The node in whose backward what a node reads is needed for sure, and perhaps longer.

        Of several nodes, the one whose backward is the first; -1 for the end of the step.
        """
        outputs = self._graph.nodes[node].outputs
        if position in self.saved[node].inputs or not self.looks[node]:
            return node
        return max(self.value_needed_until(value) for value in outputs)

    def value_needed_until(self, value: str) -> int:
        """Likewise of what is held of a value.

        Returns:
            a number behind all nodes if nothing is held, and one before them if it is held for
            no node but because it leaves the program.
        """
        readers = [
            self.needed_until(i, position)
            for i, position in self._graph.consumers[value]
            if self.needs(i, position) or self._enters(i, value)
        ]
        leaves = any(output.name == value for output in self._graph.outputs)
        return max(readers, default=-1 if leaves else len(self._graph.nodes))

    def _enters(self, node: int, value: str) -> bool:
        """Whether a value enters the span of a node that takes it."""
        span = self.spans[node]
        return span is not None and self._graph.makers.get(value, -1) < span.nodes.start

    def _add_spans(self) -> None:
        for nodes in (nodes for block in self._blocks for nodes in block.instances()):
            taking, running = taken_again(nodes, lambda i: Keeps.of(self._saves[i]))
            if taking:
                span = Span(nodes, taking, running)
                self.spans[nodes.start : nodes.stop] = [span] * len(nodes)

    def _find_small(self, negligible: float) -> frozenset[str]:
        """The smallest values; values of equal size all are or none is."""
        graph = self._graph
        total: Counter[int] = Counter()
        for value, tensor in graph.values.items():
            maker = self._graph.makers.get(value)
            if maker is None or not self.looks[maker]:
                total[tensor.nbytes] += tensor.nbytes
        largest = -1
        for size, nbytes in sorted(total.items()):
            negligible -= nbytes
            if negligible < 0:
                break
            largest = size
        return frozenset(v for v, tensor in graph.values.items() if tensor.nbytes <= largest)

    def _find_wanted(self) -> frozenset[str]:
        graph = self._graph
        wanted = {v.name for v in graph.outputs if v.name} - self.small
        size = -1
        while len(wanted) > size:
            size = len(wanted)
            for i in range(len(graph.nodes) - 1, -1, -1):
                wanted.update(v for v in self._wanted_by(i, wanted) if v not in self.small)
            self._add_twins(wanted)
        return frozenset(wanted)

    def _wanted_by(self, i: int, wanted: set[str]) -> Iterator[str]:
        node, span = self._graph.nodes[i], self.spans[i]
        yield from (node.inputs[position] for position in self.saved[i].inputs)
        if self.looks[i] and not wanted.isdisjoint(node.outputs):
            yield node.inputs[0]
        if span is not None and i in span.taking:
            yield from (v for v in node.inputs if self._graph.makers.get(v, -1) < span.nodes.start)

    def _add_twins(self, wanted: set[str]) -> None:
        """What is wanted in one instance of a block is so in all: they stay alike."""
        nodes = self._graph.nodes
        for block in self._blocks:
            for twins in zip(*block.instances(), strict=True):
                for values in zip(*(nodes[i].outputs for i in twins), strict=True):
                    if not wanted.isdisjoint(values):
                        wanted.update(values)


def _looks(graph: Graph) -> Iterator[bool]:
    """Whether each node is a view of its first input, were nothing cut."""
    strides: dict[str, Strides] = {}
    for node in graph.nodes:
        call = call_of(graph, node)
        shapes = [tensor.shape for tensor in call.inputs]
        given = [strides.get(value) for value in node.inputs]
        made = [tensor.shape for tensor in call.outputs]
        seen = view_strides(call, shapes[0], given[0], made) if node.inputs else None
        yield seen is not None
        for i, (value, shape) in enumerate(zip(node.outputs, made, strict=True)):
            strides[value] = made_strides(call, shapes, given, shape) if seen is None else seen[i]
