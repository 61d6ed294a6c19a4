"""Collectives that an operator runs inside itself where a dim that it works along is cut.

A softmax needs the largest number and a sum along its dim, a normalisation a mean and a
variance. Where that dim is cut, each rank works these statistics out of its slice, and the
ranks put them together. Statistics are small: one number per row, not per element.

A rule says what runs in a text such as `max sum*2 | sum`: forward a maximum and two sums per
row, the sums together in one all-reduce, backward one sum.

Operators on rows ordered by expert move the rows themselves, with an all-to-all (`move`). Windows
that overlap need the edges of the neighbours' slices (`halo`, `autoshard.ops.windows`).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from autoshard.graph import DType, Tensor
from autoshard.layouts import Action

_TERM = re.compile(r"(?P<operation>[a-z]+)(\*(?P<times>\d+))?(:(?P<dtype>\w+))?")


class Operation(StrEnum):
    """What becomes of what the ranks have."""

    SUM = "sum"
    """Everybody gets the sum."""
    MAX = "max"
    """Everybody gets the largest."""
    MOVE = "move"
    """Each row goes to the rank that it is for."""
    HALO = "halo"
    """Everybody gets the edges of the slices next to its own."""

    @property
    def action(self) -> Action:
        """The collective."""
        return _ACTIONS.get(self, Action.ALL_REDUCE)


_ACTIONS = {Operation.MOVE: Action.ALL_TO_ALL, Operation.HALO: Action.HALO_EXCHANGE}


@dataclass(frozen=True, slots=True)
class Reduction:
    """One collective, run on each axis that cuts the letter that it is for.

    Attributes:
        operation: what becomes of what the ranks have.
        per: letters whose local sizes multiply to the number of rows.
        itemsize: bytes of a number.
        times: numbers per row.
        backward: whether it runs in the backward pass, for the gradient of the first input.
    """

    operation: Operation
    per: tuple[str, ...]
    itemsize: int
    times: int = 1
    backward: bool = False

    @property
    def is_back(self) -> bool:
        """Whether it takes rows back that forward moved."""
        return self.operation is Operation.MOVE and self.backward

    def nbytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes of a rank's statistics, given the letter sizes on the rank."""
        return self.times * self.itemsize * prod(sizes[letter] for letter in self.per)


@dataclass(frozen=True, slots=True)
class InnerCollective:
    """A collective that a strategy runs inside an operator.

    Attributes:
        axis: the mesh axis.
        operation: what becomes of what the ranks have.
        nbytes: bytes of a rank's statistics; of rows that move, on average over the ranks; of
            halos, of the rank that sends or receives most.
        backward: whether it runs in the backward pass.
        copied: bytes that copies beside it make on the rank.
    """

    axis: int
    operation: Operation
    nbytes: int
    backward: bool
    copied: int = 0


@dataclass(frozen=True, slots=True)
class Reductions:
    """What runs inside an operator where any of some letters is cut.

    Attributes:
        over: the letters that statistics are taken over.
        listed: the collectives, in order.
        spilled: letters of what goes through memory then, though a kernel that works along the
            whole letter keeps it on the chip.
        spilled_bytes: that are read and written of an element of it.
    """

    over: frozenset[str] = frozenset()
    listed: tuple[Reduction, ...] = ()
    spilled: tuple[str, ...] = ()
    spilled_bytes: int = 0

    @classmethod
    def of(
        cls,
        text: str,
        *,
        over: Iterable[str],
        per: Iterable[str],
        itemsize: int,
        spilled: Iterable[str] = (),
        spilled_bytes: int = 0,
    ) -> "Reductions":
        """The collectives that a text lists.

        Args:
            text: `forward | backward`; each is a row of `max`, `sum` or `move`, with the numbers
                per row where there are several, as in `sum*2`, and their type where it is
                another one, as in `max:int64`.
            over: the letters that statistics are taken over.
            per: the letters that tell rows apart.
            itemsize: bytes of a number.
            spilled: letters of what goes through memory.
            spilled_bytes: of an element of it.
        """
        letters, rows = frozenset(over), tuple(per)
        if not letters:
            return cls()
        return cls(
            letters,
            tuple(
                Reduction(
                    Operation(term["operation"]),
                    rows,
                    DType(term["dtype"]).itemsize if term["dtype"] else itemsize,
                    int(term["times"] or 1),
                    backward,
                )
                for part, backward in zip(text.split("|"), (False, True), strict=False)
                for term in _TERM.finditer(part)
            ),
            tuple(spilled),
            spilled_bytes,
        )

    def __str__(self) -> str:
        """What runs, without the types of numbers."""
        forward, backward = (
            " ".join(
                f"{r.operation}*{r.times}" if r.times > 1 else str(r.operation)
                for r in self.listed
                if r.backward is back
            )
            for back in (False, True)
        )
        return f"{forward} | {backward}" if backward else forward

    def collectives(
        self, cuts: Iterable[tuple[int, str | None]], sizes: Mapping[str, int]
    ) -> tuple[InnerCollective, ...]:
        """What ranks run inside an operator, in order.

        Where several axes cut a dim, each goes over one after the other; what has moved moves back
        in the opposite order.

        Args:
            cuts: axes, and the letter that each of them cuts; None for none.
            sizes: letter sizes on a rank, after all cuts.
        """
        if not self.listed:
            return ()
        axes = sorted(axis for axis, letter in cuts if letter in self.over)
        return tuple(
            InnerCollective(axis, reduction.operation, reduction.nbytes(sizes), reduction.backward)
            for reduction in self.listed
            for axis in (axes[::-1] if reduction.is_back else axes)
        )


NO_REDUCTIONS = Reductions()


def is_real(tensor: Tensor) -> bool:
    """Whether a tensor has floating-point numbers that can be compared."""
    return tensor.dtype.is_differentiable and not tensor.dtype.startswith("complex")


def statistic_bytes(tensor: Tensor) -> int:
    """Bytes of a number in statistics of a tensor: they are taken in 32 bits at least."""
    return max(tensor.dtype.itemsize, DType.FLOAT32.itemsize)
