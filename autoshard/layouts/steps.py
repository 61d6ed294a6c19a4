"""Steps of reshardings: what each rank runs, with bytes and prices.

Each step changes the type of one mesh axis, or of adjacent axes of one type that communicate as one
group, where one collective over all their ranks costs less than one over each axis. The table
`STEPS` lists all steps, with the action that runs in forward and the one that autograd runs in
backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from autoshard.layouts.layout import AxisType, Kind


class Action(StrEnum):
    """Operation that each rank runs for a step, in forward or in backward."""

    NOTHING = "nothing"
    SLICE = "slice"
    PAD = "pad"
    """Write a slice into a tensor of zeros; turns the gradient of a slice into a partial value."""
    MASK = "mask"
    """Keep the value on the first rank of the axis, and set it to zero on the others."""
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    HALO_EXCHANGE = "halo_exchange"
    """Exchange the edges of slices with neighbouring ranks; used by operators, not by steps."""

    @property
    def is_collective(self) -> bool:
        """True if ranks communicate."""
        return self in _COLLECTIVES


_COLLECTIVES = frozenset(Action) - {Action.NOTHING, Action.SLICE, Action.PAD, Action.MASK}

_I, _R, _S, _P = Kind.INVARIANT, Kind.REPLICATE, Kind.SHARD, Kind.PARTIAL

# Backward follows from the gradients of the types: that of I is the same on every rank, that of R a
# partial sum, that of S a slice, that of P the same on every rank. So where the gradient of R comes
# from one that every rank has, one rank keeps it (MASK), or the sum would count it once per rank.
#
# In Megatron-LM (Shoeybi et al. 2019), I -> R is f, and P -> I is g. In its sequence parallelism
# (Korthikanti et al. 2022), S -> R is g, and P -> S is its conjugate. Parameters are read by I -> R
# in DDP, and by S -> R in FSDP.
STEPS: dict[tuple[Kind, Kind], tuple[Action, Action]] = {
    (_I, _R): (Action.NOTHING, Action.ALL_REDUCE),
    (_I, _S): (Action.SLICE, Action.ALL_GATHER),
    (_I, _P): (Action.MASK, Action.NOTHING),
    (_R, _I): (Action.NOTHING, Action.MASK),
    (_R, _S): (Action.SLICE, Action.PAD),
    (_R, _P): (Action.MASK, Action.MASK),
    (_S, _I): (Action.ALL_GATHER, Action.SLICE),
    (_S, _R): (Action.ALL_GATHER, Action.REDUCE_SCATTER),
    (_S, _S): (Action.ALL_TO_ALL, Action.ALL_TO_ALL),
    (_P, _I): (Action.ALL_REDUCE, Action.NOTHING),
    (_P, _R): (Action.ALL_REDUCE, Action.ALL_REDUCE),
    (_P, _S): (Action.REDUCE_SCATTER, Action.ALL_GATHER),
}
"""(source, target) -> (forward, backward). S -> P is valid but never useful, so it is left out."""


def is_bucketable(source: AxisType, target: AxisType) -> bool:
    """True for steps to `R` from a shard (FSDP) or from `I` (DDP), which can share collectives."""
    return target.kind is _R and source.kind in (_I, _S)


def is_padded(source: AxisType, target: AxisType, shape: Sequence[int], num_ranks: int) -> bool:
    """True if a step pads slices, because its ranks do not divide the dim that it shards.

    Args:
        source: type on the axes before the step.
        target: type on the axes after the step.
        shape: global shape.
        num_ranks: number of ranks of its axes.
    """
    return any(t.is_shard and shape[t.dim] % num_ranks != 0 for t in (source, target))


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a resharding.

    Attributes:
        axes: the mesh axis; ascending, if several axes communicate as one group.
        source: type on each of the axes before the step.
        target: type on each of the axes after the step.
        nbytes: bytes of a rank's tensor before or after the step, whichever is larger: the output
            of an all-gather, the input of a reduce-scatter. The largest shard counts.
        forward: action in the forward pass.
        backward: action in the backward pass; nothing if no gradient flows.
        padded: True if the axis has uneven shards, which are padded for collectives.
        gradient_nbytes: the same as `nbytes` of the gradient, if that is in another element type.
    """

    axes: tuple[int, ...]
    source: AxisType
    target: AxisType
    nbytes: int
    forward: Action
    backward: Action
    padded: bool = False
    gradient_nbytes: int | None = None

    @property
    def backward_nbytes(self) -> int:
        """Bytes of a rank's gradient after or before the step, whichever is larger."""
        return self.nbytes if self.gradient_nbytes is None else self.gradient_nbytes

    @property
    def reorders(self) -> bool:
        """True if each action also copies, to reorder interleaved sub-shards."""
        return bool(self.source.sub_shards or self.target.sub_shards)

    @property
    def is_inner(self) -> bool:
        """True if a dim other than the first is sharded, so that slices are not contiguous."""
        return self.source.dim > 0 or self.target.dim > 0

    @property
    def copies(self) -> bool:
        """True if each collective needs a copy before or after it."""
        return self.reorders or self.padded

    @property
    def is_bucketable(self) -> bool:
        """True if the step can share collectives with steps of other tensors, in a bucket."""
        return is_bucketable(self.source, self.target) and not self.padded


