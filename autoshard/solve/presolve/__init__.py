"""Presolve: exact, invertible reductions that make a network smaller.

The interface follows the reductions of cvxpy (`apply`, `invert`, chains). Unlike in cvxpy, a
network is edited in place, because reductions are applied thousands of times.

In: a `Network`. Out: a smaller one, and the inverse, which completes its choice.

* `merge_variables` removes variables and simplifies links;
* `drop_strategies` drops strategies;
* `usage_limits` simplifies usage and its limits.
"""

from autoshard.solve.presolve.base import Inverse, Presolve, Reduction, nothing_to_undo, sequence
from autoshard.solve.presolve.drop_strategies import (
    DropDominated,
    EnforceArcConsistency,
    Losses,
)
from autoshard.solve.presolve.merge_variables import (
    EliminateNeighbours,
    FixVariables,
    MergeTies,
    NormalizeLinks,
    SubstituteVariables,
    min_plus,
)
from autoshard.solve.presolve.usage_limits import SeparateTerms, SimplifyLimits
from autoshard.solve.settings import DEFAULT_EFFORT, Effort


def default_reductions(effort: Effort = DEFAULT_EFFORT) -> tuple[Reduction, ...]:
    """All reductions, cheap ones first.

    Args:
        effort: limits of work, and when to stop.
    """
    links = NormalizeLinks()
    return (
        MergeTies(),
        EnforceArcConsistency(effort),
        SubstituteVariables(),
        SeparateTerms(),
        SimplifyLimits(),
        FixVariables(),
        links,
        EliminateNeighbours(links, effort=effort),
        DropDominated(effort=effort),
    )


__all__ = [
    "DropDominated",
    "EliminateNeighbours",
    "EnforceArcConsistency",
    "FixVariables",
    "Inverse",
    "Losses",
    "MergeTies",
    "NormalizeLinks",
    "Presolve",
    "Reduction",
    "SeparateTerms",
    "SimplifyLimits",
    "SubstituteVariables",
    "default_reductions",
    "min_plus",
    "nothing_to_undo",
    "sequence",
]
