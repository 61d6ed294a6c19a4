"""An operator call on one rank: local shapes, the rank's coordinate, and its communication."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import P2POp, ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from autoshard.graph import Node, references
from autoshard.layouts import Layout
from autoshard.ops import Operation

Step = int | torch.Tensor
"""Index of the training step; while a compiler traces, a tensor with it."""

LocalKernel = Callable[[Sequence[torch.Tensor], Step], tuple[torch.Tensor, ...]]
"""Function of the local inputs and the step that returns the local outputs."""

Received = tuple[torch.Tensor | None, torch.Tensor | None]
"""Tensors from the previous and the next rank; None if there is no such rank."""


class Ranks:
    """Communication of operators with other ranks.

    The methods of this base class raise errors: it is used where there are no other ranks.
    """

    def all_reduce(self, tensor: torch.Tensor, axis: int, operation: Operation) -> None:
        """Reduce a contiguous tensor, in place, over the ranks of one mesh axis.

        Raises:
            RuntimeError: there are no other ranks.
        """
        raise _no_ranks(f"a {operation} of {tuple(tensor.shape)}", axis)

    def all_to_all(
        self, rows: torch.Tensor, axis: int, sent: list[int], received: list[int]
    ) -> torch.Tensor:
        """Exchange rows with the ranks of one mesh axis.

        Args:
            rows: to send, those for the first rank first.
            axis: the mesh axis.
            sent: number of rows to each rank.
            received: number of rows from each rank.

        Returns:
            The received rows, those from the first rank first.

        Raises:
            RuntimeError: there are no other ranks.
        """
        raise _no_ranks(f"an all-to-all of {len(rows)} rows, {sent} to {received},", axis)

    def exchange(self, to_before: torch.Tensor, to_after: torch.Tensor, axis: int) -> Received:
        """Exchange contiguous edges of slices with the neighbours on one mesh axis.

        See `exchange_edges`.

        Raises:
            RuntimeError: there are no other ranks.
        """
        shapes = f"{tuple(to_before.shape)} and {tuple(to_after.shape)}"
        raise _no_ranks(f"an exchange of {shapes}", axis)


def _no_ranks(communication: str, axis: int) -> RuntimeError:
    return RuntimeError(f"{communication} over axis {axis} needs the ranks of that axis")


@dataclass(frozen=True, slots=True)
class MeshRanks(Ranks):
    """Communication over the process groups of a device mesh."""

    mesh: DeviceMesh

    def all_reduce(self, tensor: torch.Tensor, axis: int, operation: Operation) -> None:
        """Reduce a tensor over the process group of an axis."""
        dist.all_reduce(tensor, _OPERATIONS[operation], self.mesh.get_group(axis))

    def all_to_all(
        self, rows: torch.Tensor, axis: int, sent: list[int], received: list[int]
    ) -> torch.Tensor:
        """Exchange rows over the process group of an axis."""
        arrived = rows.new_empty((sum(received), *rows.shape[1:]))
        group = self.mesh.get_group(axis)
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group)
        return arrived

    def exchange(self, to_before: torch.Tensor, to_after: torch.Tensor, axis: int) -> Received:
        """Exchange edges over the process group of an axis."""
        return exchange_edges(to_before, to_after, self.mesh.get_group(axis))


_OPERATIONS = {Operation.SUM: dist.ReduceOp.SUM, Operation.MAX: dist.ReduceOp.MAX}


def exchange_edges(
    to_before: torch.Tensor, to_after: torch.Tensor, group: ProcessGroup
) -> Received:
    """Exchange tensors with the previous and the next rank, all at once.

    The previous rank sends a tensor like `to_after`, the next one a tensor like `to_before`.
    Tensors without elements are not sent.

    Args:
        to_before: contiguous tensor for the previous rank.
        to_after: contiguous tensor for the next rank.
        group: the ranks in order; the first has no previous rank, and the last no next one.
    """
    rank = group.rank()
    from_before = torch.empty_like(to_after) if rank > 0 else None
    from_after = torch.empty_like(to_before) if rank + 1 < group.size() else None
    operations = [
        P2POp(kind, tensor, group=group, group_peer=peer)
        for kind, tensor, peer, neighbour in (
            (dist.isend, to_before, rank - 1, from_before),
            (dist.isend, to_after, rank + 1, from_after),
            (dist.irecv, from_before, rank - 1, from_before),
            (dist.irecv, from_after, rank + 1, from_after),
        )
        if neighbour is not None and tensor is not None and tensor.numel()
    ]
    # One after the other, neighbours that both send first could wait for each other (NCCL).
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    return from_before, from_after


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a rank on the mesh.

    Attributes:
        axis_sizes: size of each mesh axis.
        coordinate: the rank's index on each axis.
        device: the rank's device.
        seed: seed of all random numbers; the same on all ranks.
        ranks: communication with the other ranks.
    """

    axis_sizes: tuple[int, ...]
    coordinate: tuple[int, ...]
    device: torch.device
    seed: int = 0
    ranks: Ranks = field(default_factory=Ranks)


