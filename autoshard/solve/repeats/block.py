"""One group of a run by its content: neither names nor depth are part of it."""

from collections.abc import Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoshard.arrays import FloatArray
from autoshard.solve.closure import ShortestPathCost
from autoshard.solve.problem import Problem
from autoshard.solve.repeats.modes import Mode, find_modes
from autoshard.solve.repeats.runs import Run
from autoshard.solve.tables import KeptTable, KeyValueStore, SolvedBlock, content_key


class Block:
    """The second group of a run and its links, and which of its tables a store had.

    Args:
        problem: what the run is of.
        run: the run.
        store: keeps tables; None to make each of them.

    Attributes:
        run: the run.
        edges: those inside the group, and those to what it sees.
        num_reused: tables that the store had.
        num_solved: tables that had to be made.
    """

    def __init__(self, problem: Problem, run: Run, store: KeyValueStore | None) -> None:
        self.run = run
        self._problem = problem
        self._store = store
        group, before, hubs = run.instances[1], run.before_of(1), run.hubs
        self._members = (*before, *hubs, *group)
        around, inside = set(self._members), set(group)
        self.edges = [
            e
            for e in problem.edges
            if (e.source in inside or e.target in inside)
            and e.source in around
            and e.target in around
        ]
        self.num_reused = self.num_solved = 0

    @cached_property
    def modes(self) -> tuple[Mode, ...]:
        """Modes of the nodes that a group shares with nobody."""
        group, ports = self.run.instances[1], set(self.run.ports)
        own = [v for p, v in enumerate(group) if p not in ports]
        return find_modes(self._problem, own, self.edges)

    def kept_table(self, costs: Mapping[int, FloatArray], view: bytes) -> KeptTable | None:
        """Where a table of the block is kept; None without a store.

        Args:
            costs: shape [S] for each node of the group.
            view: what distinguishes the table from others of the same block and costs.
        """
        if self._store is None:
            return None
        return KeptTable(self._store, content_key(self._key(costs).encode(), view))

    def count(self, *, reused: bool) -> None:
        """Take note of a table."""
        self.num_reused += reused
        self.num_solved += not reused

    def report(self) -> SolvedBlock:
        """What became of the block."""
        group = self.run.instances[1]
        return SolvedBlock(
            nodes=self.run.instances[0],
            num_groups=len(self.run.instances),
            key=self._key({v: self._problem.nodes[v].cost for v in group}),
            num_reused=self.num_reused,
            num_solved=self.num_solved,
        )

    def _key(self, costs: Mapping[int, FloatArray]) -> str:
        """Digest of the group at given costs."""
        prices = (_content(costs[v]) for v in self.run.instances[1])
        return content_key(self._links, *prices)

    @cached_property
    def _links(self) -> bytes:
        """Digest of how the group is linked, inside and to what it sees."""
        place = {v: i for i, v in enumerate(self._members)}
        sizes = [self._problem.nodes[v].num_strategies for v in self._members]
        parts = [repr((self.run.ports, len(self.run.hubs), sizes)).encode()]
        known: dict[int, bytes] = {}
        for edge in self.edges:
            prices = edge.prices
            if id(prices) not in known:
                arrays = prices.arcs if isinstance(prices, ShortestPathCost) else (prices,)
                known[id(prices)] = content_key(*map(_content, arrays)).encode()
            ends = repr((place[edge.source], place[edge.target], prices.shape)).encode()
            parts += [ends, known[id(prices)], _content(edge.rows), _content(edge.cols)]
        return content_key(*parts).encode()


def _content(array: NDArray[np.generic]) -> bytes:
    """Bytes of an array that are the same on every machine; its shape is not among them."""
    wide = np.dtype("<f8") if array.dtype.kind == "f" else np.dtype("<i8")
    return np.ascontiguousarray(array, wide).tobytes()
