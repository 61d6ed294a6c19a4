"""A part of the random training loops of `benchmarks/habits`, on 4 ranks."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch.distributed as dist

from benchmarks.habits.launches import LOOPS_PER_MODEL, Combination, combinations
from benchmarks.habits.outcomes import RIGHT, WRONG, Outcome, agreed

NUM_RANKS = 4
LOOPS = 4


@dataclass
class Loops:
    """Loops with one random model: right, or refused on all ranks.

    Attributes:
        model: number of the model.
    """

    model: int
    combinations: list[Combination] = field(default_factory=list)

    def prepare(self) -> None:
        first = self.model * LOOPS_PER_MODEL
        self.combinations = list(combinations(range(first, first + LOOPS)))

    def __call__(self) -> None:
        found = {c.seed: on_ranks(c) for c in self.combinations if not c.expected.error}
        wrong = {seed: o.text for seed, o in found.items() if o.kind == WRONG}
        assert not wrong, wrong
        assert any(o.kind == RIGHT for o in found.values())


def on_ranks(combination: Combination) -> Outcome:
    every: list[Outcome | None] = [None] * NUM_RANKS
    dist.all_gather_object(every, combination.on_this_rank())
    return agreed([outcome for outcome in every if outcome is not None])


class Noticed(Loops):
    """Numbers that differ a little, are missing or too many are wrong."""

    def __call__(self) -> None:
        right = next(c for c in self.combinations if on_ranks(c).kind == RIGHT)
        expected = right.expected
        last = expected.notes[-1]
        other = replace(last, value=last.value * (1 + 1e-6))
        for notes in ([*expected.notes[:-1], other], [*expected.notes, last], expected.notes[:-1]):
            changed = replace(expected, notes=notes, tolerances=[*expected.tolerances, 0.0])
            assert on_ranks(replace(right, expected=changed)).kind == WRONG


CASES: dict[str, Callable[[], None]] = {
    **{f"model {number}": Loops(number) for number in range(5)},
    "other numbers": Noticed(1),
}


@pytest.mark.matrix(2)
@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_case(case: str, on_ranks: Callable[[str], None]) -> None:
    on_ranks(case)
