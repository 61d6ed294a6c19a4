"""Problems too large for one linear program: bounds by messages, choices by windows."""

from collections import deque
from collections.abc import Callable

import numpy as np

from autoshard.arrays import IntArray
from autoshard.solve.ascent import Ascent
from autoshard.solve.network import Link, Network
from autoshard.solve.stage import Stage

LARGE = 200_000
"""Entries of matrices and usage rows from which on messages come before linear programs."""
HUGE = 300_000
"""Entries of matrices alone, from which on windows take the place of linear programs."""
_MOST_ROUNDS = 4
_ASCENT_SHARE = 0.75
_WORTHWHILE = 0.2
_NOTABLE = 0.02
_FIRST_WINDOW = 24
_WINDOW_SECONDS = 4.0
_SLOW = 0.25
_FORGETTING = 0.9
_MOST_FRUITLESS = 40
_GROWTH = 1.25
_SHRINKAGE = 0.6


def _num_pairs(network: Network) -> int:
    return sum(link.matrix.values.size for _, _, link in network.pairs())


def is_large(network: Network) -> bool:
    """Whether messages should come before a linear program of the network."""
    usage = sum(
        (term.last - term.first) * len(term.usage)
        for variable in network.variables.values()
        for term in variable.terms
    )
    return _num_pairs(network) + usage >= LARGE


def is_huge(network: Network) -> bool:
    """Whether a linear program of the network takes too long to be of use."""
    return _num_pairs(network) >= HUGE


def ascend(stage: Stage) -> None:
    """Bound a large problem by messages, and drop what cannot matter any more."""
    search = stage.search
    for _ in range(_MOST_ROUNDS):
        if stage.done or search.closed or not is_large(stage.network):
            return
        search.enter("pass messages")
        least = Ascent(stage).run(_ASCENT_SHARE * search.remaining)
        bounds = np.concatenate(list(least.values()))
        hopeless = float((bounds >= search.cutoff).mean())
        # Reductions after a few drops cost more than they bring, and may drop what the
        # best choice picks for something as good, so that no window could start from it.
        if hopeless < _NOTABLE:
            return
        stage.drop_hopeless(least)
        stage.reduce()
        if hopeless < _WORTHWHILE:
            return


def search_windows(
    stage: Stage,
    solve: Callable[[Stage, float], object],
    *,
    seconds: float,
    patience: float = _MOST_FRUITLESS,
) -> None:
    """Improve the best choice a part at a time, until that stops paying or the time is over.

    Large-neighbourhood search: everything outside of a window keeps its strategy, and the
    window is solved as a problem of its own. Windows are variables near each other in the
    network, or alive at the same time, in turn.

    Args:
        stage: the problem; nothing happens while no choice is known.
        solve: closes a stage within the seconds it is given.
        seconds: time to spend at most; the search ends early where the next window might
            not end in time.
        patience: windows without a gain after which the search ends.
    """
    search = stage.search
    variables = np.array(sorted(stage.network.variables))
    if stage.done or search.closed or len(variables) <= _FIRST_WINDOW:
        return
    search.enter("search windows")
    rng = np.random.default_rng(search.seed)
    width = float(_FIRST_WINDOW)
    end, fruitless, longest = search.elapsed + seconds, 0, 0.0
    while not search.closed and search.elapsed + longest < end and fruitless < patience:
        search.check()
        picks = None if search.choice is None else stage.pick_of(search.choice)
        if picks is None:
            return
        nearby = bool(rng.integers(2)) or not len(stage.network.capacity)
        draw = _nearby if nearby else _contemporary
        members = draw(stage.network, variables, int(width), rng)
        start, before = search.elapsed, search.objective
        window = _window(stage, members, picks)
        window.reduce()
        allowed = min(_WINDOW_SECONDS, end - search.elapsed)
        solve(window, allowed)
        taken, better = search.elapsed - start, search.objective < before
        fruitless = 0 if better else fruitless + 1
        longest = max(longest * _FORGETTING, taken)
        slow = taken > _SLOW * _WINDOW_SECONDS
        width = max(width * (_SHRINKAGE if slow else _GROWTH), 2.0)
        width = min(width, float(len(variables)))
        search.count("windows")
        search.count("windows.better", float(better))


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


def _window(stage: Stage, members: list[int], picks: dict[int, int]) -> Stage:
    """The problem of some variables when all others keep their picks."""
    network, inside = stage.network, set(members)
    part = Network()
    part.capacity = network.capacity - network.usage(
        picks, [v for v in network.variables if v not in inside]
    )
    for v in members:
        variable = network.variables[v]
        part.variables[v], part.links[v], part.changes[v] = variable, {}, 0
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

    return stage.narrowed(part, invert)
