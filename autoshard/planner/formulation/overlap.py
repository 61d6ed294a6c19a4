"""Which compute hides the reshardings of weights, by strategy of their reader."""

from autoshard.arrays import FloatArray
from autoshard.costs import Overlap, Passes
from autoshard.graph import Graph, Node
from autoshard.mesh import Mesh
from autoshard.ops import Strategy
from autoshard.plan.gradients import Gradients
from autoshard.plan.pricing import Prices


class Hiding:
    """Compute beside the reshardings of one program; none without the option `overlap`.

    Args:
        graph: the program.
        mesh: the devices.
        prices: what strategies cost.
        gradients: where backward goes.
    """

    def __init__(self, graph: Graph, mesh: Mesh, prices: Prices, gradients: Gradients) -> None:
        self._graph = graph
        self._prices = prices
        self._gradients = gradients
        self._overlap = Overlap(graph, mesh) if prices.overlaps else None
        self._passes: dict[int, Passes[FloatArray]] = {}

    def share(self, reader: Node, position: int) -> float | None:
        """Share of a reader's compute that hides the resharding of an input; None for none."""
        return None if self._overlap is None else self._overlap.share(reader, position)

    def compute(
        self, reader: Node, position: int, strategies: tuple[Strategy, ...]
    ) -> Passes[FloatArray] | None:
        """Compute that hides the resharding of an input, by strategy of the reader."""
        share = self.share(reader, position)
        if share is None:
            return None
        # Nodes that share their strategies share their prices.
        if id(strategies) not in self._passes:
            self._passes[id(strategies)] = self._prices.compute(
                self._graph, reader, strategies, backward=self._gradients.flows(reader)
            )
        passes = self._passes[id(strategies)]
        return Passes(share * passes.forward, share * passes.backward)
