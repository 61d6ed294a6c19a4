"""Gradient flow of a program: values that have gradients, and nodes through which backward runs.

Backward starts at the scalar outputs that require a gradient; if none is a scalar, at all outputs
that do. The gradients of values that a pipeline stage sends come back from the next stage. A value
may require a gradient that backward never computes, such as an output that the loss does not depend
on. New contents of buffers have no gradient.
"""

from enum import StrEnum

from autoshard.graph.ir import (
    Graph,
    Node,
)


class Gradient(StrEnum):
    """The gradient of a value, or of one use of it."""

    FLOWS = "flows"
    UNPRICED = "unpriced"
    """The value has a gradient, but backward does not compute it here."""
    NONE = "none"

    # Faster: it is part of dictionary keys in hot paths, and enums hash in Python code.
    __hash__ = str.__hash__


class Gradients:
    """The gradients of one program.

    Args:
        graph: the program.
        training: True if there is a backward pass.
    """

    def __init__(self, graph: Graph, *, training: bool) -> None:
        self._graph = graph
        self._training = training
        self._entries = self._find_entries()
        self._reached = self._trace()

    def exists(self, value: str) -> bool:
        """True if a value has a gradient."""
        return self._training and self._graph.values[value].requires_grad

    def flows(self, node: Node) -> bool:
        """True if backward runs through a node."""
        return not self._reached.isdisjoint(node.outputs)

    def of_value(self, value: str) -> Gradient:
        """The gradient of a value, summed over all its uses."""
        if not self.exists(value):
            return Gradient.NONE
        return Gradient.FLOWS if value in self._reached else Gradient.UNPRICED

    def of_use(self, value: str, node: Node) -> Gradient:
        """The gradient of the use of a value by a node."""
        if not self.exists(value) or not any(self.exists(v) for v in node.outputs):
            return Gradient.NONE
        return Gradient.FLOWS if self.flows(node) else Gradient.UNPRICED

    def of_output(self, position: int) -> Gradient:
        """The gradient of the use of a value as an output of the program."""
        output = self._graph.outputs[position]
        name = output.name
        if name is None or output.updates is not None or not self.exists(name):
            return Gradient.NONE
        return Gradient.FLOWS if name in self._entries else Gradient.UNPRICED

    def _find_entries(self) -> frozenset[str]:
        have: dict[bool, set[str]] = {True: set(), False: set()}
        for output in self._graph.outputs:
            if output.updates is None and output.name is not None and self.exists(output.name):
                have[output.sent].add(output.name)
        scalars = {name for name in have[False] if not self._graph.values[name].shape}
        return frozenset((scalars or have[False]) | have[True])

    def _trace(self) -> frozenset[str]:
        reached = set(self._entries)
        for node in reversed(self._graph.nodes):
            if not reached.isdisjoint(node.outputs):
                reached.update(value for value in node.inputs if self.exists(value))
        return frozenset(reached)
