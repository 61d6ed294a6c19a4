"""Effort limits and tuning of the solver.

At any values, bounds are valid and choices are allowed. The settings decide how much work is done,
and so how close to the optimum the solver gets in time.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverSettings:
    """Limits of the solver's steps; the defaults suit problems of whole models.

    "Work" counts additions; a core does about 1e9 a second. Shares of time are shares of the time
    that remains until the limit when a step begins. They are a safety net: on a usual machine, and
    with a time limit of minutes, other limits end a step first (`Solution.reached_time_limit`).

    Attributes:
        max_product_work: work of eliminating one variable with at most two neighbours.
        max_dominance_strategies: strategies of a variable that are compared pairwise.

        max_elimination_work: work of one evaluation of an elimination.
        max_table_entries: entries of one table of an elimination.
        max_total_entries: entries of all tables of an elimination together.

        large_entries: entries of matrices and usage rows from which on TRW-S comes before
            linear programs.
        huge_entries: entries of matrices from which on forests take the place of linear
            programs.
        trws_rounds: runs of TRW-S, each followed by dropping strategies.
        trws_max_stalled: sweeps without notable gain after which a run ends.

        forest_patience: forests without notable gain after which the search of a huge problem ends.

        branch_work: nodes times columns after which branch and bound ends.

        max_group_work: work of the table of one group of a run with axes for shared nodes, and of
            its powers.
        max_counted_work: work of all tables of runs for each number of groups in one component.

        wide_strategies: mean number of strategies of a node class from which on a problem is
            solved through restricted problems.
        first_width: strategies per node class in the first restricted problems.
        last_width: strategies per node class in the last one.
        limited_width: strategies per node class added to a restricted problem at once.
        max_matrix_states: states of a path cost up to which methods that need a matrix make one.

        bounds_only: True to end with the bound at good prices of usage, if the limit binds and a
            choice within it is known: the search for better choices takes several times as long.
    """

    max_product_work: float = 1 << 26
    max_dominance_strategies: int = 1500

    max_elimination_work: float = 1.5e10
    max_table_entries: float = 1 << 23
    max_total_entries: float = 1 << 26

    large_entries: int = 200_000
    huge_entries: int = 300_000
    trws_rounds: int = 4
    trws_max_stalled: int = 60

    forest_patience: int = 1000

    branch_work: float = 5e6

    max_group_work: float = 2e8
    max_counted_work: float = 2.5e9

    wide_strategies: float = 100.0
    first_width: int = 24
    last_width: int = 48
    limited_width: int = 12
    max_matrix_states: int = 600

    bounds_only: bool = False


def _never_stop() -> None:
    """Does nothing: the check of a computation that is never interrupted."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Limits of a computation: how much work it may do, and when it has to stop.

    Attributes:
        settings: limits of work.
        check: called now and then; raises to stop the computation.
    """

    settings: SolverSettings = SolverSettings()
    check: Callable[[], None] = _never_stop


DEFAULT_EFFORT = Effort()
"""Default limits, never stopped."""
