"""Collectives inside operators, needed when a dim that the operator works along is sharded.

* *Statistics*: a softmax needs the maximum and a sum along its dim, a normalisation a mean and a
  variance. With that dim sharded, each rank computes them on its shard and an all-reduce
  combines them: a number per row instead of a tensor. `Reductions` lists them.
* *Routing*: operators on rows ordered by expert move rows to the ranks of their experts with an
  all-to-all (`Operation.MOVE`, also in `Reductions`).
* *Halos*: overlapping windows (convolution, pooling, interpolation) need the edges of the
  neighbours' shards. `Halo` says how wide they are.

A rule writes reductions as text: `max sum*2 | sum` runs a maximum and two sums per row in forward
(the sums in one all-reduce), and one sum in backward.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import prod
from typing import NamedTuple

from autoshard.graph import DType, Tensor
from autoshard.layouts import Action

_TERM = re.compile(r"(?P<operation>[a-z]+)(\*(?P<times>\d+))?(:(?P<dtype>\w+))?")


class Operation(StrEnum):
    """Operation of a collective inside an operator."""

    SUM = "sum"
    """All-reduce with a sum."""
    MAX = "max"
    """All-reduce with a maximum."""
    MOVE = "move"
    """All-to-all: each row is sent to the rank that needs it."""
    HALO = "halo"
    """Exchange of shard edges with both neighbours."""

    @property
    def action(self) -> Action:
        """The collective that runs."""
        return _ACTIONS.get(self, Action.ALL_REDUCE)


_ACTIONS = {Operation.MOVE: Action.ALL_TO_ALL, Operation.HALO: Action.HALO_EXCHANGE}

ShardedLetters = Iterable[tuple[int, str | None]]
"""Mesh axes, each with the index letter that it shards, or None."""


@dataclass(frozen=True, slots=True)
class InnerCollective:
    """A collective that a strategy runs inside an operator.

    Attributes:
        axis: the mesh axis.
        operation: how values are combined.
        nbytes: bytes of a rank's statistics; of routed rows, the mean over ranks; of halos, of
            the rank that sends or receives most.
        backward: True if it runs in the backward pass.
        copied: bytes that local copies for it write on the rank.
    """

    axis: int
    operation: Operation
    nbytes: int
    backward: bool
    copied: int = 0


@dataclass(frozen=True, slots=True)
class LetterReduction:
    """One collective, run on each axis that shards the letter it is for.

    Attributes:
        operation: how values are combined.
        per: letters whose local sizes multiply to the number of rows.
        itemsize: bytes of a number.
        times: numbers per row.
        backward: True if it runs in the backward pass, for the gradient of the first input.
    """

    operation: Operation
    per: tuple[str, ...]
    itemsize: int
    times: int = 1
    backward: bool = False

    @property
    def returns_rows(self) -> bool:
        """True if it sends rows back to the ranks that had them before forward."""
        return self.operation is Operation.MOVE and self.backward

    def nbytes(self, sizes: Mapping[str, int]) -> int:
        """Bytes of a rank's statistics, given the letter sizes on the rank."""
        return self.times * self.itemsize * prod(sizes[letter] for letter in self.per)


