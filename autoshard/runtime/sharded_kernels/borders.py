"""Slices extended by the edges of the slices next to them: `autoshard.ops.halo` in code."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from autoshard.errors import PlanError
from autoshard.runtime.exchange import Received
from autoshard.runtime.local_node import LocalNode, Ranks


@dataclass(frozen=True, slots=True)
class Border:
    """What a rank's slice of one dim is extended by.

    Attributes:
        dim: counted from the last, as -1.
        axis: the mesh axis that cuts it.
        before: elements before the slice.
        after: elements behind it.
    """

    dim: int
    axis: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class Borders:
    """What a rank's slices are extended by.

    Beyond the ends of the whole there is nobody to ask, and what is there is filled.

    Attributes:
        each: by dim, ascending.
        ranks: the others.
        fill: the number beyond the ends; None where the last number there is repeated.
    """

    each: tuple[Border, ...]
    ranks: Ranks
    fill: float | None = 0.0

    @classmethod
    def of(
        cls,
        local: LocalNode,
        edges: Sequence[tuple[int, int]],
        ratios: Sequence[tuple[int, int]],
        fill: float | None = 0.0,
    ) -> "Borders | None":
        """The borders of the last dims of the first input; None where it is cut in none of them.

        Args:
            local: the operator.
            edges: what a slice of each of these dims lacks before and behind it.
            ratios: of the places that are read to those that are made.
            fill: the number beyond the ends.

        Raises:
            PlanError: a dim is cut by several axes; or slices are too short, or not what the
                operator makes of each other, as may be at other sizes than those that the plan
                was made for.
        """
        found = []
        rank = len(local.input_shapes[0])
        for i, ((before, after), ratio) in enumerate(zip(edges, ratios, strict=True)):
            dim = i - len(edges)
            axes = local.axes_cutting((rank + dim,))
            if axes and (before or after):
                found.append(Border(dim, _only(axes, local), before, after))
                _check(local, found[-1], ratio)
        return cls(tuple(found), local.place.ranks, fill) if found else None

    def cuts(self, dim: int) -> bool:
        """Whether a dim, counted from the last, is extended."""
        return any(border.dim == dim for border in self.each)

    def shape(self, shape: Sequence[int]) -> list[int]:
        """The shape of a slice with its borders."""
        extended = list(shape)
        for border in self.each:
            extended[border.dim] += border.before + border.after
        return extended

    def extend(self, values: torch.Tensor) -> tuple[torch.Tensor, list[Received]]:
        """A slice with the edges that its neighbours send, and these edges."""
        received: list[Received] = []

        def ask(number: int, own: torch.Tensor) -> Received:
            border = self.each[number]
            to_before = own.narrow(border.dim, 0, border.after)
            to_after = _last(own, border.dim, border.before)
            came = self.ranks.exchange(to_before.contiguous(), to_after.contiguous(), border.axis)
            received.append(came)
            return came

        return self._filled(values, ask), received

    def rebuild(self, values: torch.Tensor, received: Sequence[Received]) -> torch.Tensor:
        """The slice with edges that came before."""
        return self._filled(values, lambda number, _: received[number])

    def fold(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of a slice, from that of the slice with its edges.

        Args:
            gradient: of the extended slice; it is overwritten.
        """
        for border in reversed(self.each):
            dim, before, after = border.dim, border.before, border.after
            first, last = gradient.narrow(dim, 0, before), _last(gradient, dim, after)
            own = gradient.narrow(dim, before, gradient.shape[dim] - before - after)
            from_before, from_after = self.ranks.exchange(
                first.contiguous(), last.contiguous(), border.axis
            )
            if from_before is not None:
                own.narrow(dim, 0, after).add_(from_before)
            elif self.fill is None:
                own.narrow(dim, 0, 1).add_(first.sum(dim, keepdim=True))
            if from_after is not None:
                _last(own, dim, before).add_(from_after)
            elif self.fill is None:
                _last(own, dim, 1).add_(last.sum(dim, keepdim=True))
            gradient = own
        return gradient.contiguous()

    def _filled(
        self, values: torch.Tensor, edges: Callable[[int, torch.Tensor], Received]
    ) -> torch.Tensor:
        """The extended slice; of each dim the edges reach over those of the dims before it."""
        extended = values.new_empty(self.shape(values.shape))
        views = [extended]
        for border in reversed(self.each):
            views.append(views[-1].narrow(border.dim, border.before, values.shape[border.dim]))
        own = views.pop()
        own.copy_(values)
        for number, (border, view) in enumerate(zip(self.each, reversed(views), strict=True)):
            from_before, from_after = edges(number, own)
            first = view.narrow(border.dim, 0, border.before)
            last = _last(view, border.dim, border.after)
            self._put(first, from_before, own.narrow(border.dim, 0, 1))
            self._put(last, from_after, _last(own, border.dim, 1))
            own = view
        return extended

    def _put(self, place: torch.Tensor, edge: torch.Tensor | None, end: torch.Tensor) -> None:
        if edge is not None:
            place.copy_(edge)
        elif self.fill is None:
            place.copy_(end.expand_as(place))
        else:
            place.fill_(self.fill)


def _only(axes: Sequence[int], local: LocalNode) -> int:
    """The axis whose ranks are neighbours."""
    if len(axes) > 1:
        raise PlanError(
            f"node {local.node.name!r} exchanges edges along a dim that {len(axes)} mesh axes cut; "
            f"a plan may cut it by one"
        )
    return axes[0]


def _check(local: LocalNode, border: Border, ratio: tuple[int, int]) -> None:
    size, made = (shapes[0][border.dim] for shapes in (local.input_shapes, local.output_shapes))
    reads, makes = ratio
    if size * makes != made * reads or size < max(border.before, border.after):
        raise PlanError(
            f"node {local.node.name!r} cannot make slices of {made} places of slices of {size}, "
            f"with {border.before} places from before and {border.after} from behind; choose "
            f"sizes that strides and ranks divide, or plan for these"
        )


def _last(tensor: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """The last elements of a dim."""
    return tensor.narrow(dim, tensor.shape[dim] - count, count)
