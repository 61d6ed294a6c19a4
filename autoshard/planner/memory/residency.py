"""Residency of tensors: availability in backward, and its costs.

Source and target of each use of a value have a residency. Both together determine the cost of the
resharding between them: nothing, the resharding, the resharding with its forward part twice, or
infinity.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np

from autoshard.base.arrays import FloatArray, IntArray
from autoshard.costs import Frequency
from autoshard.plan.options import Recomputing
from autoshard.planner.formulation.edge_costs import EdgeCosts


class Residency(StrEnum):
    """State of a tensor after forward."""

    AT_REST = "at rest"
    """A graph input, which is always available."""
    MADE = "made"
    """A result of an operator, freed unless a copy is kept."""
    SAVED = "saved"
    """A result that its producer saves for backward."""
    RECOMPUTED = "recomputed"
    """A tensor inside a checkpoint, recomputed in backward."""
    KEPT = "kept"
    """Available in backward: a copy with its own memory, or a view of a tensor that is kept."""
    SOURCE_KEPT = "source kept"
    """The result of the producer is kept before resharding, and resharded again in backward."""
    REGATHERED = "regathered"
    """Resharded again in backward, from a source that is available there."""
    FREED = "freed"
    """Not available in backward."""


class Transition(StrEnum):
    """Cost of a use, given the residencies of its source and its target."""

    IMPOSSIBLE = "impossible"
    SAME = "same"
    """No cost; the layouts must be equal."""
    ONCE = "once"
    """The cost of the resharding."""
    TWICE = "twice"
    """The cost of the resharding, and of its forward part again."""
    NOOP = "noop"
    """The cost of the resharding if its forward part does nothing, or if backward repeats it in any
    case; otherwise impossible."""
    KEEP = "keep"
    """The cost of the resharding if its result may be kept for backward; otherwise impossible."""


_AVAILABLE = frozenset(
    {
        Residency.AT_REST,
        Residency.SAVED,
        Residency.KEPT,
        Residency.REGATHERED,
    }
)
"""Residencies of tensors that are available in backward."""


@dataclass(frozen=True, slots=True)
class UseResidency:
    """Transitions along one use of a value.

    A use is a direct edge if backward does not need its tensor. Otherwise there is a node between
    producer and reader, the *copy*, which chooses the residency of the resharded tensor.

    Attributes:
        needed: True if backward needs the tensor that the reader reads.
        inside: True if the value is produced in the reader's checkpoint.
        recomputed: True if the reader reads it again if its block is checkpointed.
        leaves: True if a shared resharding has readers outside of the checkpoint.
        is_output: True if the reader is an output of the program.
        reshard_after_forward: the planning option.
    """

    needed: bool = False
    inside: bool = False
    recomputed: bool = False
    leaves: bool = False
    is_output: bool = False
    reshard_after_forward: Recomputing = "auto"

    def direct(self, source: Residency, target: Residency) -> Transition:
        """Transition from the producer to a reader."""
        if target is Residency.RECOMPUTED:
            if self.inside or source in _AVAILABLE:
                return self._recompute
            return Transition.IMPOSSIBLE if self.recomputed else Transition.ONCE
        within = source is Residency.RECOMPUTED and self.inside
        return Transition.IMPOSSIBLE if within else Transition.ONCE

    def to_copy(self, source: Residency, target: Residency) -> Transition:
        """Transition from the producer to the copy."""
        if source is Residency.RECOMPUTED and self.inside:
            leaving = target is Residency.KEPT and self.leaves
            fits = leaving or target in (Residency.FREED, Residency.RECOMPUTED)
            return self._recompute if fits else Transition.IMPOSSIBLE
        if target is Residency.RECOMPUTED:
            fits = self.inside or source in _AVAILABLE
            return self._recompute if fits else Transition.IMPOSSIBLE
        if target is Residency.REGATHERED:
            return self._regather if source in _AVAILABLE else Transition.IMPOSSIBLE
        if target is Residency.SOURCE_KEPT:
            fits = source in (Residency.MADE, Residency.RECOMPUTED)
            return Transition.SAME if fits else Transition.IMPOSSIBLE
        if target is not Residency.KEPT:
            return Transition.ONCE
        at_rest = source is Residency.AT_REST
        must_regather = at_rest and self.reshard_after_forward == "always"
        return Transition.NOOP if must_regather else Transition.KEEP

    def in_place(self, source: Residency, target: Residency) -> Transition:
        """Transition from the producer to a reader that takes the place of the copy."""
        if target is Residency.RECOMPUTED and not self.recomputed:
            return Transition.ONCE
        return self.to_copy(source, target)

    def from_copy(self, source: Residency, target: Residency) -> Transition:
        """Transition from the copy to its only reader, or to the layout that several share."""
        if target is Residency.RECOMPUTED:
            if source is Residency.SOURCE_KEPT:
                return Transition.IMPOSSIBLE if self.inside else self._recompute
            unused = source is Residency.FREED and not self.recomputed
            fits = source is Residency.RECOMPUTED or unused
            return Transition.SAME if fits else Transition.IMPOSSIBLE
        if target is Residency.FREED or not self.needed:
            return Transition.SAME if source is Residency.FREED else Transition.IMPOSSIBLE
        if source is Residency.SOURCE_KEPT:
            return self._regather
        return Transition.SAME if source in _AVAILABLE else Transition.IMPOSSIBLE

    @property
    def _recompute(self) -> Transition:
        return Transition.TWICE if self.recomputed else Transition.ONCE

    @property
    def _regather(self) -> Transition:
        never = self.is_output or self.reshard_after_forward == "never"
        return Transition.NOOP if never else Transition.TWICE


Rule = Callable[[UseResidency, Residency, Residency], Transition]
"""One of the methods of `UseResidency`."""


@dataclass(frozen=True, eq=False)
class RareGathers:
    """Strategies of a copy for parameters that are not gathered in every micro-batch.

    Each is a source and a target layout with a frequency. The gathered parameter is available
    throughout the step, so it has no residency.

    Attributes:
        costs: costs of the use.
        offset: number of the copy's other strategies, which precede these.
        rows: label of the source layout of each of K strategies, shape [K].
        cols: label of the target layout, shape [K].
        frequencies: how often it is gathered and its gradient reduced.
    """

    costs: EdgeCosts
    offset: int
    rows: IntArray
    cols: IntArray
    frequencies: tuple[Frequency, ...]

    @classmethod
    def of(cls, costs: EdgeCosts, offset: int) -> "RareGathers":
        """The strategies of a use."""
        rows, cols = np.nonzero(costs.can_run_once)
        kinds = (Frequency.GATHER_STEP, Frequency.STEP)
        frequencies = tuple(kind for kind in kinds for _ in rows)
        return cls(costs, offset, np.tile(rows, 2), np.tile(cols, 2), frequencies)

    def __len__(self) -> int:
        """Number of strategies."""
        return len(self.rows)

    def frequency(self, strategy: int) -> Frequency | None:
        """The frequency of a strategy of the copy; None if it is not one of these."""
        index = strategy - self.offset
        return None if index < 0 else self.frequencies[index]

    @cached_property
    def seconds(self) -> FloatArray:
        """Seconds per training step of each strategy, shape [K]."""
        pairs = zip(self.rows, self.cols, self.frequencies, strict=True)
        return np.array([self.costs.seconds_of(kind)[row, col] for row, col, kind in pairs])

    @cached_property
    def kept_bytes(self) -> FloatArray:
        """Bytes that stay in memory from one micro-batch to the next, shape [K].

        The gathered parameter, and the full gradient in place of its shard.
        """
        gathered = self.costs.target_bytes[self.cols]
        growth = self.costs.accumulation_growth[self.rows, self.cols]
        is_full = np.array([kind is Frequency.STEP for kind in self.frequencies])
        return gathered + np.where(is_full, growth, 0.0)


@dataclass(frozen=True, slots=True)
class EdgeEnd:
    """One end of an edge: a node of the problem that is the source or target of a use.

    Attributes:
        node: index of the node.
        states: residencies of the node; its strategies are ordered by residency, then by layout.
        at_source: for each residency, True if its layouts are the source layouts of the use,
            False if they are its target layouts.
        by_layout: True if there is one strategy per layout, as for a copy; otherwise the
            strategies are those of the variable that produces or reads the value.
        rare: further strategies of a copy, after those by residency and layout.
    """

    node: int
    states: tuple[Residency, ...]
    at_source: tuple[bool, ...]
    by_layout: bool = False
    rare: RareGathers | None = None

    def sizes(self, costs: EdgeCosts) -> list[int]:
        """Number of layouts in each residency."""
        return [len(costs.sources if source else costs.targets) for source in self.at_source]

    def labels(self, costs: EdgeCosts, offsets: Sequence[int], rare: int) -> IntArray:
        """The label of each strategy: that of its layout, moved by the offset of its residency.

        Args:
            costs: costs of the use.
            offsets: first label of each residency.
            rare: first label of the further strategies.
        """
        found = []
        for offset, size, source in zip(offsets, self.sizes(costs), self.at_source, strict=True):
            layouts = costs.rows if source else costs.cols
            found.append(offset + (np.arange(size) if self.by_layout else layouts))
        return np.concatenate([*found, rare + np.arange(len(self.rare or ()))])


def transition_costs(
    costs: EdgeCosts, start: EdgeEnd, end: EdgeEnd, use: UseResidency, rule: Rule
) -> tuple[FloatArray, IntArray, IntArray]:
    """Cost matrix of an edge, and the labels of the strategies at both ends.

    A label is a layout in one of some residencies with equal costs.

    Returns:
        Seconds, one row per label of the start and one column per label of the end; the row of
        each strategy of the start, and the column of each strategy of the end.
    """
    transitions = [[rule(use, s, t) for t in end.states] for s in start.states]
    rows, height = _offsets(transitions, start, costs)
    cols, width = _offsets(list(zip(*transitions, strict=True)), end, costs)
    seconds = np.full((height + len(start.rare or ()), width + len(end.rare or ())), np.inf)
    heights, widths = start.sizes(costs), end.sizes(costs)
    for i, top in enumerate(rows):
        for j, left in enumerate(cols):
            part = seconds[top : top + heights[i], left : left + widths[j]]
            _write(part, transitions[i][j], costs)
    if end.rare:
        gathers = end.rare
        seconds[gathers.rows, width + np.arange(len(gathers))] = gathers.seconds
    if start.rare:
        for left in set(cols):
            gathered = height + np.arange(len(start.rare)), left + start.rare.cols
            seconds[gathered] = 0.0
    return seconds, start.labels(costs, rows, height), end.labels(costs, cols, width)


def _offsets(
    transitions: Sequence[Sequence[Transition]], end: EdgeEnd, costs: EdgeCosts
) -> tuple[list[int], int]:
    """First label of each residency of one end, and the number of labels without `rare` ones."""
    known: dict[tuple[object, ...], int] = {}
    offsets, total = [], 0
    for row, size, source in zip(transitions, end.sizes(costs), end.at_source, strict=True):
        key = (*row, source)
        if key not in known:
            known[key] = total
            total += size
        offsets.append(known[key])
    return offsets, total


def _write(part: FloatArray, transition: Transition, costs: EdgeCosts) -> None:
    """Write the costs of a transition between all layouts of two residencies."""
    if transition is Transition.SAME:
        np.fill_diagonal(part, 0.0)
    elif transition is Transition.ONCE:
        part[:] = costs.seconds
    elif transition is Transition.TWICE:
        part[:] = costs.seconds + costs.regather_seconds
    elif transition is Transition.NOOP:
        part[:] = np.where(costs.is_noop | costs.gathers_again, costs.seconds, np.inf)
    elif transition is Transition.KEEP:
        part[:] = np.where(costs.gathers_again, np.inf, costs.seconds)
