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
        minimum_gap: lower limit of the requested relative gap, because of rounding.
        minimum_usage_seconds: time to find a usage limit that works for an infeasible problem.
        min_dropped: share of the strategies that a round must drop to be followed by another.

        max_product_work: work of eliminating one variable with at most two neighbours.
        max_dominance_strategies: strategies of a variable that are compared pairwise.
        max_dominance_work: work of comparing the columns of one matrix.

        max_elimination_work: work of one evaluation of an elimination.
        max_table_entries: entries of one table of an elimination.
        max_total_entries: entries of all tables of an elimination together.
        max_table_axes: variables of one table of an elimination.

        mini_bucket_min_entries: matrix entries below which a linear program is as quick.
        mini_bucket_rounds: relaxations solved one after the other.
        mini_bucket_work: work of the first relaxation.
        mini_bucket_growth: factor of the work after a round that brings little.
        mini_bucket_min_gain: share of the strategies or of the gap that a round must close.
        mini_bucket_entries: entries of all tables of a relaxation.
        mini_bucket_trws_share: share of time for the messages of one round.
        few_orders: elimination orders to compare while links are chosen.
        many_orders: elimination orders to compare for the relaxation that is solved.

        large_entries: entries of matrices and usage rows from which on TRW-S comes before
            linear programs.
        huge_entries: entries of matrices from which on forests take the place of linear
            programs.
        trws_rounds: runs of TRW-S, each followed by dropping strategies.
        trws_share: share of time of one of these runs.
        trws_min_pruned: least share of the strategies ruled out for which they are dropped.
        trws_max_sweeps: sweeps after which a run ends.
        trws_max_stalled: sweeps without notable gain after which a run ends.
        trws_stalled_gain: relative gain of the bound that is notable.
        trws_first_step: first step of usage prices, relative to the step of Polyak.
        trws_last_step: smallest step.
        trws_patience: sweeps without gain after which the step is halved.
        trws_momentum: weight of earlier directions in a step.
        trws_target: relative distance from the best bound to the target of a step.
        trws_report_gain: relative gain of the bound after which it is reported.
        trws_rounding_period: sweeps from one rounded choice to the next.
        trws_repair_visits: visits of each variable by repairs, per sweep and on average.
        trws_promising: ratio to the best price up to which a choice over the limit is repaired.

        descent_sweeps: largest mean number of visits of a variable in one descent.
        repair_rounds: times that usage prices are raised to repair a choice.
        forest_patience: forests without notable gain after which the search of a huge problem ends.
        forest_stalled_gain: relative gain of a choice that is notable.
        forest_price_spread: standard deviation of the logarithm of the factor of prices of usage.
        forest_price_follow: share by which its mean moves to a factor that led to a gain.
        forest_rounding_period: sweeps of messages from one rounded choice to the next that is
            combined with the best choice of a huge problem.
        forest_descents: forests optimised from each choice that messages round.
        forest_knapsack_rounds: integer programs solved to combine two choices.
        forest_knapsack_rows: times added to each of them.
        forest_knapsack_nodes: branch-and-bound nodes of one.

        plain_entries: entries of matrices up to which plain methods close what run contraction
            leaves.
        branch_work: nodes times columns after which branch and bound ends.
        interior_point_columns: columns from which on relaxations are solved by interior point.
        eager_usage_entries: entries of usage rows up to which all of them are loaded at once.

        contraction_overhead: work that is added for each evaluation of a contracted problem.
        max_block_entries: entries of the table of one group of a run.
        eager_run_work: work of a group's table up to which shared nodes are not relaxed first.
        max_exact_run_work: work after which the requested gap suffices instead of the exact
            optimum. It counts additions, because with a clock the solution would depend on the
            machine.
        dual_rounds: usage prices evaluated by the Lagrangian of runs.
        dual_max_stalled: evaluations without gain after which it ends.
        dual_box_growths: times that the range of prices is extended.
        dual_gap_share: share of the requested gap that an evaluation may leave.
        usage_mixtures: largest number of mixtures of times to prove a limit infeasible.
        reserve_rounds: times that the limit is lowered to leave slack for unpriced times.
        nearest_choices: number of near-optimal choices at the best prices that are combined.
        price_multiples: multiples of the best prices whose best choices are combined.
        master_rounds: times that the integer program over groups is solved, each with one more
            time at which the limit is stated.
        master_nodes: nodes of its branch and bound.
        master_gap: share of the requested gap that it may leave.

        wide_strategies: mean number of strategies of a node class from which on a problem is
            solved through restricted problems.
        first_width: strategies per node class in the first restricted problems.
        first_slack: share of the requested gap by which the choices of a strategy may exceed the
            bound if it is in the first restricted problem, which is solved by run contraction only.
        last_width: strategies per node class in the last one.
        nearby_strategies: strategies per node class added around the best choice.
        full_width_ratio: all strategies that can be in a better choice are added if no node class
            has more than this many widths of them.
        quotient_sweeps: sweeps of messages before a restricted problem.
        quotient_min_gain: relative gain of a sweep below which a restricted problem comes next.
        quotient_gap_share: the same, relative to the requested gap.
        restricted_min_gain: share of the gap that messages must close for the next restricted
            problem to have the same width.
        message_share: share of time for messages.
        restricted_share: share of time for one restricted problem.
        restricted_gap: share of the gap that a restricted problem may leave.
        limited_elasticities: first guesses of the price of usage: usage at the limit costs this
            many times the lower bound of a choice.
        limited_rough_gap: relative gap that may be left at such a guess.
        limited_width: strategies per node class added to a restricted problem at once.
        limited_first_sweeps: sweeps at the best prices, the first time.
        limited_more_sweeps: sweeps at the best prices later on.
        limited_proof_gap: share of the requested gap that sweeps at the best prices leave, since
            later solves with a smaller gap pass no more messages.
        limited_rounds: restricted problems solved under one limit.
        limited_share: share of time for one of them.
        limited_min_gain: share of the gap that one must close for another to follow.
    """

    minimum_gap: float = 1e-9
    minimum_usage_seconds: float = 20.0
    min_dropped: float = 0.2

    max_product_work: float = 1 << 26
    max_dominance_strategies: int = 1500
    max_dominance_work: float = 3e7

    max_elimination_work: float = 1.5e10
    max_table_entries: float = 1 << 23
    max_total_entries: float = 1 << 26
    max_table_axes: int = 24

    mini_bucket_min_entries: int = 20_000
    mini_bucket_rounds: int = 12
    mini_bucket_work: float = 3e7
    mini_bucket_growth: float = 10.0
    mini_bucket_min_gain: float = 0.1
    mini_bucket_entries: float = 4e7
    mini_bucket_trws_share: float = 0.5
    few_orders: int = 2
    many_orders: int = 8

    large_entries: int = 200_000
    huge_entries: int = 300_000
    trws_rounds: int = 4
    trws_share: float = 0.75
    trws_min_pruned: float = 0.02
    trws_max_sweeps: int = 1500
    trws_max_stalled: int = 60
    trws_stalled_gain: float = 1e-5
    trws_first_step: float = 0.5
    trws_last_step: float = 1e-4
    trws_patience: int = 10
    trws_momentum: float = 0.7
    trws_target: float = 0.15
    trws_report_gain: float = 1e-3
    trws_rounding_period: int = 5
    trws_repair_visits: float = 0.2
    trws_promising: float = 1.5

    descent_sweeps: int = 50
    repair_rounds: int = 24
    forest_patience: int = 400
    forest_stalled_gain: float = 1e-6
    forest_price_spread: float = 1.0
    forest_price_follow: float = 0.05
    forest_rounding_period: int = 25
    forest_descents: int = 3
    forest_knapsack_rounds: int = 12
    forest_knapsack_rows: int = 10
    forest_knapsack_nodes: int = 200

    plain_entries: int = 200_000
    branch_work: float = 5e6
    interior_point_columns: int = 40_000
    eager_usage_entries: int = 200_000

    contraction_overhead: float = 3e7
    max_block_entries: int = 1 << 22
    eager_run_work: float = 2e8
    max_exact_run_work: float = 2e9
    dual_rounds: int = 40
    dual_max_stalled: int = 4
    dual_box_growths: int = 20
    dual_gap_share: float = 0.1
    usage_mixtures: int = 8
    reserve_rounds: int = 3
    nearest_choices: int = 6
    price_multiples: tuple[float, ...] = (1.0, 0.8, 0.5, 0.125)
    master_rounds: int = 10
    master_nodes: int = 4000
    master_gap: float = 0.1

    wide_strategies: float = 100.0
    first_width: int = 24
    first_slack: float = 0.3
    last_width: int = 48
    nearby_strategies: int = 8
    full_width_ratio: float = 3.0
    quotient_sweeps: int = 40
    quotient_min_gain: float = 2e-5
    quotient_gap_share: float = 0.05
    restricted_min_gain: float = 0.1
    message_share: float = 0.5
    restricted_share: float = 0.5
    restricted_gap: float = 0.1
    limited_elasticities: tuple[float, ...] = (0.4, 3.0)
    limited_rough_gap: float = 0.01
    limited_width: int = 12
    limited_first_sweeps: int = 30
    limited_more_sweeps: int = 10
    limited_proof_gap: float = 0.5
    limited_rounds: int = 3
    limited_share: float = 0.6
    limited_min_gain: float = 0.2


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