_RUNNING_STATISTICS = frozenset({"running_mean", "running_var"})


@dataclass(frozen=True, slots=True)
class LocalNode:
    """An operator call with its planned layouts, on one rank.

    Attributes:
        node: the call in the graph.
        inputs: layout of each tensor input.
        outputs: layout of each output.
        shapes: global shape of each input.
        input_shapes: local shape of each input.
        output_shapes: local shape of each output.
        place: position of the rank on the mesh.
        custom: names of operators outside ATen that may be called.
        model: the model that runs as planned; None if only its program runs.
    """

    node: Node
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    shapes: tuple[tuple[int, ...], ...]
    input_shapes: tuple[tuple[int, ...], ...]
    output_shapes: tuple[tuple[int, ...], ...]
    place: Place
    custom: frozenset[str] = frozenset()
    model: nn.Module | None = None

    def names(self) -> list[str]:
        """The argument name of each tensor input."""
        return [name for name, value in self.node.arguments for _ in references(value)]

    def named(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inputs by argument name; not for operators with lists of tensors."""
        return dict(zip(self.names(), tensors, strict=True))

    def running_statistics(self) -> tuple[int, ...]:
        """Positions of running means and variances among the tensor inputs.

        Norms change them in place, although their schema declares no mutation.
        """
        return tuple(i for i, name in enumerate(self.names()) if name in _RUNNING_STATISTICS)

    def integer(self, name: str, default: int) -> int:
        """An integer argument of the operator."""
        value = self.node.argument(name, default)
        assert isinstance(value, int)
        return value

    def number(self, name: str, default: float) -> float:
        """A numeric argument of the operator."""
        value = self.node.argument(name, default)
        assert isinstance(value, (int, float))
        return value

    def dims(self, name: str) -> tuple[int, ...]:
        """The value of an argument that names dims of the first input, as non-negative dims."""
        rank = max(len(self.input_shapes[0]), 1)
        value = self.node.argument(name)
        listed = value if isinstance(value, tuple) else (value,)
        return tuple(dim % rank for dim in listed if isinstance(dim, int))

    def axes_sharding(self, dims: Sequence[int], tensor: int = 0) -> tuple[int, ...]:
        """The axes of more than one rank that shard one of some dims of an input, ascending."""
        return tuple(
            axis
            for axis, (size, axis_type) in enumerate(
                zip(self.place.axis_sizes, self.inputs[tensor].types, strict=True)
            )
            if size > 1 and axis_type.is_shard and axis_type.dim in dims
        )

    def count(self, dims: Sequence[int]) -> int:
        """The product of the global sizes of some dims of the first input."""
        return prod(self.shapes[0][dim] for dim in dims)

    def start(self, dim: int, tensor: int = 0) -> int:
        """The global index at which the rank's slice of a dim of an input starts."""
        place, shape = self.place, self.shapes[tensor]
        slices = self.inputs[tensor].local_slices(shape, place.axis_sizes, place.coordinate)
        start: int = slices[dim][0].start
        return start
