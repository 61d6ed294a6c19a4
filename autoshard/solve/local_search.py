"""Local search: coordinate descent, and large-neighbourhood search in windows."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autoshard.arrays import BoolArray, FloatArray, IntArray
from autoshard.solve.network import Link, Network, Variable
from autoshard.solve.presolve.base import Worklist
from autoshard.solve.presolve.drop_strategies import term_prices
from autoshard.solve.reduced_problem import ReducedProblem
from autoshard.solve.settings import DEFAULT_EFFORT, Effort


@dataclass(frozen=True, slots=True, eq=False)
class _Pieces:
    """Usage of a variable by spans that do not overlap.

    Attributes:
        starts: first checkpoint of each span, shape [P].
        last: end of the last span.
        usage: shape [P, S].
    """

    starts: IntArray
    last: int
    usage: FloatArray


class CoordinateDescent:
    """Coordinate descent on a network without ties.

    Args:
        network: what to improve on; must not change while the descent lives.
        effort: limits of work, and when to stop.
    """

    def __init__(self, network: Network, *, effort: Effort = DEFAULT_EFFORT) -> None:
        self._network = network
        self._effort = effort
        self._pieces: dict[int, _Pieces] = {}

    def improve(
        self, picks: dict[int, int], *, prices: FloatArray | None = None, within: bool = False
    ) -> dict[int, int]:
        """Move to a choice that no change of one variable improves.

        Args:
            picks: where to start.
            prices: price of usage at each checkpoint, shape [T]; none by default.
            within: allow only moves that keep the usage within the capacity, from a start
                that does.
        """
        picks = dict(picks)
        usage = self._network.usage(picks)
        queue = Worklist(self._network.variables)
        for _ in range(self._effort.settings.descent_sweeps * len(self._network.variables)):
            if not queue:
                break
            v = queue.pop()
            self._effort.check()
            best = self._best(v, picks, prices, usage if within else None)
            if best != picks[v]:
                _move(self._network.variables[v], usage, picks[v], best)
                picks[v] = best
                queue.update(self._network.links[v])
        return picks

    def repair(self, picks: dict[int, int], prices: FloatArray) -> dict[int, int] | None:
        """Raise the price of what is short until a choice fits, then improve within the slack.

        Args:
            picks: where to start.
            prices: first guess of the price of usage at each checkpoint, shape [T].

        Returns:
            a choice within the capacity, or None where none was found.
        """
        capacity = self._network.capacity
        spread = sum(float(np.ptp(x.cost)) for x in self._network.variables.values())
        prices = prices.copy()
        step = 1e-3 * spread / max(float(capacity.max(initial=0.0)), 1e-300)
        for _ in range(self._effort.settings.repair_rounds):
            over = self._network.usage(picks) > capacity
            if not over.any():
                return self.improve(picks, within=True)
            prices[over] = np.maximum(prices[over] * 1.5, prices[over] + step)
            step *= 2.0
            picks = self.improve(picks, prices=prices)
        return None

    def _best(
        self, v: int, picks: dict[int, int], prices: FloatArray | None, usage: FloatArray | None
    ) -> int:
        variable = self._network.variables[v]
        total = variable.cost
        for w, link in self._network.links[v].items():
            total = total + link.matrix.values[link.rows, link.cols[picks[w]]]
        if variable.terms and prices is not None:
            total = total + term_prices(variable, prices)
        if variable.terms and usage is not None:
            total = np.where(self._fits(variable, picks[v], usage), total, np.inf)
        best = int(total.argmin())
        return best if total[best] < total[picks[v]] else picks[v]

    def _fits(self, variable: Variable, pick: int, usage: FloatArray) -> BoolArray:
        """Mask of the strategies that fit in the slack left by the others, shape [S]."""
        pieces = self._pieces.get(id(variable))
        if pieces is None:
            pieces = self._pieces[id(variable)] = _in_pieces(variable)
        first, last = pieces.starts[0], pieces.last
        slack = self._network.capacity[first:last] - usage[first:last]
        left = np.maximum(np.minimum.reduceat(slack, pieces.starts - first), 0.0)
        fits = pieces.usage <= (left + pieces.usage[:, pick])[:, None]
        return np.asarray(fits.all(axis=0))


def _in_pieces(variable: Variable) -> _Pieces:
    bounds = np.unique([end for term in variable.terms for end in (term.first, term.last)])
    usage = np.zeros((len(bounds) - 1, len(variable.cost)))
    for term in variable.terms:
        start, end = np.searchsorted(bounds, (term.first, term.last))
        usage[start:end] += term.usage
    return _Pieces(bounds[:-1].astype(np.intp), int(bounds[-1]), usage)


def _move(variable: Variable, usage: FloatArray, old: int | None, new: int | None) -> None:
    """Take the use of one strategy off, in place, and add that of another."""
    for term in variable.terms:
        if old is not None:
            usage[term.first : term.last] -= term.usage[old]
        if new is not None:
            usage[term.first : term.last] += term.usage[new]


_FORGETTING = 0.9


def search_windows(
    reduced: ReducedProblem,
    solve: Callable[[ReducedProblem, float], object],
    *,
    seconds: float,
    patience: float | None = None,
) -> None:
    """Improve the best choice a part at a time, until that stops paying or the time is over.

    Large-neighbourhood search: everything outside of a window keeps its strategy, and the
    window is solved as a problem of its own. Windows are variables near each other in the
    network, or alive at the same time, in turn.

    Args:
        reduced: the problem; nothing happens while no choice is known.
        solve: closes a stage within the seconds it is given.
        seconds: time to spend at most; the solve state ends early where the next window might
            not end in time.
        patience: windows without a gain after which the solve state ends; that of the settings if
            None.
    """
    state = reduced.state
    variables = np.array(sorted(reduced.network.variables))
    if reduced.done or state.closed or len(variables) <= state.settings.window_size:
        return
    if patience is None:
        patience = state.settings.window_patience
    state.enter("search windows")
    rng = np.random.default_rng(state.seed)
    width = float(state.settings.window_size)
    end, fruitless, longest = state.elapsed + seconds, 0, 0.0
    while not state.closed and state.elapsed + longest < end and fruitless < patience:
        state.check()
        picks = None if state.choice is None else reduced.pick_of(state.choice)
        if picks is None:
            return
        nearby = bool(rng.integers(2)) or not len(reduced.network.capacity)
        draw = _nearby if nearby else _contemporary
        members = draw(reduced.network, variables, int(width), rng)
        start, before = state.elapsed, state.objective
        window = _window(reduced, members, picks)
        window.reduce()
        allowed = min(state.settings.window_seconds, end - state.elapsed)
        solve(window, allowed)
        taken, better = state.elapsed - start, state.objective < before
        fruitless = 0 if better else fruitless + 1
        longest = max(longest * _FORGETTING, taken)
        slow = taken > state.settings.window_slow * state.settings.window_seconds
        width = max(
            width * (state.settings.window_shrinkage if slow else state.settings.window_growth),
            2.0,
        )
        width = min(width, float(len(variables)))
        state.count("windows")
        state.count("windows.better", float(better))


def _nearby(
    network: Network, variables: IntArray, width: int, rng: np.random.Generator
) -> list[int]:
    """Variables around a random one, nearest first."""
    root = int(rng.choice(variables))
    queue, seen = deque([root]), {root}
    members: list[int] = []
    while queue and len(members) < width:
        v = queue.popleft()
        members.append(v)
        fresh = [w for w in network.links[v] if w not in seen]
        rng.shuffle(fresh)
        seen.update(fresh)
        queue.extend(fresh)
    return members


def _contemporary(
    network: Network, variables: IntArray, width: int, rng: np.random.Generator
) -> list[int]:
    """Variables alive at a random checkpoint."""
    time = int(rng.integers(len(network.capacity)))
    alive = [
        int(v)
        for v in variables
        if any(term.first <= time < term.last for term in network.variables[v].terms)
    ]
    rng.shuffle(alive)
    return alive[:width] or [int(variables[0])]


def _window(reduced: ReducedProblem, members: list[int], picks: dict[int, int]) -> ReducedProblem:
    """The problem of some variables when all others keep their picks."""
    network, inside = reduced.network, set(members)
    part = Network()
    part.capacity = network.capacity - network.usage(
        picks, [v for v in network.variables if v not in inside]
    )
    for v in members:
        part.add(v, network.variables[v])
    for v in members:
        for w, link in network.links[v].items():
            if w not in inside:
                part.add_cost(v, link.matrix.values[link.rows, link.cols[picks[w]]])
            elif v < w:
                part.put(v, w, Link(link.matrix, link.rows, link.cols))
    outside = {v: x.labels[picks[v]] for v, x in network.variables.items() if v not in inside}

    def invert(choice: IntArray) -> None:
        for v, label in outside.items():
            choice[v] = label

    return reduced.narrowed(part, invert)
