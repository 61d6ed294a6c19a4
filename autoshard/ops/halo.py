"""Edges of the neighbours' slices that a rank needs where windows overlap.

A rank with some rows of an image also needs the last rows of the rank before it and the first
rows of the rank behind it. It gets them in one exchange with these two, forward, and gives the
gradients of what it got back in another, backward. Where several dims are cut, the exchange of
one carries what the exchanges of those before it brought, and so the corners.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from autoshard.ops.reduction import InnerCollective, Operation

Letters = tuple[tuple[str, ...], ...]
"""The letters of each dim of a tensor."""


class Edges(NamedTuple):
    """What a slice of a dim lacks.

    Attributes:
        dim: of the operator's first input.
        before: how many elements of the slice before.
        after: how many elements of the slice behind.
    """

    dim: int
    before: int
    after: int


class Borders(NamedTuple):
    """What a rank does about the edges of a slice, in bytes.

    Attributes:
        exchanged: by dim of the first input, in the order of the exchanges; of the rank that
            sends or receives most.
        extended: of the slice with all edges, which forward works on.
        kept: of the edges that are kept for backward.
        working_backward: that backward works on: the extended gradient, and perhaps the extended
            slice once more.
    """

    exchanged: Mapping[int, int]
    extended: int
    kept: int
    working_backward: int


NO_BORDERS = Borders({}, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Halo:
    """The edges that an operator needs where any of some letters is cut.

    Attributes:
        edges: of each such letter.
        image: letters of the first input.
        itemsize: bytes of its elements.
        trimmed: letters of an output that is made too large and trimmed; none of others.
        rebuilds: whether backward needs the extended slice, which is then made once more.
    """

    edges: Mapping[str, Edges] = field(default_factory=dict)
    image: Letters = ()
    itemsize: int = 1
    trimmed: Letters = ()
    rebuilds: bool = False

    def allows(self, letter: str, sizes: Mapping[str, int], parts: int) -> bool:
        """Whether slices of a letter are even, and long enough for their neighbours' edges."""
        edges = self.edges.get(letter)
        if edges is None:
            return True
        rows = prod(sizes[x] for x in self.image[edges.dim])
        return sizes[letter] % parts == 0 and rows // parts >= max(edges.before, edges.after)

    def borders(self, whole: Sequence[int], local: Sequence[int]) -> Borders:
        """What a rank does about edges, given the whole shape of the first input and its own."""
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
            return NO_BORDERS
        extended = self.itemsize * prod(shape)
        return Borders(
            exchanged,
            extended,
            sum(exchanged.values()) if self.rebuilds else 0,
            extended * (2 if self.rebuilds else 1),
        )

    def borders_of(self, whole: Mapping[str, int], sizes: Mapping[str, int]) -> Borders:
        """What a rank does about edges, given the letter sizes before and after all cuts."""
        return self.borders(_shape(self.image, whole), _shape(self.image, sizes))

    def collectives(
        self,
        cuts: Iterable[tuple[int, str | None]],
        whole: Mapping[str, int],
        sizes: Mapping[str, int],
    ) -> tuple[InnerCollective, ...]:
        """What ranks run inside an operator, in order; gradients go the way back.

        Args:
            cuts: axes, and the letter that each of them cuts; None for none.
            whole: letter sizes before any cut.
            sizes: letter sizes on a rank, after all cuts.
        """
        axes = {self.edges[x].dim: axis for axis, x in cuts if x is not None and x in self.edges}
        if not axes:
            return ()
        borders = self.borders_of(whole, sizes)
        trimmed = self.itemsize * prod(_shape(self.trimmed, sizes)) if self.trimmed else 0
        own = self.itemsize * prod(_shape(self.image, sizes))
        forward = [
            InnerCollective(axes[dim], Operation.HALO, nbytes, backward=False)
            for dim, nbytes in borders.exchanged.items()
        ]
        backward = [
            InnerCollective(c.axis, c.operation, c.nbytes, backward=True) for c in forward[::-1]
        ]
        again = borders.extended if self.rebuilds else 0
        return (
            *_with_copies(forward, borders.extended + trimmed),
            *_with_copies(backward, own + again + trimmed),
        )


def _with_copies(collectives: Sequence[InnerCollective], copied: int) -> list[InnerCollective]:
    """The copies belong to the first."""
    first, *others = collectives
    return [
        InnerCollective(first.axis, first.operation, first.nbytes, first.backward, copied),
        *others,
    ]


def _shape(letters: Letters, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(prod(sizes[x] for x in dim) for dim in letters)


NO_HALO = Halo()
