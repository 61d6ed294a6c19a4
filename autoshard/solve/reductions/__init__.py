"""Exact reductions: each makes a network smaller and knows the way back.

The design follows the reductions of cvxpy (`apply`, `invert`, chains); unlike there, a
network is edited in place, because a reduction is applied thousands of times.
"""

from collections.abc import Callable

from autoshard.solve.reductions.base import Chain, Inverse, Reduction, nothing_to_undo, sequence
from autoshard.solve.reductions.dominance import DropDominated, Losses
from autoshard.solve.reductions.followers import MergeFollowers
from autoshard.solve.reductions.forbidden import DropForbidden
from autoshard.solve.reductions.limits import SimplifyLimits
from autoshard.solve.reductions.neighbours import EliminateNeighbours, FoldSingles
from autoshard.solve.reductions.tables import SimplifyLinks
from autoshard.solve.reductions.ties import MergeTies
from autoshard.solve.reductions.width import SolveNarrow


def all_reductions(check: Callable[[], None]) -> tuple[Reduction, ...]:
    """Every reduction, the cheap ones first.

    Args:
        check: called now and then by the slow ones; raises to stop.
    """
    links = SimplifyLinks()
    return (
        MergeTies(),
        DropForbidden(),
        MergeFollowers(),
        SimplifyLimits(),
        FoldSingles(),
        links,
        EliminateNeighbours(links),
        DropDominated(),
        SolveNarrow(check),
    )


__all__ = [
    "Chain",
    "DropDominated",
    "DropForbidden",
    "EliminateNeighbours",
    "FoldSingles",
    "Inverse",
    "Losses",
    "MergeFollowers",
    "MergeTies",
    "Reduction",
    "SimplifyLimits",
    "SimplifyLinks",
    "SolveNarrow",
    "all_reductions",
    "nothing_to_undo",
    "sequence",
]
