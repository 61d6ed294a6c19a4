"""Backward of a stage in two parts: gradients of what it received, then those of parameters.

Zero-bubble schedules send the first early and run the second where a rank would wait. An operator
that reads both what derives from received values and a parameter, or what derives from parameters
only, reads a leaf in place of the latter. The first part computes gradients of received values
alone, and keeps the gradients that arrive at the operators with leaves. The second part
differentiates these operators by their leaves, and then goes on from the leaves to the parameters,
so that reductions run once, as in a whole backward pass.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Apart = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors whose gradients are computed apart, each with the leaf that is read in its place."""

Gradients = Sequence[torch.Tensor | None]


def run_backward(outputs: Sequence[torch.Tensor], gradients: Gradients, apart: Apart) -> None:
    """Run both parts at once; gradients of received values are in their `grad`.

    Args:
        outputs: what is differentiated.
        gradients: of the outputs; None for a scalar.
        apart: from forward.
    """
    if outputs:
        torch.autograd.backward(outputs, gradients)
    found = [(tensor, leaf.grad) for tensor, leaf in apart if leaf.grad is not None]
    if found:
        torch.autograd.backward([x for x, _ in found], [gradient for _, gradient in found])


class SplitBackward:
    """A backward pass in two parts, of which the first runs at once.

    Args:
        outputs: what is differentiated.
        gradients: of the outputs; None for a scalar.
        inputs: received values that require gradients; they get them as `grad`.
        apart: from forward.
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        gradients: Gradients,
        inputs: Sequence[torch.Tensor],
        apart: Apart,
    ) -> None:
        self._apart = apart
        self._arrived: dict[Node, Gradients] = {}
        graph = _ReverseGraph(outputs, inputs)
        self._outside = [
            pair
            for pair in zip(outputs, gradients, strict=True)
            if not graph.is_inner(get_gradient_edge(pair[0]).node)
        ]
        inner = [
            pair
            for pair in zip(outputs, gradients, strict=True)
            if graph.is_inner(get_gradient_edge(pair[0]).node)
        ]
        # Leaves whose gradients come from the same operators are differentiated together.
        self._groups: dict[frozenset[Node], list[int]] = {}
        for number, (_, leaf) in enumerate(apart):
            nodes = graph.first_inner_above(get_gradient_edge(leaf).node)
            if nodes:
                self._groups.setdefault(frozenset(nodes), []).append(number)
        if inner:
            self._run_first([x for x, _ in inner], [gradient for _, gradient in inner], inputs)

    def _run_first(
        self,
        outputs: Sequence[torch.Tensor],
        gradients: Gradients,
        inputs: Sequence[torch.Tensor],
    ) -> None:
        with ExitStack() as hooks:
            for node in frozenset[Node]().union(*self._groups):
                handle = node.register_prehook(partial(self._arrived.__setitem__, node))
                hooks.callback(handle.remove)
            # The graph is kept: the second part runs some of its nodes for the leaves.
            found = torch.autograd.grad(
                outputs, inputs, gradients, retain_graph=True, allow_unused=True
            )
        for tensor, gradient in zip(inputs, found, strict=True):
            tensor.grad = gradient

    def run_second(self) -> None:
        """Compute the gradients of parameters, once."""
        roots: list[torch.Tensor] = [tensor for tensor, _ in self._outside]
        gradients: list[torch.Tensor | None] = [gradient for _, gradient in self._outside]
        for nodes, numbers in self._groups.items():
            arrived = [
                (GradientEdge(node, place), gradient)
                for node in nodes
                for place, gradient in enumerate(self._arrived.get(node, ()))
                if gradient is not None
            ]
            if not arrived:
                continue
            found = torch.autograd.grad(
                [edge for edge, _ in arrived],
                [self._apart[number][1] for number in numbers],
                [gradient for _, gradient in arrived],
                retain_graph=True,
                allow_unused=True,
            )
            for number, gradient in zip(numbers, found, strict=True):
                if gradient is not None:
                    roots.append(self._apart[number][0])
                    gradients.append(gradient)
        self._groups, self._arrived, self._outside, self._apart = {}, {}, [], ()
        if roots:
            torch.autograd.backward(roots, gradients)


class _ReverseGraph:
    """The autograd graph of outputs, from inputs upwards.

    A node is *inner* if the gradient of an input goes through it.
    """

    def __init__(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        self._above = _edges(get_gradient_edge(x).node for x in outputs)
        self._inner: set[Node] = set()
        waiting = deque(get_gradient_edge(x).node for x in inputs)
        while waiting:
            node = waiting.popleft()
            if node not in self._inner:
                self._inner.add(node)
                waiting.extend(self._above.get(node, ()))

    def is_inner(self, node: Node) -> bool:
        """True if the gradient of an input goes through a node."""
        return node in self._inner

    def first_inner_above(self, start: Node) -> set[Node]:
        """The inner nodes from which gradients reach a node without passing another one."""
        found: set[Node] = set()
        seen, waiting = {start}, deque([start])
        while waiting:
            for node in self._above.get(waiting.popleft(), ()):
                if node in self._inner:
                    found.add(node)
                elif node not in seen:
                    seen.add(node)
                    waiting.append(node)
        return found


def _edges(roots: Iterable[Node]) -> Mapping[Node, list[Node]]:
    """For each node that gradients of the roots reach, the nodes that they come from."""
    above: dict[Node, list[Node]] = {}
    waiting = deque(roots)
    seen = set(waiting)
    while waiting:
        node = waiting.popleft()
        following: tuple[tuple[Any, int], ...] = node.next_functions
        for one, _ in following:
            if one is None:
                continue
            above.setdefault(one, []).append(node)
            if one not in seen:
                seen.add(one)
                waiting.append(one)
    return above