@dataclass(frozen=True, slots=True)
class Reductions:
    """The collectives inside an operator when any of some letters is sharded.

    Attributes:
        over: the letters that statistics are taken over.
        listed: the collectives, in order.
        spilled: letters of the intermediate tensor that then goes through memory, although the
            fused kernel of the whole operator keeps it on chip (attention scores).
        spilled_bytes: bytes read and written per element of that tensor.
    """

    over: frozenset[str] = frozenset()
    listed: tuple[LetterReduction, ...] = ()
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
        """Parse the text form of reductions.

        Args:
            text: `forward | backward`, each a list of `max`, `sum` or `move`; `sum*2` has two
                numbers per row, `max:int64` another element type.
            over: the letters that statistics are taken over.
            per: the letters that index the rows.
            itemsize: bytes of a number.
            spilled: letters of the spilled tensor.
            spilled_bytes: bytes per element of it.
        """
        letters, rows = frozenset(over), tuple(per)
        if not letters:
            return cls()
        return cls(
            letters,
            tuple(
                LetterReduction(
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
        """The text form, without element types."""
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
        self, sharded: ShardedLetters, sizes: Mapping[str, int]
    ) -> tuple[InnerCollective, ...]:
        """The collectives of a strategy, in order.

        When several axes shard a dim they communicate one after the other; rows return in the
        opposite order.

        Args:
            sharded: mesh axes with the letter that each shards.
            sizes: letter sizes on a rank.
        """
        if not self.listed:
            return ()
        axes = sorted(axis for axis, letter in sharded if letter in self.over)
        return tuple(
            InnerCollective(axis, reduction.operation, reduction.nbytes(sizes), reduction.backward)
            for reduction in self.listed
            for axis in (axes[::-1] if reduction.returns_rows else axes)
        )


NO_REDUCTIONS = Reductions()


def is_real(tensor: Tensor) -> bool:
    """True for floating-point tensors that are not complex."""
    return tensor.dtype.is_differentiable and not tensor.dtype.startswith("complex")


def statistic_bytes(tensor: Tensor) -> int:
    """Bytes of a number in statistics of a tensor: they have at least 32 bits."""
    return max(tensor.dtype.itemsize, DType.FLOAT32.itemsize)


Letters = tuple[tuple[str, ...], ...]
"""The index letters of each dim of a tensor."""


class Edges(NamedTuple):
    """Halo widths of a dim: numbers of elements that a shard needs from its neighbours.

    Attributes:
        dim: dim of the operator's first input.
        before: number of elements needed from the previous shard.
        after: number of elements needed from the next shard.
    """

    dim: int
    before: int
    after: int


class HaloBytes(NamedTuple):
    """Bytes that a halo exchange moves and uses on one rank.

    Attributes:
        exchanged: bytes of each exchange by dim of the first input, in order, for the rank that
            sends or receives most.
        extended: bytes of the shard with its halo, which forward works on.
        saved: bytes of the halo saved for backward.
        backward_workspace: bytes of the extended gradient, and of the extended shard if rebuilt.
    """

    exchanged: Mapping[int, int]
    extended: int
    saved: int
    backward_workspace: int


NO_HALO_BYTES = HaloBytes({}, 0, 0, 0)


@dataclass(frozen=True)
class Halo:
    """The neighbours' edges that an operator needs when any of some letters is sharded.

    Forward exchanges edges with both neighbours; backward returns the gradients of what was
    received. With several dims sharded, each exchange includes the halos of the previous dims,
    and so the corners.

    Attributes:
        edges: halo widths by letter.
        image: letters of the first input.
        itemsize: bytes of an element of the first input.
        trimmed: letters of an output that is computed too large and trimmed; () for none.
        rebuilds: True if backward needs the extended shard, which is then assembled again.
    """

    edges: Mapping[str, Edges] = field(default_factory=dict)
    image: Letters = ()
    itemsize: int = 1
    trimmed: Letters = ()
    rebuilds: bool = False

    def allows(self, letter: str, sizes: Mapping[str, int], parts: int) -> bool:
        """True if shards of a letter are even, and long enough for their neighbours' halos."""
        edges = self.edges.get(letter)
        if edges is None:
            return True
        rows = prod(sizes[x] for x in self.image[edges.dim])
        return sizes[letter] % parts == 0 and rows // parts >= max(edges.before, edges.after)

    def nbytes(self, whole: Sequence[int], local: Sequence[int]) -> HaloBytes:
        """Bytes on a rank, given the global and the local shape of the first input."""
        shape, exchanged = list(local), {}
        for dim, before, after in sorted(self.edges.values()):
            if shape[dim] == whole[dim]:
                continue
            # Of two ranks each has one neighbour.
            two = whole[dim] == 2 * shape[dim]
            width = max(before, after) if two else before + after
            exchanged[dim] = width * self.itemsize * prod((*shape[:dim], *shape[dim + 1 :]))
            shape[dim] += before + after
        if not exchanged:
            return NO_HALO_BYTES
        extended = self.itemsize * prod(shape)
        return HaloBytes(
            exchanged,
            extended,
            sum(exchanged.values()) if self.rebuilds else 0,
            extended * (2 if self.rebuilds else 1),
        )

    def letter_nbytes(self, whole: Mapping[str, int], sizes: Mapping[str, int]) -> HaloBytes:
        """Bytes on a rank, given the letter sizes before and after sharding."""
        return self.nbytes(_shape(self.image, whole), _shape(self.image, sizes))

    def collectives(
        self, sharded: ShardedLetters, whole: Mapping[str, int], sizes: Mapping[str, int]
    ) -> tuple[InnerCollective, ...]:
        """The exchanges of a strategy, in order; gradients return in the opposite order.

        Args:
            sharded: mesh axes with the letter that each shards.
            whole: letter sizes before sharding.
            sizes: letter sizes on a rank.
        """
        axes = {self.edges[x].dim: axis for axis, x in sharded if x is not None and x in self.edges}
        if not axes:
            return ()
        halo = self.letter_nbytes(whole, sizes)
        trimmed = self.itemsize * prod(_shape(self.trimmed, sizes)) if self.trimmed else 0
        own = self.itemsize * prod(_shape(self.image, sizes))
        rebuilt = halo.extended if self.rebuilds else 0
        forward = [
            InnerCollective(axes[dim], Operation.HALO, nbytes, backward=False)
            for dim, nbytes in halo.exchanged.items()
        ]
        backward = [replace(exchange, backward=True) for exchange in forward[::-1]]
        # Local copies are counted with the first exchange of each pass.
        forward[0] = replace(forward[0], copied=halo.extended + trimmed)
        backward[0] = replace(backward[0], copied=own + rebuilt + trimmed)
        return (*forward, *backward)


def _shape(letters: Letters, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(prod(sizes[x] for x in dim) for dim in letters)


NO_HALO = Halo()
