"""From a problem to a certified solution."""

from collections.abc import Callable
from functools import partial

import numpy as np

from autoshard.arrays import FloatArray
from autoshard.errors import OptionError
from autoshard.outcome import SolveStatus
from autoshard.solve.descent import Descent
from autoshard.solve.elimination import Elimination
from autoshard.solve.highs import Ending, HighsSolver
from autoshard.solve.lagrange import Lagrangian
from autoshard.solve.large import ascend, is_huge, search_windows
from autoshard.solve.linear import LinearModel, linear_model
from autoshard.solve.narrowing import solve_narrowed
from autoshard.solve.network import Network
from autoshard.solve.problem import Problem
from autoshard.solve.reference import solve_reference
from autoshard.solve.repeats import Outcome, solve_repeats
from autoshard.solve.search import CancelToken, Interrupted, Progress, Search
from autoshard.solve.solution import Solution
from autoshard.solve.stage import Stage
from autoshard.solve.tables import KeyValueStore
from autoshard.solve.thinning import thin
from autoshard.solve.usage import minimum_usage
from autoshard.solve.warm_start import WarmStart

_INTEGRAL = 1.0 - 1e-6
_MOST_ROUNDS = 6
_LEAST_GAP = 1e-9
"""Gap that is left to rounding, whatever is asked for."""
_EXPLAIN_SECONDS = 20.0
_LEAST_SECONDS = 1e-3
_CORE_STRATEGIES = 3
_CORE_SHARE = 0.25
_CORE_SECONDS = 240.0
_WINDOWS_SHARE = 0.05
_LOOSE_SHARE = 0.5
"""Share of the time for a linear program without the limit, where that seems not to bind."""
_NEARLY = 0.01
"""Gap that counts as nearly closed."""
_REST_SHARE = 0.1
"""Share of the time for a gap that repeated groups have nearly closed."""
_WORTHWHILE = 0.2
"""Share of the strategies that a round must drop to be followed by another one."""


def solve_problem(
    problem: Problem,
    *,
    time_limit: float | None = None,
    relative_gap: float = 1e-6,
    seed: int = 0,
    on_progress: Callable[[Progress], None] | None = None,
    cancel: CancelToken | None = None,
    solver: str = "highs",
    block_cache: KeyValueStore | None = None,
    warm_start: WarmStart | None = None,
) -> Solution:
    """Find the cheapest choice, with a proof of how good it is.

    The problem is first solved without its usage limit: exact reductions often solve it
    outright, and HiGHS solves the rest. If that choice breaks the limit, prices on usage
    give a bound and good choices, strategies that cannot matter any more are dropped, and
    HiGHS closes what gap is left.

    Args:
        problem: what to solve.
        time_limit: seconds after which the best choice so far is returned. Where repeated
            groups leave a gap of less than 1 %, a tenth of them is spent on the rest of it.
        relative_gap: stop once the choice is proven this close to the optimum, relative
            to the sum of the absolute prices it pays; below 1e-9 rounding decides.
        seed: for the random numbers inside HiGHS.
        on_progress: called at each phase and each improvement, from the solving thread.
        cancel: a `threading.Event`, say; once set, the solve ends with what it has.
        solver: "highs", or the name of a cvxpy solver that gets what the reductions leave
            (see `solve_reference`; then `cancel` is heard only between phases).
        block_cache: keeps tables of repeated groups for other solves. What it has is not worked
            out again; `Solution.blocks` says what that was.
        warm_start: give the same one to solves of one problem under several limits; all but the
            first then know where to look.

    Returns:
        the outcome as a value; an infeasible problem is a status, not an error. Where the
        usage limit is to blame, `statistics["minimum_usage"]` is a limit that works: the
        least one, unless the time for finding it ran out.

    Raises:
        OptionError: an option is out of its range, or the solver is not installed.
    """
    _check_options(time_limit, relative_gap)
    search = Search(
        problem,
        time_limit=time_limit,
        gap=max(relative_gap, _LEAST_GAP),
        seed=seed,
        on_progress=on_progress,
        cancel=cancel,
        block_cache=block_cache,
        warm_start=warm_start,
    )
    infeasible = False
    try:
        infeasible = not _solve(search, solver)
        known = "minimum_usage" in search.statistics
        if infeasible and not known and np.isfinite(problem.usage_limit):
            _explain(search)
    except Interrupted:
        search.count("interrupted")
    return search.finish(infeasible=infeasible)


