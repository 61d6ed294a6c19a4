"""Prices on usage that treat the groups of a run alike."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from autoshard.arrays import FloatArray, IntArray
from autoshard.solve.network import spread
from autoshard.solve.problem import Problem
from autoshard.solve.repeats.runs import Run


class Watch:
    """Usage over time, and weights that bring it down to one number.

    Weights are prices of usage per node. A price at some times adds up to a weight of each
    node, the part of the times at which it is alive. The groups of a run must stay alike, so
    each place gets the least weight that it has in any group: the weighted usage of a choice
    is then at most its peak, whatever the choice. The last group keeps its own, as
    much of it is gone sooner than what corresponds to it.

    Args:
        problem: the problem; its limit is finite.
        runs: runs in it.

    Attributes:
        usage: of each strategy of each node, cut off well above the limit.
        weights: those that have been added, shape [N] each.
    """

    def __init__(self, problem: Problem, runs: Sequence[Run]) -> None:
        # A strategy that takes infinitely much may as well take more than any other one.
        arrays = {id(node.usage): node.usage for node in problem.nodes}.values()
        finite = (float(usage[np.isfinite(usage)].max(initial=0.0)) for usage in arrays)
        most = 2.0 * max(problem.usage_limit, *finite, 1.0)
        known: dict[int, FloatArray] = {}
        for node in problem.nodes:
            if id(node.usage) not in known:
                known[id(node.usage)] = np.minimum(node.usage, most)
        self.usage = [known[id(node.usage)] for node in problem.nodes]
        self._problem, self._most = problem, most
        self.weights: list[FloatArray] = []
        self._num_times = len(problem.peak_times)
        self._first, self._last = problem.peak_spans.T
        self._places = [run.places for run in runs]

    @cached_property
    def _alike(self) -> dict[int, IntArray]:
        """Times at which corresponding nodes of a run become alive, by each of these times."""
        found: dict[int, IntArray] = {}
        for places in self._places:
            for nodes in places.T:
                alive = nodes[self._first[nodes] < self._last[nodes]]
                times = np.unique(self._first[alive])
                for time in times.tolist():
                    found.setdefault(time, times)
        return found

    def uses(self, choice: IntArray) -> FloatArray:
        """Usage of each node, shape [N]; 0 where it is never alive."""
        uses = np.minimum(self._problem.uses(choice), self._most)
        return np.where(self._first < self._last, uses, 0.0)

    def over_time(self, uses: FloatArray) -> FloatArray:
        """Usage at each peak time, shape [T], from that of each node, shape [N]."""
        return spread(self._first, self._last, uses, self._num_times)

    def change(self, nodes: IntArray, old: IntArray, new: IntArray) -> FloatArray:
        """How usage grows over time, shape [T], when some nodes take other strategies.

        Args:
            nodes: shape [P].
            old: a strategy of each of them, shape [P].
            new: another one, shape [P].
        """
        picks = zip(nodes.tolist(), old.tolist(), new.tolist(), strict=True)
        grows = np.array([self.usage[v][t] - self.usage[v][s] for v, s, t in picks])
        return spread(self._first[nodes], self._last[nodes], grows, self._num_times)

    @property
    def matrix(self) -> FloatArray:
        """The weights that have been added, shape [D, N]."""
        return np.array(self.weights).reshape(len(self.weights), len(self.usage))

    @cached_property
    def everywhere(self) -> FloatArray:
        """Weight of each node's usage, shape [N], for equal prices at all times."""
        return self._weights(np.arange(self._num_times))

    def add(self, uses: FloatArray) -> None:
        """Add the weights that see most of a choice's peak, if they are new.

        They are those of the worst time, or of all times that correspond to it.

        Args:
            uses: usage of each node, shape [N].
        """
        time = int(self.over_time(uses).argmax())
        alone = np.array([time], dtype=np.intp)
        options = [self._weights(times) for times in (alone, self._alike.get(time, alone))]
        heaviest = max(options, key=lambda weights: float(weights @ uses))
        if not any(np.array_equal(heaviest, known) for known in self.weights):
            self.weights.append(heaviest)

    def _weights(self, times: IntArray) -> FloatArray:
        """Weight of each node's usage, shape [N], for equal prices that add up to one."""
        shares = np.bincount(times, minlength=self._num_times) / len(times)
        paid = np.concatenate([[0.0], np.cumsum(shares)])
        weights: FloatArray = paid[self._last] - paid[self._first]
        for places in self._places:
            weights[places[:-1]] = weights[places[:-1]].min(axis=0)
        return np.maximum(weights, 0.0)
