"""What the steps of a resharding do to a tensor, and the memory that they take."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from autoshard.layouts import Action, S, parse_type
from autoshard.plan.document import PlannedStep
from autoshard.plan.memory.record import Form, Shape


class Moves(NamedTuple):
    """What a resharding does to a tensor on one rank.

    Attributes:
        shape: local shape of what it makes.
        nbytes: of what it makes.
        in_place: whether it leaves the memory as it is.
        working: bytes beside what it reads and makes, forward.
        working_backward: bytes beside gradients, backward.
        passes_gradient: whether the gradient of what it reads is that of what it makes.
        in_flight_backward: bytes of what the first reduction of backward makes.
        reduces_once: whether there is one step.
        is_view: whether what arrives from all ranks is the tensor as it is.
    """

    shape: Shape
    nbytes: int
    in_place: bool
    working: int
    working_backward: int
    passes_gradient: bool
    in_flight_backward: int
    reduces_once: bool
    is_view: bool


def moves_of(
    before: Form, itemsize: int, steps: Sequence[PlannedStep], axis_sizes: Mapping[str, int]
) -> Moves:
    """What steps on axes of several ranks do to a tensor.

    Args:
        before: the tensor.
        itemsize: bytes of an element.
        steps: at least one.
        axis_sizes: ranks by the name of an axis.
    """
    shape = list(before.shape)
    sizes = [before.nbytes]
    for step in steps:
        source, target = parse_type(step.source), parse_type(step.target)
        if source.is_shard:
            shape[source.dim] *= axis_sizes[step.axis]
        if target.is_shard:
            shape[target.dim] //= axis_sizes[step.axis]
        sizes.append(prod(shape) * itemsize)
    forward = [
        step_working(step.forward, step.source, step.target, *sizes[i : i + 2])
        for i, step in enumerate(steps)
    ]
    backward = [
        step_working(step.backward, step.target, step.source, sizes[i + 1], sizes[i])
        for i, step in enumerate(steps)
    ]
    between = [0, *sizes[1:-1], 0]
    still = all(step.forward == Action.NOTHING for step in steps)
    in_place = before.strides is None and still
    # Steps take contiguous memory, so what is strided is copied first.
    copied = before.nbytes if before.strides is not None and not still else 0
    forward[0] += copied
    around = [between[i] + between[i + 1] for i in range(len(steps))]
    return Moves(
        tuple(shape),
        sizes[-1],
        in_place,
        max(map(sum, zip(forward, around, strict=True))),
        max(map(sum, zip(backward, around, strict=True))),
        all(step.backward == Action.NOTHING for step in steps),
        sizes[-2],
        len(steps) == 1,
        len(steps) == 1 and parse_type(steps[0].source) == S(0),
    )


def step_working(action: str, source: str, target: str, before: int, after: int) -> int:
    """Bytes that a step takes beside what it reads and makes.

    Collectives gather and scatter along the first dim, so along others a copy is laid out
    anew; an all-to-all receives slices and joins them. Slices of chunks are put in order.
    """
    old, new = parse_type(source), parse_type(target)
    if action == Action.NOTHING:
        return 0
    ordered = (after if old.chunks else 0) + (before if new.chunks else 0)
    if action == Action.ALL_GATHER:
        return ordered + (after if old.dim else 0)
    if action == Action.REDUCE_SCATTER:
        return ordered + (before if new.dim else 0)
    if action == Action.ALL_TO_ALL:
        return ordered + after + (before if new.dim else 0)
    return ordered