def _check_options(time_limit: float | None, relative_gap: float) -> None:
    if time_limit is not None and not time_limit > 0:
        raise OptionError(f"time_limit is {time_limit} s; give a positive number, or None")
    if not 0 <= relative_gap < 1:
        raise OptionError(f"relative_gap is {relative_gap}; give a number from 0 to below 1")


def _explain(search: Search) -> None:
    """Find the usage limit that would have worked."""
    search.enter("find the least limit")
    seconds = min(search.remaining, _EXPLAIN_SECONDS)
    least = minimum_usage(search.problem, time_limit=seconds, cancel=search)
    if np.isfinite(least):
        search.statistics["minimum_usage"] = least


def _solve(search: Search, solver: str) -> bool:
    """Run all phases; tell whether the problem has a choice at all."""
    if search.problem.usage_limit < 0:
        return False
    outcome = _through_structure(search)
    if outcome is not Outcome.NOTHING:
        return outcome is Outcome.TOLD
    return _flat(search, solver)


def _through_structure(search: Search) -> Outcome:
    """Make use of wide nodes and repeated groups; NOTHING where that leaves something to do."""
    outcome = solve_narrowed(search, partial(_solve_core, search))
    done = (
        outcome is Outcome.INFEASIBLE or search.closed or search.warm_start.restricted is not None
    )
    if done or (outcome is Outcome.TOLD and search.problem.has_path_costs):
        return outcome
    outcome = _repeated(search)
    return outcome if outcome is Outcome.INFEASIBLE or search.closed else Outcome.NOTHING


def _repeated(search: Search) -> Outcome:
    """Make use of repeated groups; what they nearly close is not worth most of the time."""
    outcome = solve_repeats(search)
    if search.objective - search.bound <= _NEARLY * search.magnitude:
        search.hurry(_REST_SHARE)
    return outcome


def _solve_core(
    search: Search,
    core: Problem,
    seconds: float,
    *,
    gap: float,
    bound: float,
    warm_start: WarmStart | None,
) -> Solution:
    """Solve a part of the problem of a search, of which a lower bound is known."""
    inner = Search(
        core,
        time_limit=None if np.isinf(seconds) else max(seconds, _LEAST_SECONDS),
        gap=max(gap, _LEAST_GAP),
        seed=search.seed,
        cancel=search,
        block_cache=search.block_cache,
        warm_start=warm_start,
    )
    inner.raise_bound(bound)
    infeasible = False
    try:
        outcome = _repeated(inner)
        infeasible = outcome is Outcome.INFEASIBLE
        told = inner.choice is not None and core.can_bind
        if not infeasible and not inner.closed and not told:
            infeasible = not _flat(inner, "highs")
    except Interrupted:
        search.count("narrowing.interrupted")
    search.blocks = inner.blocks
    return inner.finish(infeasible=infeasible)


def _flat(search: Search, solver: str) -> bool:
    """Solve without a look at what repeats; tell whether the problem has a choice at all."""
    search.enter("reduce")
    _offer_plain(search)
    stage = Stage(Network.from_problem(search.problem, limited=False), search)
    stage.reduce()
    if stage.network.infeasible:
        return False
    if not search.problem.can_bind:
        return _unlimited(stage) if solver == "highs" else _hand_over(stage, solver)
    if solver == "highs" and not search.closed and _seems_loose(stage):
        _unlimited(stage, seconds=_LOOSE_SHARE * search.remaining)
    return search.closed or _under_limit(search, solver)


