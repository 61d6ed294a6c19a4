"""The interface of a reduction, and the loop that applies several of them."""

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from autoshard.base.arrays import IntArray
from autoshard.solve.network import Network
from autoshard.solve.settings import DEFAULT_EFFORT, Effort

Inverse = Callable[[IntArray], None]
"""Writes the choices of the variables that a reduction removed.

The argument, edited in place, is a strategy index of the original problem per node, shape [N].
"""


class Reduction(Protocol):
    """An exact simplification: the least price does not change, and a best choice remains."""

    name: str

    def apply(self, network: Network) -> Inverse:
        """Simplify the network in place; return the inverse."""


Item = TypeVar("Item", bound=Hashable)


class Worklist(Generic[Item]):
    """A first-in-first-out queue without duplicates."""

    def __init__(self, items: Iterable[Item]) -> None:
        self._order: deque[Item] = deque()
        self._waiting: set[Item] = set()
        self.update(items)

    def __bool__(self) -> bool:
        return bool(self._order)

    def update(self, items: Iterable[Item]) -> None:
        """Add the items that are not in the queue."""
        for item in items:
            if item not in self._waiting:
                self._waiting.add(item)
                self._order.append(item)

    def pop(self) -> Item:
        """Remove and return the oldest item."""
        item = self._order.popleft()
        self._waiting.discard(item)
        return item


def nothing_to_undo(choice: IntArray) -> None:
    """The inverse of a reduction that removes no variable."""


def sequence(inverses: Iterable[Inverse]) -> Inverse:
    """The inverse of several steps: their inverses, last to first."""
    # The inverse of a reduction reads choices of variables that later ones have removed, so those
    # are filled in first.
    backwards = tuple(inverses)[::-1]

    def invert(choice: IntArray) -> None:
        for inverse in backwards:
            inverse(choice)

    return invert


@dataclass
class Presolve:
    """Reductions applied in turn until none of them changes anything.

    Attributes:
        reductions: in the order in which they are tried.
        effort: limits of work, and when to stop.
        statistics: nodes, strategies, links and limits that each reduction removed, and its
            seconds, by name.
    """

    reductions: tuple[Reduction, ...]
    effort: Effort = DEFAULT_EFFORT
    statistics: dict[str, float] = field(default_factory=dict)

    def apply(self, network: Network) -> Inverse:
        """Reduce the network in place; return the inverse of all reductions."""
        inverses: list[Inverse] = []
        before = None
        while before != (before := _state(network)) and not network.infeasible:
            for reduction in self.reductions:
                self.effort.check()
                inverses.append(self._step(reduction, network))
                if network.infeasible:
                    break
        return sequence(inverses)

    def _step(self, reduction: Reduction, network: Network) -> Inverse:
        start, before = time.perf_counter(), _size(network)
        inverse = reduction.apply(network)
        after = _size(network)
        gained = {"seconds": time.perf_counter() - start}
        for kind in before:
            gained[kind] = float(before[kind] - after[kind])
        for kind, amount in gained.items():
            key = f"{reduction.name}.{kind}"
            if amount:
                self.statistics[key] = self.statistics.get(key, 0.0) + amount
        return inverse


def _size(network: Network) -> dict[str, int]:
    return {
        "nodes": len(network.variables),
        "strategies": network.num_strategies,
        "links": sum(len(links) for links in network.links.values()) // 2,
        "limits": len(network.capacity),
    }


def _state(network: Network) -> tuple[object, ...]:
    return tuple(_size(network).values()), sum(network.changes.values()), len(network.ties)
