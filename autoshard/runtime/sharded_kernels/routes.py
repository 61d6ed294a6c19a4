"""Which rows a rank has where rows are ordered by expert, and how they get there.

A place says where the ids name a row: token times slots plus slot. The ids of a rank are those of
all the tokens whose rows it may meet, so each rank works out by itself what every other one has,
and nothing but rows has to be sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from autoshard.runtime.local_node import LocalNode


@dataclass(frozen=True, slots=True)
class Exchange:
    """An all-to-all of rows over one mesh axis.

    Attributes:
        axis: the mesh axis.
        sent: how many rows go to each rank of the axis.
        received: how many come from each.
        order: the rows that there are, in the order in which they are sent; None where that is
            the order in which they are.
        arrival: the rows that there will be, in the order in which they arrive.
    """

    axis: int
    sent: list[int]
    received: list[int]
    order: torch.Tensor | None
    arrival: torch.Tensor


@dataclass(frozen=True, slots=True)
class Routes:
    """The way of rows from the rank of their token to the rank of their expert.

    Attributes:
        places: of the rows of a rank's own tokens, counted within these: by expert, or as the
            first exchange sends them.
        exchanges: what brings them to their experts, in order.
        is_complete: whether they are all rows of these tokens.
    """

    places: torch.Tensor
    exchanges: tuple[Exchange, ...]
    is_complete: bool


@dataclass(frozen=True, slots=True)
class Router:
    """Works out routes from ids.

    Attributes:
        num_experts: of the whole.
        expert_axes: axes that cut experts, outermost first.
        moved_axes: those of them that cut tokens too, where these are not with their experts,
            outermost first.
        axis_sizes: ranks of each mesh axis.
        coordinate: the rank's place on each axis.
    """

    num_experts: int
    expert_axes: tuple[int, ...]
    moved_axes: tuple[int, ...]
    axis_sizes: tuple[int, ...]
    coordinate: tuple[int, ...]

    @classmethod
    def of(cls, local: LocalNode, *, rows: int, tokens: int, num_experts: int) -> "Router":
        """The router of an operator.

        Args:
            local: the operator.
            rows: which of its tensors, inputs before outputs, is ragged.
            tokens: which of them is cut as tokens are.
            num_experts: of the whole.
        """
        layouts = (*local.inputs, *local.outputs)
        sizes = local.place.axis_sizes
        experts = tuple(axis for axis in layouts[rows].cutting_axes(0) if sizes[axis] > 1)
        moved = tuple(axis for axis in layouts[tokens].cutting_axes(0) if axis in experts)
        return cls(num_experts, experts, moved, sizes, local.place.coordinate)

    def routes(self, ids: torch.Tensor, *, back: bool = False) -> Routes:
        """The routes of the rows of some tokens.

        Forward takes the axes in ascending order, as `Reductions.collectives` lists them.

        Args:
            ids: the experts of each token, shape [T, k].
            back: whether forward takes the routes from their end.
        """
        by_expert, places = torch.sort(ids.reshape(-1), stable=True)
        own = ids.numel() // self._parts(self.moved_axes)
        targets = self._digits(by_expert // self._experts_each, self.expert_axes)
        sources = self._digits(places // own, self.moved_axes)
        wanted = dict(targets) | dict(sources)  # where each row is, axis by axis
        held = self._here(wanted)
        mine = places[held] % own
        exchanges: list[Exchange] = []
        for axis in sorted(self.moved_axes, reverse=back):
            wanted[axis] = targets[axis]
            after = self._here(wanted)
            exchange = self._exchange(axis, targets[axis][held], sources[axis][after])
            if not exchanges:
                mine, exchange = mine[exchange.order], replace(exchange, order=None)
            exchanges.append(exchange)
            held = after
        is_complete = len(self.moved_axes) == len(self.expert_axes)
        return Routes(mine, tuple(exchanges), is_complete)

    def counts(self, ids: torch.Tensor) -> torch.Tensor:
        """How many rows each of the rank's experts has, shape [E on the rank]."""
        index = 0
        for axis in self.expert_axes:
            index = index * self.axis_sizes[axis] + self.coordinate[axis]
        flat = ids.reshape(-1)
        # Counts by adding up need no look at the ids on the host, as torch.bincount does.
        every = flat.new_zeros(self.num_experts).index_add_(0, flat, torch.ones_like(flat))
        return every.narrow(0, index * self._experts_each, self._experts_each)

    @property
    def _experts_each(self) -> int:
        return self.num_experts // self._parts(self.expert_axes)

    def _parts(self, axes: Sequence[int]) -> int:
        parts = 1
        for axis in axes:
            parts *= self.axis_sizes[axis]
        return parts

    def _digits(self, numbers: torch.Tensor, axes: Sequence[int]) -> dict[int, torch.Tensor]:
        """Numbers of slices as places on each axis, of which the last is the innermost."""
        digits = {}
        for axis in reversed(axes):
            digits[axis] = numbers % self.axis_sizes[axis]
            numbers = numbers // self.axis_sizes[axis]
        return digits

    def _here(self, where: Mapping[int, torch.Tensor]) -> torch.Tensor | slice:
        """The rows that are on this rank, if each is where it says; as an index."""
        here = [where[axis] == self.coordinate[axis] for axis in self.expert_axes]
        return torch.stack(here).all(0).nonzero().squeeze(1) if here else slice(None)

    def _exchange(self, axis: int, targets: torch.Tensor, sources: torch.Tensor) -> Exchange:
        num_ranks = self.axis_sizes[axis]
        sent, received = (
            torch.bincount(ranks, minlength=num_ranks).tolist() for ranks in (targets, sources)
        )
        order, arrival = (torch.sort(ranks, stable=True).indices for ranks in (targets, sources))
        return Exchange(axis, sent, received, order, arrival)
