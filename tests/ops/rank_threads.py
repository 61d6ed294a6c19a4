"""Ranks as threads that meet at collectives."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from threading import Barrier
from typing import Any

import torch
from ops.pieces import Coordinate

from autoshard.ops import (
    InnerCollective,
    Operation,
)

TIMEOUT = 30.0
"""Seconds that a rank waits for another one that may hang."""


class Together:
    """Ranks as threads, which meet at every collective.

    Attributes:
        ran: the collectives that the first rank has taken part in.
        backward: whether they run in the backward pass.
    """

    def __init__(self, mesh: tuple[int, ...]) -> None:
        self.backward = False
        self.ran: tuple[InnerCollective, ...] = ()
        self._barrier = Barrier(prod(mesh), timeout=TIMEOUT)
        self._given: dict[Coordinate, torch.Tensor] = {}
        self._sent: dict[Coordinate, tuple[torch.Tensor, ...]] = {}

    def guard(self, run: Callable[[Coordinate], Any]) -> Callable[[Coordinate], Any]:
        """Nobody waits for a rank that has failed."""

        def guarded(at: Coordinate) -> Any:
            try:
                return run(at)
            except BaseException:
                self._barrier.abort()
                raise

        return guarded

    def all_reduce(
        self, at: Coordinate, tensor: torch.Tensor, axis: int, operation: Operation
    ) -> None:
        assert tensor.is_contiguous()
        self._given[at] = tensor.detach().clone()
        self._barrier.wait()
        parts = [self._given[other] for other in self._given if _differ_on(axis, at, other)]
        whole = torch.stack(parts)
        tensor.copy_(whole.sum(0) if operation is Operation.SUM else whole.amax(0))
        if not any(at):
            made = InnerCollective(axis, operation, tensor.nbytes, self.backward)
            self.ran = (*self.ran, made)
        self._barrier.wait()

    def all_to_all(
        self, at: Coordinate, rows: torch.Tensor, axis: int, sent: list[int], received: list[int]
    ) -> torch.Tensor:
        """Counts what all ranks send, on average."""
        self._sent[at] = torch.split(rows.detach().clone(), sent)
        self._barrier.wait()
        others = sorted(other for other in self._sent if _differ_on(axis, at, other))
        parts = [self._sent[other][at[axis]] for other in others]
        assert [len(part) for part in parts] == received
        if not any(at):
            total = sum(part.nbytes for parts in self._sent.values() for part in parts)
            assert total % len(self._sent) == 0
            nbytes = total // len(self._sent)
            made = InnerCollective(axis, Operation.MOVE, nbytes, self.backward)
            self.ran = (*self.ran, made)
        self._barrier.wait()
        return torch.cat(parts)

    def exchange(
        self, at: Coordinate, to_before: torch.Tensor, to_after: torch.Tensor, axis: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Counts what the rank sends or receives that does most."""
        assert to_before.is_contiguous()
        assert to_after.is_contiguous()
        self._sent[at] = (to_before.detach().clone(), to_after.detach().clone())
        self._barrier.wait()
        line = sorted(other for other in self._sent if _differ_on(axis, at, other))
        place = line.index(at)
        before = self._sent[line[place - 1]][1] if place else None
        behind = self._sent[line[place + 1]][0] if place + 1 < len(line) else None
        assert before is None or before.shape == to_after.shape
        assert behind is None or behind.shape == to_before.shape
        if not any(at):
            edges = (to_before.nbytes, to_after.nbytes)
            nbytes = max(edges) if len(line) == 2 else sum(edges)  # both are ends
            made = InnerCollective(axis, Operation.HALO, nbytes, self.backward)
            self.ran = (*self.ran, made)
        self._barrier.wait()
        return before, behind


def _differ_on(axis: int, one: Coordinate, other: Coordinate) -> bool:
    """Whether two ranks differ on this axis at most."""
    return all(a == b for i, (a, b) in enumerate(zip(one, other, strict=True)) if i != axis)


@dataclass(frozen=True)
class RankOf:
    """One of the threads."""

    together: Together
    at: Coordinate

    def all_reduce(self, tensor: torch.Tensor, axis: int, operation: Operation) -> None:
        self.together.all_reduce(self.at, tensor, axis, operation)

    def all_to_all(
        self, rows: torch.Tensor, axis: int, sent: list[int], received: list[int]
    ) -> torch.Tensor:
        return self.together.all_to_all(self.at, rows, axis, sent, received)

    def exchange(
        self, to_before: torch.Tensor, to_after: torch.Tensor, axis: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self.together.exchange(self.at, to_before, to_after, axis)
