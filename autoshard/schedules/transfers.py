"""Transfers between pipeline stages: which rank sends which part of a tensor to whom, and seconds.

Every receiving rank gets each part of its shard from one rank that has it: the one at the most
similar position, so that ranks of equal meshes with equal layouts send their shard to their
counterpart. The gradient comes back by the same rule with the roles exchanged; the gradient of an
I-typed tensor is the same on all ranks, that of a shard is the slice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import PlanError
from autoshard.layouts import Layout
from autoshard.mesh import Mesh

Slices = tuple[slice, ...]
Boxes = NDArray[np.int64]
"""Start and end of a rank's part along each dim, shape [ranks, dims, 2]."""


@dataclass(frozen=True, slots=True)
class Message:
    """A part of a tensor that one rank sends to another.

    Attributes:
        sender: number of the sending rank on its stage, row-major.
        receiver: number of the receiving rank on its stage.
        part: the part of the global tensor, one slice per dim.
    """

    sender: int
    receiver: int
    part: Slices

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return tuple(x.stop - x.start for x in self.part)

    def within(self, shard: Slices) -> Slices:
        """The part relative to a shard that contains it, given as slices of the global tensor."""
        return tuple(
            slice(x.start - own.start, x.stop - own.start)
            for x, own in zip(self.part, shard, strict=True)
        )


@lru_cache(maxsize=4096)
def messages(
    shape: tuple[int, ...],
    source: str,
    source_sizes: tuple[int, ...],
    target: str,
    target_sizes: tuple[int, ...],
) -> tuple[Message, ...]:
    """The messages that bring a tensor from a layout on one stage to one on the next.

    Args:
        shape: global shape.
        source: layout on the sending stage, as text; I, R and S(dim) only.
        source_sizes: sizes of the sending stage's axes.
        target: layout on the receiving stage.
        target_sizes: sizes of the receiving stage's axes.

    Returns:
        Messages ordered by sender, then receiver. Parts without elements are not sent.

    Raises:
        PlanError: a layout cannot be transferred.
    """
    have, want = _boxes(shape, source, source_sizes), _boxes(shape, target, target_sizes)
    num_senders, num_receivers = len(have), len(want)
    distinct, replica_of = np.unique(have.reshape(num_senders, -1), axis=0, return_inverse=True)
    replica_of = replica_of.reshape(-1)
    boxes = distinct.reshape(len(distinct), *have.shape[1:])
    replicas = [np.flatnonzero(replica_of == number) for number in range(len(boxes))]
    found = []
    for receiver, box in enumerate(want):
        low = np.maximum(boxes[:, :, 0], box[:, 0])
        high = np.minimum(boxes[:, :, 1], box[:, 1])
        for number in np.flatnonzero((low < high).all(axis=1)).tolist():
            candidates = replicas[number]
            # Relative positions sender / num_senders and receiver / num_receivers, compared in
            # whole numbers: the same on every machine, as both ends must agree.
            distance = np.abs(candidates * num_receivers - receiver * num_senders)
            part = tuple(map(slice, low[number].tolist(), high[number].tolist()))
            found.append(Message(int(candidates[distance.argmin()]), receiver, part))
    return tuple(sorted(found, key=lambda m: (m.sender, m.receiver)))


def largest_load(sent: Sequence[Message], itemsize: int) -> int:
    """Bytes of the rank that sends or receives the most."""
    loads: dict[tuple[bool, int], int] = {}
    for message in sent:
        nbytes = prod(message.shape) * itemsize
        for key in ((True, message.sender), (False, message.receiver)):
            loads[key] = loads.get(key, 0) + nbytes
    return max(loads.values(), default=0)


def transfer_seconds(mesh: Mesh, senders: range, receivers: range, loads: Sequence[int]) -> float:
    """Seconds to send the values of a cut between two stages.

    Messages between neighbouring stages cross the outermost link level that separates any pair of
    counterparts; each rank has its own link. All values of a cut are sent together.

    Args:
        mesh: the devices of all stages.
        senders: numbers of the sending stage's devices.
        receivers: numbers of the receiving stage's devices.
        loads: bytes of the rank that sends or receives the most, for each value.
    """
    if senders == receivers or not loads:
        return 0.0
    topology = mesh.topology
    level = _separating_level(mesh, senders, receivers)
    rate = topology.levels[level].send
    fixed = topology.collective_overhead + rate.overhead + rate.latency
    return fixed + sum(loads) / rate.bandwidth


def _separating_level(mesh: Mesh, senders: range, receivers: range) -> int:
    """The innermost link level whose groups contain every sender with its counterpart."""
    levels = mesh.topology.levels
    number = max(len(senders), len(receivers))
    places = np.arange(number)
    first = senders.start + places * len(senders) // number
    second = receivers.start + places * len(receivers) // number
    for level, link in enumerate(levels[:-1]):
        if link.size is None or (first // link.size == second // link.size).all():
            return level
    return len(levels) - 1


def _boxes(shape: tuple[int, ...], text: str, axis_sizes: tuple[int, ...]) -> Boxes:
    layout = Layout.parse(text)
    if layout.is_partial or any(axis_type.sub_shards for axis_type in layout.types):
        raise PlanError(f"layout {text} cannot be sent between stages; it must be I, R or S(dim)")
    boxes = np.empty((prod(axis_sizes), len(shape), 2), dtype=np.int64)
    for rank in range(len(boxes)):
        coordinate = [int(c) for c in np.unravel_index(rank, axis_sizes)] if axis_sizes else []
        for dim, (part,) in enumerate(layout.local_slices(shape, axis_sizes, coordinate)):
            boxes[rank, dim] = part.start, max(part.start, part.stop)
    return boxes
