"""Parts of a tensor that a rank sends to other stages, and those that it receives."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import P2POp, ProcessGroup

from autoshard.layouts import Layout
from autoshard.schedules.transfers import Slices, messages


@dataclass(frozen=True, slots=True)
class TransferEnd:
    """One end of a transfer: the ranks of a stage, and how they store the tensor.

    Attributes:
        ranks: global ranks, row-major.
        sizes: sizes of the stage's axes.
        layout: on these axes, as text.
    """

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    layout: str

    def shard(self, shape: tuple[int, ...], rank: int) -> Slices | None:
        """A rank's slice of each dim; None if it is not part of this end."""
        if rank not in self.ranks:
            return None
        place = np.unravel_index(self.ranks.index(rank), self.sizes) if self.sizes else ()
        coordinate = [int(number) for number in place]
        slices = Layout.parse(self.layout).local_slices(shape, self.sizes, coordinate)
        return tuple(part for (part,) in slices)


@dataclass(frozen=True, slots=True)
class ShardPart:
    """A part of this rank's shard that another rank has or wants.

    Attributes:
        peer: global rank of the other one.
        index: the part, relative to this rank's shard.
    """

    peer: int
    index: Slices


@dataclass(frozen=True, slots=True)
class Route:
    """The messages of one tensor that this rank sends and receives.

    Attributes:
        dtype: element type.
        local_shape: shape of this rank's shard at the receiving end; None if it is not there.
        sends: parts of its shard at the sending end.
        receives: parts of its shard at the receiving end.
        copies: parts that this rank has at both ends: where they are at the sending end, and at
            the receiving end.
    """

    dtype: torch.dtype
    local_shape: tuple[int, ...] | None
    sends: tuple[ShardPart, ...]
    receives: tuple[ShardPart, ...]
    copies: tuple[tuple[Slices, Slices], ...]

    @classmethod
    def of(
        cls, shape: tuple[int, ...], dtype: torch.dtype, source: TransferEnd, target: TransferEnd
    ) -> "Route":
        """The route of a tensor of a global shape from one end to another.

        Raises:
            PlanError: a layout cannot be transferred.
        """
        own = dist.get_rank()
        have, want = source.shard(shape, own), target.shard(shape, own)
        sends, receives, copies = [], [], []
        for one in messages(shape, source.layout, source.sizes, target.layout, target.sizes):
            sender, receiver = source.ranks[one.sender], target.ranks[one.receiver]
            if sender == receiver == own and have is not None and want is not None:
                copies.append((one.within(have), one.within(want)))
            elif sender == own and have is not None:
                sends.append(ShardPart(receiver, one.within(have)))
            elif receiver == own and want is not None:
                receives.append(ShardPart(sender, one.within(want)))
        return cls(
            dtype=dtype,
            local_shape=None if want is None else tuple(x.stop - x.start for x in want),
            sends=tuple(sends),
            receives=tuple(receives),
            copies=tuple(copies),
        )

    @property
    def is_local(self) -> bool:
        """True if this rank's shard at the receiving end is its shard at the sending end."""
        return not self.sends and not self.receives

    def send(self, tensor: torch.Tensor, group: ProcessGroup, tag: int) -> list[P2POp]:
        """The messages that send the parts of this rank's shard."""
        return [
            P2POp(dist.isend, tensor[part.index].contiguous(), part.peer, group, tag)
            for part in self.sends
        ]


class Messages:
    """Messages that have been started.

    All messages of an action are started together, also if they only send or only receive: NCCL
    uses another communicator for single ones, and both sides must use the same.

    Args:
        operations: the messages, in an order that is the same on both sides.
    """

    def __init__(self, operations: Sequence[P2POp]) -> None:
        self._tensors = [operation.tensor for operation in operations]  # until they are sent
        self._works = dist.batch_isend_irecv(list(operations)) if operations else []

    @property
    def is_done(self) -> bool:
        """True if nothing is under way."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait for all messages."""
        for work in self._works:
            work.wait()
        self._tensors, self._works = [], []


class Incoming:
    """This rank's shard of a tensor that arrives in parts.

    Args:
        route: of the tensor.
        device: of the shard.
    """

    def __init__(self, route: Route, device: torch.device) -> None:
        assert route.local_shape is not None
        self._tensor = torch.empty(route.local_shape, dtype=route.dtype, device=device)
        self._route = route
        # A part that is contiguous in the shard arrives there, others are copied.
        self._buffers = [self._tensor[part.index].contiguous() for part in route.receives]

    def operations(self, group: ProcessGroup, tag: int) -> list[P2POp]:
        """The messages that receive the parts."""
        pairs = zip(self._buffers, self._route.receives, strict=True)
        return [P2POp(dist.irecv, buffer, part.peer, group, tag) for buffer, part in pairs]

    def tensor(self) -> torch.Tensor:
        """The shard, after all messages have arrived."""
        for buffer, part in zip(self._buffers, self._route.receives, strict=True):
            target = self._tensor[part.index]
            if target.data_ptr() != buffer.data_ptr():
                target.copy_(buffer)
        self._buffers = []
        return self._tensor


def exchange(
    tensors: Sequence[torch.Tensor | None],
    routes: Sequence[Route],
    device: torch.device,
    group: ProcessGroup,
    tag: int,
) -> list[torch.Tensor | None]:
    """Send and receive tensors at once, and wait for them.

    Args:
        tensors: this rank's shard at the sending end of each route; None where it is not there.
        routes: of the tensors.
        device: of the shards.
        group: has the ranks of all routes.
        tag: of the messages.

    Returns:
        This rank's shard at the receiving end of each route; None where it is not there.
    """
    arriving = [None if route.local_shape is None else Incoming(route, device) for route in routes]
    operations: list[P2POp] = []
    for tensor, route, incoming in zip(tensors, routes, arriving, strict=True):
        if tensor is not None:
            operations += route.send(tensor, group, tag)
        if incoming is not None:
            operations += incoming.operations(group, tag)
    Messages(operations).wait()
    received = [None if incoming is None else incoming.tensor() for incoming in arriving]
    for tensor, route, whole in zip(tensors, routes, received, strict=True):
        for here, there in route.copies:
            assert tensor is not None
            assert whole is not None
            whole[there] = tensor[here]
    return received