def _seems_loose(stage: Stage) -> bool:
    """Whether a good choice that was found without looking at the limit keeps it."""
    stage.search.enter("try without the limit")
    start = {v: int(x.cost.argmin()) for v, x in stage.network.variables.items()}
    return stage.offer(Descent(stage.network, check=stage.search.check).improve(start))


def _offer_plain(search: Search) -> None:
    """Offer what is cheapest and what uses least, one node at a time: there may be no time left."""
    problem = search.problem
    for preferred in ([node.cost for node in problem.nodes], [x.usage for x in problem.nodes]):
        choice = np.array([int(values.argmin()) for values in preferred], dtype=np.intp)
        for group in problem.ties:
            choice[list(group)] = int(np.sum([preferred[v] for v in group], axis=0).argmin())
        search.offer(choice)


def _under_limit(search: Search, solver: str) -> bool:
    """Run all phases that know the usage limit; tell whether there is a choice at all."""
    search.enter("reduce under the limit")
    stage = Stage(Network.from_problem(search.problem), search)
    stage.reduce()
    if stage.network.infeasible:
        return False
    return _limited(stage) if solver == "highs" else _hand_over(stage, solver)


def _hand_over(stage: Stage, solver: str) -> bool:
    """Let another solver close what the reductions leave."""
    search = stage.search
    if stage.done or search.closed:
        return search.choice is not None
    search.enter(f"hand over to {solver}")
    problem, owners = stage.network.to_problem()
    limit = None if np.isinf(search.remaining) else search.remaining
    answer = solve_reference(problem, solver=solver, time_limit=limit)
    if answer.choice is not None:
        stage.offer({int(v): int(s) for v, s in zip(owners, answer.choice, strict=True) if v >= 0})
    stage.raise_bound(answer.bound + stage.network.constant)
    return answer.status is not SolveStatus.INFEASIBLE


def _unlimited(stage: Stage, *, seconds: float = float("inf")) -> bool:
    """Solve what the reductions leave of a problem without a usage limit."""
    thin(stage)
    return _meet_size(stage) or _branch(stage, seconds=seconds)


def _meet_size(stage: Stage) -> bool:
    """Do what a large problem needs; tell whether that has taken the time there was."""
    ascend(stage)
    search = stage.search
    if stage.done or not is_huge(stage.network) or np.isinf(search.remaining):
        return False
    if search.choice is None or stage.pick_of(search.choice) is None:
        return False
    search_windows(stage, _close, seconds=search.remaining, patience=float("inf"))
    return True


def _close(window: Stage, seconds: float) -> bool:
    return _branch(window, seconds=seconds)


def _limited(stage: Stage) -> bool:
    """Solve what a binding usage limit leaves."""
    search = stage.search
    if _meet_size(stage):
        return True
    if not stage.done:
        search.enter("improve by hand")
        _descend(stage, {v: int(x.cost.argmin()) for v, x in stage.network.variables.items()})
    for _ in range(_MOST_ROUNDS):
        if stage.done or search.closed:
            return search.choice is not None
        plan = Elimination.compile(stage.network, check=search.check)
        if plan is None:
            break
        search.enter("price the usage")
        best = Lagrangian(stage, plan).run()
        if search.closed:
            return True
        search.enter("drop strategies")
        marginals = plan.min_marginals(best.result, check=search.check)
        shift = float(best.prices @ stage.network.capacity)
        least = {v: bounds - shift for v, bounds in marginals.items()}
        share = _WINDOWS_SHARE * min(search.remaining, _CORE_SECONDS)
        search_windows(stage, _close, seconds=share)
        _search_core(stage, least, best.seen)
        before = sum(len(x.cost) for x in stage.network.variables.values())
        dropped = stage.drop_hopeless(least)
        stage.reduce()
        if dropped < _WORTHWHILE * before:
            break
    return _branch(stage)


