"""Strategies that are likely to be good under a memory budget.

Where strategies are many, a problem that counts memory is large. Without its choices of what
is held and what runs again, it is a few times smaller, and what is good there at some prices
of memory is mostly what is good in the whole of it. Nothing is decided by it: the answer is
proven against all strategies.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from autoshard.arrays import BoolArray, FloatArray
from autoshard.planner.formulation.formulation import Formulation
from autoshard.planner.formulation.variables import Role
from autoshard.planner.memory_budget.saved_tensors import Retention
from autoshard.solve import Node, Problem, WarmStart

_ELASTICITIES = (0.4, 3.0)
"""Prices of all the memory there is that are tried, in terms of the price of a step."""
_WIDTH = 12
"""Strategies of a choice that are taken for the sake of one price."""


def likely_strategies(
    plain: Formulation,
    first: WarmStart,
    solve: Callable[[Problem, WarmStart], object],
    *,
    price: float,
    budget: int,
) -> list[BoolArray] | None:
    """Strategies of each variable of a formulation that are good at some prices of memory.

    Args:
        plain: the formulation, in training.
        first: left by solving its problem without a limit.
        solve: solves a problem without a limit.
        price: of a step without a limit.
        budget: bytes per device.

    Returns:
        shape [S] for each variable; None where strategies are too few to be worth it.
    """
    if not first.strategy_bounds:
        return None
    masks = [_cheapest(bounds) for bounds in first.strategy_bounds]
    held = _held(plain)
    for elasticity in _ELASTICITIES:
        warm_start = WarmStart()
        solve(_priced(plain.problem, held, elasticity * price / budget), warm_start)
        if warm_start.strategy_bounds:
            more = map(_cheapest, warm_start.strategy_bounds)
            masks = [mask | new for mask, new in zip(masks, more, strict=True)]
    return masks


def reached_strategies(problem: Problem, kept: Mapping[int, BoolArray]) -> list[BoolArray]:
    """Strategies of all nodes that have a finite price next to some strategies of some nodes.

    Args:
        problem: the problem.
        kept: the strategies of those nodes, shape [S] each.

    Returns:
        shape [S] for each node; of those nodes, what was given.
    """
    known: dict[bytes, BoolArray] = {}
    kept = {v: known.setdefault(mask.tobytes(), mask) for v, mask in kept.items()}
    chosen = [np.ones(node.num_strategies, dtype=np.bool_) for node in problem.nodes]
    reached: dict[tuple[int, ...], BoolArray] = {}
    for edge in problem.edges:
        ends = (edge.source, edge.rows, edge.cost), (edge.target, edge.cols, edge.cost.T)
        for (near, rows, prices), (far, cols, _) in (ends, ends[::-1]):
            if near not in kept or far in kept:
                continue
            key = (id(edge.prices), id(rows), id(cols), id(kept[near]))
            if key not in reached:
                finite = np.isfinite(prices[np.unique(rows[kept[near]])])
                reached[key] = np.logical_or.reduce(finite, axis=0)[cols]
            chosen[far] = chosen[far] & reached[key]
    return [kept.get(v, mask) for v, mask in enumerate(chosen)]


def _held(plain: Formulation) -> list[FloatArray]:
    """Bytes of each variable's strategies that are held for backward, as made; shape [S] each."""
    retention = Retention(
        plain.graph, plain.gradients, plain.blocks, checkpoints=False, negligible=0.0
    )
    known: dict[tuple[int, bool], FloatArray] = {}
    held = []
    for variable in plain.variables:
        values: tuple[str, ...] = ()
        if variable.role is Role.OPERATOR:
            number = plain.graph.numbers[variable.name]
            values = () if retention.looks[number] else plain.graph.nodes[number].outputs
        wanted = not retention.wanted.isdisjoint(values)
        key = (id(variable.strategies), wanted)
        if key not in known:
            made = (
                plain.local_bytes(value, (s.outputs[i] for s in variable.strategies))
                for i, value in enumerate(values)
            )
            counted = made if wanted else variable.usage.values()
            known[key] = sum(counted, np.zeros(len(variable.strategies)))
        held.append(known[key])
    return held


def _priced(problem: Problem, held: Sequence[FloatArray], price: float) -> Problem:
    """The problem with a price on what is held, instead of its usage."""
    known: dict[tuple[int, int], Node] = {}
    nodes = []
    for node, nbytes in zip(problem.nodes, held, strict=True):
        key = (id(node.cost), id(nbytes))
        if key not in known:
            known[key] = Node(node.cost + price * nbytes, np.zeros_like(nbytes))
        nodes.append(known[key])
    return replace(problem, nodes=tuple(nodes))


def _cheapest(bounds: FloatArray) -> BoolArray:
    mask = np.zeros(len(bounds), dtype=np.bool_)
    mask[np.argsort(bounds, kind="stable")[:_WIDTH]] = True
    return mask
