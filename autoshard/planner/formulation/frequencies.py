"""Frequencies of gathers and reductions for a given choice of strategies and a memory budget.

A training step of several micro-batches is fastest if every parameter is gathered once and every
gradient reduced once. If that does not fit, the same strategies often do once some parameters are
gathered, or some gradients reduced, in every micro-batch. Which ones is a knapsack problem; here
the options with the largest saving per byte are taken first (Dantzig, "Discrete-variable extremum
problems", 1957).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from autoshard.base.arrays import IntArray
from autoshard.costs import Frequency
from autoshard.planner.formulation.formulation import Formulation

Frequencies = Mapping[int, Frequency]
"""Frequencies of the reshardings of parameters, by index of the use."""


class _Saving(NamedTuple):
    """A change to a rarer frequency.

    Attributes:
        rate: seconds saved per byte that stays in memory.
        use: index of the use.
        frequency: the rarer frequency.
    """

    rate: float
    use: int
    frequency: Frequency


def most_savings(
    formulation: Formulation, choice: IntArray, fits: Callable[[Frequencies], bool]
) -> Frequencies | None:
    """Frequencies that save much time and fit; None if even the most frequent ones do not.

    Args:
        formulation: the problem.
        choice: strategy index of each variable.
        fits: True if the plan with these frequencies fits the budget.
    """
    options = {
        number: formulation.edge_costs(use).frequencies(
            int(choice[use.source]), int(choice[use.target])
        )
        for number, use in enumerate(formulation.uses)
        if formulation.reads_parameter(use)
    }
    frequent = {number: found[0] for number, found in options.items()}
    if not fits(frequent):
        return None
    savings = sorted(
        (
            saving
            for number, found in options.items()
            if len(found) > 1
            for saving in _savings(formulation, number, choice)
        ),
        key=lambda saving: -saving.rate,
    )

    def first(number: int) -> Frequencies:
        return {**frequent, **{saving.use: saving.frequency for saving in savings[:number]}}

    # More savings need more memory, so the most that fit are found by bisection.
    least, most = 0, len(savings)
    while least < most:
        middle = (least + most + 1) // 2
        if fits(first(middle)):
            least = middle
        else:
            most = middle - 1
    return first(least)


def _savings(formulation: Formulation, number: int, choice: IntArray) -> Iterator[_Saving]:
    """The changes of one use, with falling savings per byte."""
    use = formulation.uses[number]
    costs = formulation.edge_costs(use)
    row, col = costs.rows[choice[use.source]], costs.cols[choice[use.target]]
    often, gathered, once = (
        float(costs.seconds_of(frequency)[row, col])
        for frequency in (Frequency.REDUCE_STEP, Frequency.GATHER_STEP, Frequency.STEP)
    )
    kept = float(costs.target_bytes[col])
    added = float(costs.accumulation_growth[row, col])
    first, both = (often - gathered) / kept, (often - once) / (kept + added)
    if first > both:
        yield _Saving(first, number, Frequency.GATHER_STEP)
        second = (gathered - once) / added if added > 0 else 0.0
        if second > 0:
            yield _Saving(second, number, Frequency.STEP)
    elif both > 0:
        yield _Saving(both, number, Frequency.STEP)
