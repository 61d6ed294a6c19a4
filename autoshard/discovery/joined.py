"""Search for dims of an operator that concatenate pieces, which interleaved shards divide.

An operator that splits a dim, such as one that takes the halves of a gated layer, has no contiguous
shards along it: a rank would have all of one half and nothing of the other. With interleaved shards
each rank has a slice of each piece. An option is a guess from the shapes of a call: outputs whose
sizes along a dim sum up to that of an input, or inputs whose sizes sum up to that of an output. It
is accepted if it is valid in all trials, as other options are.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from autoshard.discovery.probe import Probe
from autoshard.discovery.trial import Option, Trial
from autoshard.layouts import AxisType, I, R, S, relative_sizes
from autoshard.ops.rules.spec import Call

_PARTS = 2
"""Number of ranks that share the pieces in a trial."""

_Shapes = Sequence[Sequence[int]]

_Place = tuple[int, int]
"""A tensor, inputs before outputs, and one of its dims."""


@dataclass(frozen=True)
class JoinedDim:
    """A dim that concatenates pieces.

    Attributes:
        place: the dim.
        pieces: relative size of each piece, and the dim that is this piece alone.
    """

    place: _Place
    pieces: tuple[tuple[int, _Place], ...]

    @property
    def places(self) -> tuple[_Place, ...]:
        """All dims that are sharded together."""
        return (self.place, *(place for _, place in self.pieces))

    def option(self, num_inputs: int, num_tensors: int) -> Option:
        """The types of all tensors when each piece is sharded."""
        types: list[AxisType] = [R] * num_tensors
        for _, (tensor, dim) in self.pieces:
            types[tensor] = S(dim)
        types[self.place[0]] = S(self.place[1], tuple(size for size, _ in self.pieces))
        return Option(tuple(types[:num_inputs]), tuple(types[num_inputs:]))


def joined_dims(
    probe: Probe,
    trials: Sequence[Trial],
    taken: Collection[_Place],
    check_time: Callable[[], None],
) -> Iterator[JoinedDim]:
    """The dims of a call that concatenate pieces, without those that have a letter already.

    Args:
        probe: the small call.
        trials: of the small call.
        taken: dims that have a letter.
        check_time: raises an error after the deadline.
    """
    used = set(taken)
    for found in _guesses(probe.call):
        if used.isdisjoint(found.places):
            check_time()
            if _is_valid(probe, trials, found):
                used.update(found.places)
                yield found


def _guesses(call: Call) -> Iterator[JoinedDim]:
    """Dims of which others are the pieces, by their sizes in the original call."""
    inputs = list(enumerate(tensor.shape for tensor in call.inputs))
    outputs = list(enumerate((tensor.shape for tensor in call.outputs), len(inputs)))
    for wholes, parts in ((inputs, outputs), (outputs, inputs)):
        least = min((len(shape) for _, shape in parts), default=0)
        if len(parts) == 1:
            continue
        for tensor, shape in wholes:
            for dim, size in enumerate(shape):
                for other in range(least):
                    sizes = [own[other] for _, own in parts]
                    if sum(sizes) == size and min(sizes) > 1:
                        places = [(number, other) for number, _ in parts]
                        pieces = zip(relative_sizes(sizes), places, strict=True)
                        yield JoinedDim((tensor, dim), tuple(pieces))


def _is_valid(probe: Probe, trials: Sequence[Trial], found: JoinedDim) -> bool:
    """True if sharding the pieces is valid in all trials, and in a larger call if one can run."""
    if not all(_is_valid_in(trial, found) for trial in trials):
        return False
    sizes = frozenset(
        tensor.shape[dim]
        for number, tensor in enumerate(probe.call.inputs)
        for place, dim in found.places
        if place == number
    )
    other = probe.for_validation(sizes)
    return other is None or _is_valid_in(other.trial(other.kinds[0]), found)


def _is_valid_in(trial: Trial, found: JoinedDim) -> bool:
    shapes: _Shapes = [tuple(value.shape) for value in (*trial.values, *trial.outputs)]
    sizes = [shapes[tensor][dim] for _, (tensor, dim) in found.pieces]
    has_same_pieces = relative_sizes(sizes) == tuple(size for size, _ in found.pieces)
    if not has_same_pieces or any(size % _PARTS for size in sizes):
        return False
    option = found.option(len(trial.values), len(shapes))
    interleaved = [kind for kind in option.outputs if kind.sub_shards]
    valid = trial.valid_options(option.inputs, _PARTS, interleaved)
    return any(_replicated(known) == _replicated(option) for known in valid)


def _replicated(option: Option) -> tuple[AxisType, ...]:
    """The types of an option, with R for I."""
    return tuple(R if kind is I else kind for kind in (*option.inputs, *option.outputs))
