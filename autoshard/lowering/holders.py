"""The tensors that are in memory at a moment of a step, by module and by the part that they are of.

The kinds of the memory timeline, with temporaries divided: what is unsharded, what backward
computes again, gradients of activations, working memory.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoshard.lowering.instructions import Cast
from autoshard.lowering.timeline import KINDS, LifeRole, Timeline
from autoshard.plan.stage import PlacedInput


class Part(StrEnum):
    """A part of the memory of a rank."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    BUFFERS = "buffers"
    INPUTS = "inputs"
    ACTIVATIONS = "saved activations"
    """Tensors that autograd saves, and the outputs of the program."""
    UNSHARDED_PARAMETERS = "unsharded parameters"
    """Gathered parameters, and parameters converted to the type of the computation."""
    UNSHARDED_GRADIENTS = "unsharded gradients"
    """Gradients of parameters before and while they are reduced."""
    RECOMPUTED = "recomputed activations"
    """Tensors that a checkpoint makes again in backward."""
    ACTIVATION_GRADIENTS = "gradients of activations"
    RESULTS = "other activations"
    """Results that autograd does not save, until their last use, and resharded ones."""
    WORKING = "working memory"
    """Of collectives, and of the backward of operators."""


_OF_KIND = {
    "parameters": Part.PARAMETERS,
    "gradients": Part.GRADIENTS,
    "optimizer": Part.OPTIMIZER,
    "buffers": Part.BUFFERS,
    "inputs": Part.INPUTS,
    "activations": Part.ACTIVATIONS,
}
UNSHARDED = frozenset({Part.UNSHARDED_PARAMETERS, Part.UNSHARDED_GRADIENTS})
"""Parts that sharded parameters need while they are used."""
_STORED = frozenset({"parameter", "buffer", "constant", "prepared"})


@dataclass(frozen=True, slots=True)
class Holding:
    """A tensor in memory, or the working memory of an operation.

    Attributes:
        kind: its kind in the memory timeline.
        part: the part of the memory that it is of.
        name: dotted name of a parameter or another input, or the name of the node that makes it.
        module: dotted path of the module of the parameter or node; empty for the model itself.
        nbytes: its bytes on a rank.
        first: number of the first moment at which it is there.
        last: number of the last one.
        kept: True if it is there between forward and backward too.
        of_parameter: True for a parameter or buffer, and for a resharding or cast of one.
        in_checkpoint: True if a node inside of a checkpoint makes it, or a resharding there.
    """

    kind: str
    part: Part
    name: str
    module: str
    nbytes: int
    first: int
    last: int
    kept: bool
    of_parameter: bool = False
    in_checkpoint: bool = False


def all_holdings(timeline: Timeline) -> tuple[Holding, ...]:
    """All that is in memory at any moment, but for other micro-batches of a pipeline."""
    return tuple(_Holders(timeline).rows(timeline.lives))


def holdings(timeline: Timeline, moment: int) -> tuple[Holding, ...]:
    """All that is in memory at a moment, but for other micro-batches of a pipeline.

    Args:
        timeline: of a stage.
        moment: number of the moment.

    Example:
        >>> at_peak = holdings(found, found.peak_moment)
        >>> sum(held.nbytes for held in at_peak) == found.peak
        True
    """
    lives = timeline.lives
    alive = (lives[:, 1] <= moment) & (lives[:, 2] >= moment)
    return tuple(_Holders(timeline).rows(lives[alive]))


def summed(found: Iterable[Holding], key: Callable[[Holding], str]) -> Mapping[str, int]:
    """Bytes by a key, the most first."""
    sums: dict[str, int] = {}
    for held in found:
        sums[key(held)] = sums.get(key(held), 0) + held.nbytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


class _Holders:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._inputs = timeline.lowering.stage.inputs
        self._graph = timeline.lowering.graph

    def rows(self, lives: NDArray[np.int64]) -> Iterator[Holding]:
        """Some rows of `Timeline.lives` in words."""
        turn = self._timeline.turn
        for kind, first, last, nbytes, of, role in lives.tolist():
            name, module = self._names(of)
            is_stored = self._is_stored(of)
            part = _OF_KIND.get(KINDS[kind]) or self._part(role, first, is_stored=is_stored)
            if part is Part.ACTIVATIONS and is_stored:
                # Autograd saves a gathered parameter that is not resharded after forward.
                part = Part.UNSHARDED_PARAMETERS
            kept = turn is not None and first <= turn <= last
            inside = of >= 0 and self._timeline.memory.ops[of].checkpoint >= 0
            yield Holding(
                KINDS[kind], part, name, module, nbytes, first, last, kept, is_stored, inside
            )

    def _names(self, of: int) -> tuple[str, str]:
        """The name of an input, or of what an operation makes, and its module."""
        name = self._inputs[~of].name if of < 0 else self._timeline.memory.ops[of].name
        placed = self._placed.get(name)
        if placed is not None:
            target = placed.target or name
            return target, target.rpartition(".")[0]
        number = self._graph.numbers.get(name, self._graph.makers.get(name))
        return name, "" if number is None else self._graph.nodes[number].module

    @cached_property
    def _placed(self) -> dict[str, PlacedInput]:
        """The inputs of the stage, by their names in the program."""
        return {placed.name: placed for placed in self._inputs}

    def _part(self, role: int, first: int, *, is_stored: bool) -> Part:
        """The part of something temporary."""
        if role == LifeRole.WORKING:
            return Part.WORKING
        if role == LifeRole.GRADIENT:
            return Part.UNSHARDED_GRADIENTS if is_stored else Part.ACTIVATION_GRADIENTS
        if is_stored:
            return Part.UNSHARDED_PARAMETERS
        turn = self._timeline.turn
        return Part.RECOMPUTED if turn is not None and first > turn else Part.RESULTS

    def _is_stored(self, of: int) -> bool:
        """True for a parameter or buffer, and for a resharding or a cast of one."""
        if of < 0:
            return self._inputs[~of].kind in _STORED
        op = self._timeline.memory.ops[of]
        instruction = self._timeline.lowering.instructions[op.instruction]
        placed = self._placed.get(op.name)
        is_moved = bool(op.uses) or isinstance(instruction, Cast)
        return is_moved and placed is not None and placed.kind in _STORED