def _search_core(stage: Stage, least: dict[int, FloatArray], seen: list[dict[int, int]]) -> None:
    """Look for a choice among the strategies that matter most.

    These are the ones that were cheapest at some prices of usage, and those that cost
    least above the bound.
    """
    every = np.sort(np.concatenate(list(least.values())))
    most = every[min(_CORE_STRATEGIES * len(least), len(every)) - 1]
    keep = {v: bounds <= most for v, bounds in least.items()}
    for picks in seen:
        for v, s in picks.items():
            keep[v][s] = True
    core = stage.restricted(keep)
    core.reduce()
    _branch(core, seconds=_CORE_SHARE * min(stage.search.remaining, _CORE_SECONDS))


def _branch(stage: Stage, *, seconds: float = float("inf")) -> bool:
    """Close the gap with HiGHS: the relaxation, then branch and bound."""
    search = stage.search
    if stage.done or search.closed:
        return search.choice is not None
    search.enter("improve by hand")
    _descend(stage, {v: int(x.cost.argmin()) for v, x in stage.network.variables.items()})
    stage.trim()
    for _ in range(_MOST_ROUNDS):
        if stage.done or search.closed:
            return search.choice is not None
        search.enter("relax")
        model = linear_model(stage.network)
        relaxed = _solver(stage, model, seconds).relax()
        if relaxed.ending is Ending.INFEASIBLE:
            return stage.exhausted()
        search.check()
        if relaxed.x is not None:
            _round(stage, model, relaxed.x, relaxed.prices)
        if relaxed.duals is None or relaxed.prices is None:
            break
        bound, excess = model.dual_bound(relaxed.duals, relaxed.prices)
        stage.raise_bound(bound)
        if search.closed:
            return True
        before = model.num_strategies
        dropped = stage.drop_hopeless(_by_variable(model, bound + excess))
        stage.reduce()
        if dropped < _WORTHWHILE * before:
            break
    if stage.done or search.closed:
        return search.choice is not None
    return _search_tree(stage, seconds)


def _search_tree(stage: Stage, seconds: float) -> bool:
    """Branch and bound until the best choice also fits exactly."""
    search = stage.search
    search.enter("branch and bound")
    model = linear_model(stage.network)
    solver = _solver(stage, model, seconds)
    picks = None if search.choice is None else stage.pick_of(search.choice)
    start = None if picks is None else model.columns(stage.network, picks)
    while True:
        outcome = solver.branch(start)
        if outcome.ending is Ending.INFEASIBLE:
            return stage.exhausted()
        stage.raise_bound(outcome.bound)
        if outcome.x is None or outcome.ending is Ending.STOPPED:
            search.check()
            return True
        picks, _ = model.rounded(outcome.x)
        over = stage.network.usage(picks) > stage.network.capacity
        if stage.offer(picks) or not over.any():
            return True
        search.count("branch.covers", float(over.sum()))
        solver.forbid(outcome.x, over)


def _solver(stage: Stage, model: LinearModel, seconds: float) -> HighsSolver:
    def offer(x: FloatArray) -> None:
        stage.offer(model.rounded(x)[0])

    return HighsSolver(model, stage.search, offer=offer, cap=stage.cap, seconds=seconds)


def _round(stage: Stage, model: LinearModel, x: FloatArray, prices: FloatArray | None) -> None:
    """Offer the choice nearest to a point of the relaxation, improved by hand."""
    picks, least = model.rounded(x)
    if least >= _INTEGRAL and stage.offer(picks):
        stage.search.count("relax.integral")
        return
    _descend(stage, picks, prices)


def _descend(stage: Stage, picks: dict[int, int], prices: FloatArray | None = None) -> None:
    descent = Descent(stage.network, check=stage.search.check)
    if prices is None:
        prices = np.zeros(len(stage.network.capacity))
    better = descent.repair(descent.improve(picks, prices=prices), prices)
    if better is not None:
        stage.offer(better)


def _by_variable(model: LinearModel, bounds: FloatArray) -> dict[int, FloatArray]:
    spans = zip(model.variables, model.starts, model.starts[1:], strict=False)
    return {v: bounds[first:last] for v, first, last in spans}
