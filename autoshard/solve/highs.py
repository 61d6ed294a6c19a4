"""HiGHS, driven directly: relaxations and branch and bound that can be watched and stopped."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import highspy
import numpy as np
from scipy import sparse

from autoshard.arrays import BoolArray, FloatArray
from autoshard.solve.linear import LinearModel
from autoshard.solve.search import Search

_LARGEST_COST = 1e4
_FEASIBILITY = 1e-9
_DUAL_FEASIBILITY = 1e-7
_INTERIOR_FROM = 40_000
_EAGER_ENTRIES = 200_000


class Ending(Enum):
    """How a run of HiGHS ended."""

    SOLVED = auto()
    INFEASIBLE = auto()
    STOPPED = auto()


@dataclass(frozen=True, slots=True, eq=False)
class LinearOutcome:
    """Result of a run; prices are in the units of the model.

    Attributes:
        ending: how the run ended.
        x: the point found, shape [n], or None.
        duals: multipliers of the equality rows of a relaxation, shape [m], or None.
        prices: multipliers of the usage rows of a relaxation, shape [T], or None.
        bound: lower bound of the integral optimum with all tolerances taken off.
    """

    ending: Ending
    x: FloatArray | None
    duals: FloatArray | None
    prices: FloatArray | None
    bound: float


class HighsSolver:
    """One linear model in HiGHS.

    Prices are scaled so that the tolerances of HiGHS mean something whatever the unit,
    and each usage row is scaled to coefficients of at most one. Usage rows enter when a
    point violates them, unless they are few.

    Args:
        model: what to minimise.
        search: gives the seed, the time and the wish to stop; hears of progress.
        offer: takes an integral point found on the way, shape [n].
        cap: bounds reported on the way are cut to this.
        seconds: give up on a run after this time.
    """

    def __init__(
        self,
        model: LinearModel,
        search: Search,
        *,
        offer: Callable[[FloatArray], None],
        cap: float = float("inf"),
        seconds: float = float("inf"),
    ) -> None:
        self._model = model
        self._seconds = seconds
        self._search = search
        self._offer = offer
        self._cap = cap
        self._scale = _LARGEST_COST / max(float(np.abs(model.cost).max(initial=0.0)), 1e-300)
        heaviest = abs(model.usage).max(axis=1).toarray().ravel() if model.usage.nnz else None
        self._heaviest = np.ones(len(model.capacity)) if heaviest is None else heaviest
        self._active: list[int] = []
        self._highs = self._loaded()
        if model.usage.nnz <= _EAGER_ENTRIES:
            self._activate(np.ones(len(model.capacity), dtype=np.bool_))

    @property
    def slack(self) -> float:
        """Most by which the tolerances of HiGHS can lift a bound."""
        return _DUAL_FEASIBILITY * (len(self._model.starts) - 1) / self._scale

    def relax(self) -> LinearOutcome:
        """Solve the linear relaxation."""
        large = len(self._model.cost) > _INTERIOR_FROM
        self._highs.setOptionValue("solver", "ipm" if large else "choose")
        return self._until_fits()

    def branch(self, start: FloatArray | None) -> LinearOutcome:
        """Solve with integral strategies, from a point if there is one."""
        columns = np.arange(self._model.num_strategies, dtype=np.int32)
        kinds = np.full(len(columns), int(highspy.HighsVarType.kInteger), dtype=np.uint8)
        self._highs.changeColsIntegrality(len(columns), columns, kinds)
        if start is not None:
            index = np.arange(len(start), dtype=np.int32)
            self._highs.setSolution(len(index), index, start)
        allowed = self._search.gap * self._search.magnitude * self._scale
        self._highs.setOptionValue("mip_abs_gap", max(0.25 * allowed, 1e-6))
        self._highs.setOptionValue("mip_rel_gap", 0.0)
        return self._until_fits()

    def forbid(self, x: FloatArray, times: BoolArray) -> None:
        """Cut off an integral point whose usage does not fit at some checkpoints.

        For each of them, the strategies of the point that use it are a cover: usage is
        not negative, so they cannot all be chosen together.
        """
        for time in np.flatnonzero(times):
            row = self._model.usage[[time]].tocoo()
            cover = row.col[x[row.col] > 0.5].astype(np.int32)  # noqa: PLR2004 - rounding
            self._highs.addRow(-np.inf, len(cover) - 1.0, len(cover), cover, np.ones(len(cover)))

    def violated(self, x: FloatArray) -> BoolArray:
        """Checkpoints at which a point uses more than there is, shape [T]."""
        room = self._model.capacity + _FEASIBILITY * self._heaviest
        over: BoolArray = self._model.usage @ x > room
        return over

    def _until_fits(self) -> LinearOutcome:
        """Run, add the usage rows that the point violates, and run again until none is left."""
        while True:
            outcome = self._run()
            if outcome.x is None or outcome.ending is not Ending.SOLVED:
                return outcome
            over = self.violated(outcome.x)
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
        highs.setOptionValue("random_seed", self._search.seed)
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
        heaviest = self._heaviest[fresh]
        rows = sparse.csr_array(self._model.usage[fresh])
        values = rows.data / np.repeat(heaviest, np.diff(rows.indptr))
        self._highs.addRows(
            len(fresh),
            np.full(len(fresh), -np.inf),
            self._model.capacity[fresh] / heaviest,
            len(values),
            rows.indptr[:-1].astype(np.int32),
            rows.indices.astype(np.int32),
            values,
        )
        self._active.extend(fresh.tolist())

    def _run(self) -> LinearOutcome:
        self._search.check()
        allowed = min(self._search.remaining, self._seconds)
        if np.isfinite(allowed):
            self._highs.setOptionValue("time_limit", self._highs.getRunTime() + allowed)
        self._highs.run()
        status = self._highs.getModelStatus()
        endings = {
            highspy.HighsModelStatus.kOptimal: Ending.SOLVED,
            highspy.HighsModelStatus.kInfeasible: Ending.INFEASIBLE,
            highspy.HighsModelStatus.kUnboundedOrInfeasible: Ending.INFEASIBLE,
        }
        return self._outcome(endings.get(status, Ending.STOPPED))

    def _outcome(self, ending: Ending) -> LinearOutcome:
        info, solution = self._highs.getInfo(), self._highs.getSolution()
        feasible = info.primal_solution_status == int(
            highspy.SolutionStatus.kSolutionStatusFeasible
        )
        x = np.array(solution.col_value) if feasible else None
        duals = prices = None
        if solution.dual_valid:
            rows = np.array(solution.row_dual) / self._scale
            duals = rows[: len(self._model.right)]
            prices = np.zeros(len(self._model.capacity))
            usage_rows = rows[len(duals) : len(duals) + len(self._active)]
            prices[self._active] = -usage_rows / self._heaviest[self._active]
        return LinearOutcome(ending, x, duals, prices, self._priced(info.mip_dual_bound))

    def _priced(self, bound: float) -> float:
        """A bound of HiGHS in the units of the problem, with its tolerances taken off."""
        if not np.isfinite(bound):
            return -float("inf")
        return float(bound) / self._scale + self._model.constant - self.slack

    def _on_event(self, event: highspy.highs.HighsCallbackEvent) -> None:
        if self._search.must_stop:
            event.interrupt()
        if event.callback_type == highspy.cb.HighsCallbackType.kCallbackMipInterrupt:
            self._search.raise_bound(min(self._priced(event.data_out.mip_dual_bound), self._cap))

    def _on_solution(self, event: highspy.highs.HighsCallbackEvent) -> None:
        self._offer(np.array(event.data_out.mip_solution))
