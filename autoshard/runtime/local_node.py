"""An operator as one rank sees it: where the rank is, and which slices it has."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from autoshard.graph import Node, references
from autoshard.layouts import Layout
from autoshard.ops import Operation
from autoshard.runtime.exchange import Received, exchange_edges

LocalKernel = Callable[[Sequence[torch.Tensor], int], tuple[torch.Tensor, ...]]
"""Takes the local inputs and the number of the step; gives the local outputs."""


class Ranks(Protocol):
    """The other ranks, as operators meet them."""

    def all_reduce(self, tensor: torch.Tensor, axis: int, operation: Operation) -> None:
        """Put a contiguous tensor together, in place, over the ranks of one mesh axis."""
        ...

    def all_to_all(
        self, rows: torch.Tensor, axis: int, sent: list[int], received: list[int]
    ) -> torch.Tensor:
        """Send rows to the ranks of one mesh axis, and take theirs.

        Args:
            rows: contiguous, those for the first rank first.
            axis: the mesh axis.
            sent: how many go to each rank.
            received: how many come from each.

        Returns:
            What has come, from the first rank first.
        """
        ...

    def exchange(self, to_before: torch.Tensor, to_after: torch.Tensor, axis: int) -> Received:
        """Send edges to the two ranks next to this one on a mesh axis, and take theirs.

        Args:
            to_before: for the rank before, contiguous.
            to_after: for the rank behind, contiguous.
            axis: the mesh axis.
        """
        ...


@dataclass(frozen=True, slots=True)
class MeshRanks:
    """The ranks of a device mesh."""

    mesh: DeviceMesh

    def all_reduce(self, tensor: torch.Tensor, axis: int, operation: Operation) -> None:
        """Run the collective on the axis's process group."""
        dist.all_reduce(tensor, _OPERATIONS[operation], self.mesh.get_group(axis))

    def all_to_all(
        self, rows: torch.Tensor, axis: int, sent: list[int], received: list[int]
    ) -> torch.Tensor:
        """Run the collective on the axis's process group."""
        arrived = rows.new_empty((sum(received), *rows.shape[1:]))
        group = self.mesh.get_group(axis)
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group)
        return arrived

    def exchange(self, to_before: torch.Tensor, to_after: torch.Tensor, axis: int) -> Received:
        """Run the exchange on the axis's process group."""
        return exchange_edges(to_before, to_after, self.mesh.get_group(axis))


_OPERATIONS = {Operation.SUM: dist.ReduceOp.SUM, Operation.MAX: dist.ReduceOp.MAX}


class NoRanks:
    """Nobody to talk to."""

    def all_reduce(self, tensor: torch.Tensor, axis: int, operation: Operation) -> None:
        """Refuse.

        Raises:
            RuntimeError: always.
        """
        shape = tuple(tensor.shape)
        raise RuntimeError(f"a {operation} of {shape} over axis {axis} needs the axis's ranks")

    def all_to_all(
        self, rows: torch.Tensor, axis: int, sent: list[int], received: list[int]
    ) -> torch.Tensor:
        """Refuse.

        Raises:
            RuntimeError: always.
        """
        counts = f"sending {sent} of {len(rows)} rows and taking {received}"
        raise RuntimeError(f"{counts} over axis {axis} needs the axis's ranks")

    def exchange(self, to_before: torch.Tensor, to_after: torch.Tensor, axis: int) -> Received:
        """Refuse.

        Raises:
            RuntimeError: always.
        """
        shapes = f"{tuple(to_before.shape)} and {tuple(to_after.shape)}"
        raise RuntimeError(f"an exchange of {shapes} over axis {axis} needs the axis's ranks")


@dataclass(frozen=True, slots=True)
class Place:
    """Where on the mesh a rank is.

    Attributes:
        axis_sizes: size of each mesh axis.
        coordinate: the rank's place on each axis.
        device: the rank's device.
        seed: from which all random numbers follow; the same on all ranks.
        ranks: the others.
    """

    axis_sizes: tuple[int, ...]
    coordinate: tuple[int, ...]
    device: torch.device
    seed: int = 0
    ranks: Ranks = field(default_factory=NoRanks)


_TRACKED = frozenset({"running_mean", "running_var"})


@dataclass(frozen=True, slots=True)
class LocalNode:
    """An operator with the layouts in which a plan runs it.

    Attributes:
        node: the operator's call in the graph.
        inputs: layout of each tensor input.
        outputs: layout of each output.
        shapes: whole shape of each input.
        input_shapes: the rank's shape of each input.
        output_shapes: the rank's shape of each output.
        place: where the rank is.
        custom: names of operators that may be called though they are not of ATen.
    """

    node: Node
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    shapes: tuple[tuple[int, ...], ...]
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    place: Place
    custom: frozenset[str] = frozenset()

    def names(self) -> list[str]:
        """The argument that each tensor input is, or is listed in."""
        return [name for name, value in self.node.arguments for _ in references(value)]

    def named(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inputs by the names of the operator's schema, none of which is a list."""
        return dict(zip(self.names(), tensors, strict=True))

    def tracked(self) -> tuple[int, ...]:
        """Places of the tensor inputs that the operator may change, though its schema denies it.

        Norms that track statistics over steps do, all under the same names.
        """
        return tuple(place for place, name in enumerate(self.names()) if name in _TRACKED)

    def dims(self, name: str) -> tuple[int, ...]:
        """Dims of the first input named by an integer or a list, counted from the front."""
        rank = max(len(self.input_shapes[0]), 1)
        value = self.node.argument(name)
        listed = value if isinstance(value, tuple) else (value,)
        return tuple(dim % rank for dim in listed if isinstance(dim, int))

    def axes_cutting(self, dims: Sequence[int], tensor: int = 0) -> tuple[int, ...]:
        """The axes of more than one rank that cut some dims of an input, ascending."""
        return tuple(
            axis
            for axis, (size, axis_type) in enumerate(
                zip(self.place.axis_sizes, self.inputs[tensor].types, strict=True)
            )
            if size > 1 and axis_type.is_shard and axis_type.dim in dims
        )

    def count(self, dims: Sequence[int]) -> int:
        """How many elements some dims of the first input have in the whole."""
        return prod(self.shapes[0][dim] for dim in dims)

    def start(self, dim: int, tensor: int = 0) -> int:
        """Where the rank's slice of a dim of an input starts in the whole."""
        place, shape = self.place, self.shapes[tensor]
        slices = self.inputs[tensor].local_slices(shape, place.axis_sizes, place.coordinate)
        start: int = slices[dim][0].start
        return start