class Pricer(Protocol):
    """Prices of actions in seconds; `Mesh` implements it."""

    def collective_time(
        self, action: Action, axis: int | tuple[int, ...], nbytes: int, *, inner: bool = False
    ) -> float:
        """Seconds of a collective over an axis, or `Step.axes`; for bytes as in `Step.nbytes`."""
        ...

    def copy_time(self, nbytes: int) -> float:
        """Seconds of a local copy of `nbytes`."""
        ...


class Charge(NamedTuple):
    """Share of its collectives that a resharding is charged: of a bucket, and of what is exposed.

    Attributes:
        fill_factor: bytes of a full bucket relative to the tensor's, if a step is bucketable; the
            step is charged its share of the bucket's collective.
        exposed: share of a collective's seconds that computing does not hide.
    """

    fill_factor: float = 1.0
    exposed: float = 1.0


ALONE = Charge()
"""A collective for one tensor, which is waited for."""

STEP_OVERHEAD = 1e-9
"""Seconds added to every step except a slice, so that the shortest of equal chains is chosen."""


class StepPrice(NamedTuple):
    """Seconds of a step.

    Attributes:
        total: forward plus backward.
        forward: the forward action alone.
    """

    total: float
    forward: float


def step_price(step: Step, pricer: Pricer, charge: Charge = ALONE) -> StepPrice:
    """The price of a step.

    Args:
        step: the step.
        pricer: prices of collectives and copies.
        charge: what is charged of its collectives.
    """
    forward = _action_price(step.forward, step, step.nbytes, pricer, charge)
    backward = _action_price(step.backward, step, step.backward_nbytes, pricer, charge)
    is_free = step.forward is Action.SLICE and not step.reorders
    return StepPrice(
        0.0
        if is_free and step.backward is Action.NOTHING
        else STEP_OVERHEAD + (forward + backward),
        0.0 if is_free or step.forward is Action.NOTHING else STEP_OVERHEAD + forward,
    )


def _action_price(action: Action, step: Step, nbytes: int, pricer: Pricer, charge: Charge) -> float:
    if action is Action.NOTHING:
        return 0.0
    reordered = pricer.copy_time(nbytes) if step.reorders else 0.0
    # A slice is a view.
    if action is Action.SLICE:
        return reordered
    if action.is_collective:
        copy = pricer.copy_time(nbytes) if step.copies else 0.0
        factor = charge.fill_factor if step.is_bucketable else 1.0
        bucket_nbytes = round(nbytes * factor)
        seconds = pricer.collective_time(action, step.axes, bucket_nbytes, inner=step.is_inner)
        return copy + charge.exposed * seconds / factor
    return reordered + pricer.copy_time(nbytes)
