"""Walks over the groups of a run: states at their borders, and the price of each step.

A state is what a group hands on; a run of groups is a walk from state to state. Beside all
walks of a run, those may be asked for that stay in a set of states, leave it, or change over.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.arrays import BoolArray, FloatArray, IntArray
from autoshard.solve.repeats.runs import Run

_BLOCK = 1 << 20


@dataclass(frozen=True, eq=False)
class Leaving:
    """Walks that are outside of a set of states at some border.

    Attributes:
        run: of which run.
        masks: the set: strategies of each port, shape [S] each.
    """

    run: Run
    masks: tuple[BoolArray, ...]


@dataclass(frozen=True, eq=False)
class Changing:
    """Walks that hand on states of a set first, and others behind, or the other way round.

    Attributes:
        run: of which run.
        masks: the set: strategies of each port, shape [S] each.
        num_first: groups of the first part.
        inside_first: whether the first part is the one inside of the set.
    """

    run: Run
    masks: tuple[BoolArray, ...]
    num_first: int
    inside_first: bool


Stretch = tuple[FloatArray, int]
"""Prices from state to state, per state of the hubs, shape [M, N, N], and for how many steps."""


@dataclass(frozen=True, eq=False)
class Steps:
    """Prices of steps, in a space of places that the states at borders correspond to.

    Attributes:
        parts: prices from place to place, per state of the hubs, shape [M, P, P], and for
            how many steps in a row.
        starts: place in which a walk from each state begins, shape [N].
        ends: place in which a walk to each state ends, shape [N].
        states: state of each place, shape [P].
    """

    parts: tuple[tuple[FloatArray, int], ...]
    starts: IntArray
    ends: IntArray
    states: IntArray

    @classmethod
    def free(cls, stretches: Sequence[Stretch]) -> "Steps":
        """Any walk."""
        every = np.arange(stretches[0][0].shape[1])
        return cls(tuple(stretches), every, every, every)

    @classmethod
    def leaving(cls, stretches: Sequence[Stretch], inside: BoolArray) -> "Steps":
        """Walks that are outside of a set of states at least once.

        There are two places for a state of the set, one for walks that have not left it yet
        and one for those that have.

        Args:
            stretches: all steps.
            inside: whether each state is in the set, shape [N].
        """
        home = np.flatnonzero(inside)
        num_home, num_states = len(home), len(inside)
        size = num_home + num_states
        out = np.flatnonzero(~inside)
        parts = []
        for matrices, num_steps in stretches:
            prices = np.full((len(matrices), size, size), np.inf)
            prices[:, :num_home, :num_home] = matrices[:, home[:, None], home]
            prices[:, :num_home, num_home + out] = matrices[:, home[:, None], out]
            prices[:, num_home:, num_home:] = matrices
            parts.append((prices, num_steps))
        ends = num_home + np.arange(num_states)
        starts = ends.copy()
        starts[home] = np.arange(num_home)
        states = np.concatenate([home, np.arange(num_states)])
        return cls(tuple(parts), starts, ends, states)

    @classmethod
    def changing(
        cls, stretches: Sequence[Stretch], parts: Sequence[tuple[BoolArray, int]]
    ) -> "Steps":
        """Walks whose steps lead to states of one set first, then of another.

        Args:
            stretches: all steps.
            parts: whether each state is in the set, shape [N], and for how many steps; as many
                as the stretches have.
        """
        allowed, begin = [], 0
        for matrices, num_steps in stretches:
            done, first = begin, 0
            for inside, num in parts:
                both = min(begin + num_steps, first + num) - max(done, first)
                first += num
                if both > 0:
                    allowed.append((np.where(inside, matrices, np.inf), both))
                    done += both
            begin += num_steps
        return replace(cls.free(stretches), parts=tuple(allowed))

    @property
    def work(self) -> float:
        """Additions that joining them takes."""
        products = (2 * num.bit_length() * p.shape[0] * p.shape[1] ** 3 for p, num in self.parts)
        return float(sum(products))

    def joined(self) -> FloatArray:
        """Least price of all steps together, by first and last state, shape [M, N, N]."""
        powers = [min_plus_power(prices, num) for prices, num in self.parts]
        total = powers[0]
        for power in powers[1:]:
            total = batched_min_plus(total, power)
        return total[:, self.starts[:, None], self.ends]

    def cheapest(self, hub_state: int, first: int, last: int) -> list[int]:
        """States of the cheapest walk from one state to another, both included."""
        prices = [p[hub_state] for p, num in self.parts for _ in range(num)]
        walk = cheapest_path(prices, int(self.starts[first]), int(self.ends[last]))
        return [int(self.states[place]) for place in walk]


def batched_min_plus(left: FloatArray, right: FloatArray) -> FloatArray:
    """Min-plus products of stacks of matrices, [M, I, K] by [M, K, J] to [M, I, J]."""
    out = np.empty((left.shape[0], left.shape[1], right.shape[2]))
    step = max(1, _BLOCK // max(right.shape[1] * right.shape[2], 1))
    for m in range(left.shape[0]):
        for start in range(0, left.shape[1], step):
            part = left[m, start : start + step]
            out[m, start : start + step] = (part[:, :, None] + right[m][None]).min(axis=1)
    return out


def min_plus_power(matrices: FloatArray, exponent: int) -> FloatArray:
    """Min-plus power of a stack of square matrices [M, N, N] by repeated squaring."""
    result: FloatArray | None = None
    square = matrices
    while exponent:
        if exponent & 1:
            result = square if result is None else batched_min_plus(result, square)
        exponent >>= 1
        if exponent:
            square = batched_min_plus(square, square)
    assert result is not None
    return result


def cheapest_path(prices: Sequence[FloatArray], start: int, end: int) -> list[int]:
    """States of the cheapest walk from start to end, both included.

    Args:
        prices: of each step from state to state, shape [N, N] each; at least one.
        start: first state.
        end: last state.
    """
    remaining = [np.where(np.arange(len(prices[0])) == end, 0.0, np.inf)]
    for matrix in reversed(prices):
        remaining.append((matrix + remaining[-1][None, :]).min(axis=1))
    path = [start]
    for matrix, left in zip(prices, reversed(remaining[:-1]), strict=True):
        path.append(int((matrix[path[-1]] + left).argmin()))
    return path
