"""Runs of HiGHS: the linear relaxation of a model, branch and bound, and small integer programs.

HiGHS is called through its own API, so that a run reports progress and can be stopped.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

import highspy
import numpy as np
from scipy import sparse

from autoshard.base.arrays import BoolArray, FloatArray
from autoshard.solve.programs.linear_program import LinearModel
from autoshard.solve.state import SolveState

_EAGER_ENTRIES = 200_000
"""Entries of usage rows up to which all of them are loaded at once."""
_INTERIOR_POINT_COLUMNS = 40_000
"""Columns from which on relaxations are solved by interior point."""


def integer_point(
    cost: FloatArray,
    matrix: sparse.csr_array,
    low: FloatArray,
    high: FloatArray,
    most: FloatArray,
    *,
    max_nodes: int,
    relative_gap: float,
    time_limit: float = float("inf"),
) -> FloatArray | None:
    """The best integral point of a small program that HiGHS finds, shape [n]; None without one.

    Args:
        cost: to minimise, shape [n].
        matrix: of the rows, shape [m, n].
        low: least value of each row, shape [m].
        high: largest value of each row, shape [m].
        most: largest value of each column, shape [n]; the least is 0.
        max_nodes: of branch and bound.
        relative_gap: at which it stops.
        time_limit: in seconds.
    """
    # It takes longer to import than a usual plan, which has no such program, takes to solve.
    from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415

    found = milp(
        cost,
        integrality=np.ones(len(cost), dtype=np.intp),
        bounds=Bounds(0.0, most),
        constraints=LinearConstraint(matrix, low, high),
        options={
            "node_limit": max_nodes,
            "mip_rel_gap": relative_gap,
            "time_limit": min(time_limit, _LONG),
        },
    )
    return None if found.x is None else np.rint(found.x)


def _is_feasible(highs: highspy.Highs) -> bool:
    """True if the last run has found a point."""
    feasible = int(highspy.SolutionStatus.kSolutionStatusFeasible)
    return bool(highs.getInfo().primal_solution_status == feasible)


_LONG = 1e9
"""Seconds that stand for no time limit."""
_FEASIBILITY = 1e-9
_DUAL_FEASIBILITY = 1e-7


class RunStatus(Enum):
    """Status of a run of HiGHS."""

    SOLVED = auto()
    INFEASIBLE = auto()
    STOPPED = auto()


@dataclass(frozen=True, slots=True, eq=False)
class LinearOutcome:
    """Result of a run; prices are in the units of the model.

    Attributes:
        status: of the run.
        x: the point found, shape [n], or None.
        duals: multipliers of the equality rows of a relaxation, shape [m], or None.
        prices: multipliers of the usage rows of a relaxation, shape [T], or None.
        bound: lower bound of the integral optimum, with all tolerances subtracted.
    """

    status: RunStatus
    x: FloatArray | None
    duals: FloatArray | None
    prices: FloatArray | None
    bound: float


class HighsSolver:
    """One linear model in HiGHS.

    Costs are scaled so that the tolerances of HiGHS do not depend on the unit of prices, and each
    usage row is scaled to coefficients of at most one. Usage rows are added when a point violates
    them, or all at once if they are few.

    Args:
        model: to minimise.
        state: provides the seed, the time limit and the cancel token; receives progress.
        offer: called with integral points found during a run, shape [n].
        cap: upper limit of the bounds reported during a run.
    """

    def __init__(
        self,
        model: LinearModel,
        state: SolveState,
        *,
        offer: Callable[[FloatArray], None],
        cap: float = float("inf"),
    ) -> None:
        self._model = model
        self._state = state
        self._offer = offer
        self._cap = cap
        self._scale, self._row_scale = model.cost_scale, model.row_scale
        self._active: list[int] = []
        self._highs = self._loaded()
        if model.usage.nnz <= _EAGER_ENTRIES:
            self._activate(np.ones(len(model.capacity), dtype=np.bool_))

    @property
    def slack(self) -> float:
        """Largest error of a bound because of the tolerances of HiGHS."""
        # A reduced cost may be wrong by the tolerance. The columns of a group sum to one, so each
        # group adds at most one such error.
        return _DUAL_FEASIBILITY * (len(self._model.starts) - 1) / self._scale

    def relax(self) -> LinearOutcome:
        """Solve the linear relaxation."""
        large = len(self._model.cost) > _INTERIOR_POINT_COLUMNS
        self._highs.setOptionValue("solver", "ipm" if large else "choose")
        return self._until_fits()

    def branch(
        self, start: Mapping[int, int] | None, *, relative_gap: float | None = None
    ) -> LinearOutcome:
        """Solve with integral strategies.

        Args:
            start: a position per variable to start from, unless it is None.
            relative_gap: gap relative to the objective, without a limit of work; None for the gap
                of the state, and its limit of work.
        """
        # Flows need not be integral: once both ends of a link are decided, one entry of it is left,
        # or a cheapest path.
        columns = np.arange(self._model.num_strategies, dtype=np.int32)
        kinds = np.full(len(columns), int(highspy.HighsVarType.kInteger), dtype=np.uint8)
        self._highs.changeColsIntegrality(len(columns), columns, kinds)
        if start is not None:
            point = np.zeros(len(columns))
            point[
                [self._model.starts[i] + start[v] for i, v in enumerate(self._model.variables)]
            ] = 1
            self._highs.setSolution(len(columns), columns, point)
        # The gap of HiGHS is relative to its objective, which lacks the constant; so the gap of the
        # state is given as an absolute one, and the relative one is switched off.
        allowed = self._state.gap * self._state.magnitude * self._scale
        self._highs.setOptionValue("mip_abs_gap", max(0.25 * allowed, 1e-6))
        self._highs.setOptionValue("mip_rel_gap", relative_gap or 0.0)
        if relative_gap is None:
            nodes = self._state.settings.branch_work / len(self._model.cost)
            self._highs.setOptionValue("mip_max_nodes", max(int(nodes), 1))
        return self._until_fits()

    def forbid(self, x: FloatArray, times: BoolArray) -> None:
        """Add cover inequalities that exclude an integral point which exceeds some checkpoints.

        At each of them, the strategies of the point with usage there are a cover: usage is not
        negative, so they cannot all be chosen together.
        """
        for time in np.flatnonzero(times):
            row = self._model.usage[[time]].tocoo()
            cover = row.col[x[row.col] > 0.5].astype(np.int32)  # noqa: PLR2004 - rounding
            self._highs.addRow(-np.inf, len(cover) - 1.0, len(cover), cover, np.ones(len(cover)))

    def violated(self, x: FloatArray) -> BoolArray:
        """Mask of checkpoints at which a point exceeds the capacity, shape [T]."""
        slack = self._model.capacity + _FEASIBILITY * self._row_scale
        over: BoolArray = self._model.usage @ x > slack
        return over

    def _until_fits(self) -> LinearOutcome:
        """Run and add the usage rows that the point violates, until there are none."""
        while True:
            outcome = self._run()
            if outcome.x is None or outcome.status is not RunStatus.SOLVED:
                return outcome
            over = self.violated(outcome.x)
            # Rows that are loaded hold within the tolerances of HiGHS; adding them again would not
            # end.
            over[self._active] = False
            if not over.any():
                return outcome
            self._activate(over)

    def _loaded(self) -> highspy.Highs:
        model, lp = self._model, highspy.HighsLp()
        columns = sparse.csc_array(model.matrix)
        lp.num_col_, lp.num_row_ = len(model.cost), len(model.right)
        lp.col_cost_ = model.cost * self._scale
        lp.col_lower_, lp.col_upper_ = np.zeros(len(model.cost)), np.ones(len(model.cost))
        lp.row_lower_ = lp.row_upper_ = model.right
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = columns.indptr.astype(np.int32)
        lp.a_matrix_.index_ = columns.indices.astype(np.int32)
        lp.a_matrix_.value_ = columns.data
        highs = highspy.Highs()
        highs.setOptionValue("output_flag", False)
        highs.setOptionValue("random_seed", self._state.seed)
        highs.setOptionValue("primal_feasibility_tolerance", _FEASIBILITY)
        highs.setOptionValue("mip_feasibility_tolerance", _FEASIBILITY)
        highs.setOptionValue("dual_feasibility_tolerance", _DUAL_FEASIBILITY)
        highs.passModel(lp)
        for event in (highs.cbSimplexInterrupt, highs.cbIpmInterrupt, highs.cbMipInterrupt):
            event.subscribe(self._on_event)
        highs.cbMipImprovingSolution.subscribe(self._on_solution)
        return highs

    def _activate(self, times: BoolArray) -> None:
        fresh = np.flatnonzero(times)
        if len(fresh) == 0:
            return
        row_scale = self._row_scale[fresh]
        rows = sparse.csr_array(self._model.usage[fresh])
        values = rows.data / np.repeat(row_scale, np.diff(rows.indptr))
        self._highs.addRows(
            len(fresh),
            np.full(len(fresh), -np.inf),
            self._model.capacity[fresh] / row_scale,
            len(values),
            rows.indptr[:-1].astype(np.int32),
            rows.indices.astype(np.int32),
            values,
        )
        self._active.extend(fresh.tolist())

    def _run(self) -> LinearOutcome:
        self._state.check()
        if np.isfinite(self._state.remaining):
            # HiGHS limits the time of all runs of an object together.
            end = self._highs.getRunTime() + self._state.remaining
            self._highs.setOptionValue("time_limit", end)
        self._highs.run()
        status = self._highs.getModelStatus()
        if status == highspy.HighsModelStatus.kTimeLimit:
            self._state.record_time_limit()
        statuses = {
            highspy.HighsModelStatus.kOptimal: RunStatus.SOLVED,
            highspy.HighsModelStatus.kInfeasible: RunStatus.INFEASIBLE,
            # All columns lie between 0 and 1, so the model is never unbounded.
            highspy.HighsModelStatus.kUnboundedOrInfeasible: RunStatus.INFEASIBLE,
        }
        return self._outcome(statuses.get(status, RunStatus.STOPPED))

    def _outcome(self, status: RunStatus) -> LinearOutcome:
        info, solution = self._highs.getInfo(), self._highs.getSolution()
        x = np.array(solution.col_value) if _is_feasible(self._highs) else None
        duals = prices = None
        if solution.dual_valid:
            rows = np.array(solution.row_dual) / self._scale
            duals = rows[: len(self._model.right)]
            prices = np.zeros(len(self._model.capacity))
            usage_rows = rows[len(duals) : len(duals) + len(self._active)]
            # HiGHS's duals of upper limits are negative in a minimisation; prices of usage are not.
            prices[self._active] = -usage_rows / self._row_scale[self._active]
        return LinearOutcome(status, x, duals, prices, self._priced(info.mip_dual_bound))

    def _priced(self, bound: float) -> float:
        """A bound of HiGHS in the units of the problem, minus its tolerances."""
        if not np.isfinite(bound):
            return -float("inf")
        return float(bound) / self._scale + self._model.constant - self.slack

    def _on_event(self, event: highspy.highs.HighsCallbackEvent) -> None:
        if self._state.must_stop:
            event.interrupt()
        if event.callback_type == highspy.cb.HighsCallbackType.kCallbackMipInterrupt:
            self._state.raise_bound(min(self._priced(event.data_out.mip_dual_bound), self._cap))

    def _on_solution(self, event: highspy.highs.HighsCallbackEvent) -> None:
        self._offer(np.array(event.data_out.mip_solution))
