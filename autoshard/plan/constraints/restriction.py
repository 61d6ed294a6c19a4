"""What a plan is steered by: options that forbid strategies and collectives.

Steering changes prices only: what it forbids costs infinity. So the problem of a steered
plan has the choices of the free one, and its certificate means the same. Planner and
checker ask the same demands, the one of strategies to choose from, the other of what a
plan says.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from autoshard.arrays import BoolArray, FloatArray
from autoshard.errors import OptionError
from autoshard.graph import Graph
from autoshard.layouts import Action, Pricer
from autoshard.mesh import Mesh
from autoshard.ops import Strategy, call_of, is_view, rule_for
from autoshard.plan.active_axes import ActiveAxes
from autoshard.plan.constraints.batch import batch_demands
from autoshard.plan.constraints.demands import Demand, ShareDemand, can_share
from autoshard.plan.constraints.megatron import MEGATRON_FORBIDS, megatron_demands
from autoshard.plan.constraints.pins import Place, pin_demands
from autoshard.plan.options import PlanOptions

_Priced = tuple[tuple[Strategy, ...], FloatArray, FloatArray]
"""Strategies and prices, kept so that their ids stay theirs, and the steered prices."""


@dataclass(frozen=True, eq=False)
class Restriction:
    """One thing that a user asked for.

    Attributes:
        label: what it is, for messages.
        demands: what it asks of each choice that it is about.
        collectives: what it forbids to run, and on which active axis.
    """

    label: str
    demands: Mapping[Place, Demand] = field(default_factory=dict)
    collectives: frozenset[tuple[str, int]] = frozenset()


class Steering:
    """All restrictions of one plan, and what they leave.

    Args:
        restrictions: what is asked for; all must hold.
    """

    def __init__(self, restrictions: Sequence[Restriction] = ()) -> None:
        self.restrictions = tuple(restrictions)
        self._forbidden = frozenset(c for r in self.restrictions for c in r.collectives)
        self._priced: dict[tuple[object, ...], _Priced] = {}

    @classmethod
    def of(cls, graph: Graph, mesh: Mesh, options: PlanOptions) -> "Steering":
        """What the options ask of a graph on a mesh.

        Raises:
            OptionError: an option names something that is not there, or asks for a layout
                that cannot be.
        """
        return cls(_restrictions(graph, ActiveAxes.of(mesh), options))

    def keeping(self, kept: Collection[Restriction]) -> "Steering":
        """Only some of the restrictions."""
        return Steering([r for r in self.restrictions if r in kept])

    def priced(
        self, place: Place, strategies: tuple[Strategy, ...], prices: FloatArray
    ) -> FloatArray:
        """The prices of a choice's strategies, shape [S], infinite where forbidden.

        Raises:
            OptionError: a restriction alone leaves nothing to choose from.
        """
        asked = [r for r in self.restrictions if place in r.demands]
        prices = self._without_forbidden(strategies, prices)
        if not asked:
            return prices
        # Calls that are alike share their strategies and prices, and keep sharing them.
        key = (id(strategies), id(prices), *(r.demands[place] for r in asked))
        if key not in self._priced:
            mask = np.ones(len(strategies), dtype=np.bool_)
            for restriction in asked:
                alone = self._mask(strategies, restriction.demands[place])
                if not alone.any():
                    raise OptionError(_dead_end(restriction, place, strategies))
                mask &= alone
            self._priced[key] = strategies, prices, np.where(mask, prices, np.inf)
        return self._priced[key][-1]

    def _without_forbidden(
        self, strategies: tuple[Strategy, ...], prices: FloatArray
    ) -> FloatArray:
        """The prices, infinite where a forbidden collective runs inside an operator."""
        if not self._forbidden or not any(strategy.collectives for strategy in strategies):
            return prices
        key = (id(strategies), id(prices))
        if key not in self._priced:
            runs = [
                any((c.operation.action, c.axis) in self._forbidden for c in strategy.collectives)
                for strategy in strategies
            ]
            self._priced[key] = strategies, prices, np.where(runs, np.inf, prices)
        return self._priced[key][-1]

    def pricer(self, axes: ActiveAxes) -> Pricer:
        """Prices of collectives, infinite where forbidden."""
        return _SteeredPricer(axes, self._forbidden) if self._forbidden else axes

    def violated(self, place: Place, strategy: Strategy) -> tuple[str, ...]:
        """Labels of the restrictions that a strategy breaks."""
        return tuple(
            r.label
            for r in self.restrictions
            if place in r.demands and not r.demands[place](strategy)
        )

    def forbidding(self, action: str, axes: ActiveAxes, axis: int) -> tuple[str, ...]:
        """Labels of the restrictions that forbid an action on an axis of the whole mesh."""
        if axis not in axes.axes:
            return ()
        place = (action, axes.axes.index(axis))
        return tuple(r.label for r in self.restrictions if place in r.collectives)

    @staticmethod
    def _mask(strategies: tuple[Strategy, ...], demand: Demand) -> BoolArray:
        return np.array([demand(strategy) for strategy in strategies], dtype=np.bool_)


UNSTEERED = Steering()
"""Nothing is asked for."""


@dataclass(frozen=True)
class _SteeredPricer:
    axes: ActiveAxes
    forbidden: frozenset[tuple[str, int]]

    def collective_time(
        self, action: Action, axis: int, nbytes: int, *, inner: bool = False
    ) -> float:
        if (action, axis) in self.forbidden:
            return float("inf")
        return self.axes.collective_time(action, axis, nbytes, inner=inner)

    def copy_time(self, nbytes: int) -> float:
        return self.axes.copy_time(nbytes)


def _dead_end(restriction: Restriction, place: Place, strategies: Sequence[Strategy]) -> str:
    shown = [str(s) for s in strategies[:8]]
    more = f", and {len(strategies) - len(shown)} more" if len(strategies) > len(shown) else ""
    return (
        f"{restriction.label}: {place[0]} {place[1]!r} cannot do that; over the axes of more "
        f"than one rank it can {'; '.join(shown)}{more}"
    )


def _restrictions(graph: Graph, axes: ActiveAxes, options: PlanOptions) -> list[Restriction]:
    found = [
        Restriction(label, demands) for label, demands in pin_demands(graph, axes, options).items()
    ]
    found.extend(_forbidden(axes, options))
    if options.batch_axis is not None:
        axis = _axis(axes, options.batch_axis, "batch_axis")
        label = f"batch_axis {options.batch_axis!r}"
        found.append(Restriction(label, batch_demands(graph, axes, axis)))
    if options.skip_fully_replicated:
        found.append(Restriction("skip_fully_replicated", _shares(graph, axes)))
    if options.algo == "megatron":
        collectives = frozenset(
            (kind, axis) for kind in MEGATRON_FORBIDS for axis in range(len(axes.sizes))
        )
        demands = megatron_demands(graph, axes, batch_axis=options.batch_axis)
        found.append(Restriction("algo 'megatron'", demands, collectives))
    return found


def _forbidden(axes: ActiveAxes, options: PlanOptions) -> list[Restriction]:
    found = []
    for forbidden in options.forbid:
        which: Sequence[int] = range(len(axes.sizes))
        if forbidden.axis is not None:
            axis = _axis(axes, forbidden.axis, "forbid")
            which = [axis] if axis is not None else []
        collectives = frozenset((forbidden.kind, axis) for axis in which)
        found.append(Restriction(f"forbidden {forbidden}", collectives=collectives))
    return found


def _axis(axes: ActiveAxes, name: str, option: str) -> int | None:
    """Number of an axis among the active ones; None where it has one rank."""
    names = axes.mesh.axis_names
    if name not in names:
        raise OptionError(f"{option} names axis {name!r}, but the mesh has {', '.join(names)}")
    whole = names.index(name)
    return axes.axes.index(whole) if whole in axes.axes else None


def _shares(graph: Graph, axes: ActiveAxes) -> dict[Place, Demand]:
    demands: dict[Place, Demand] = {}
    for node in graph.nodes:
        outputs = [graph.values[value] for value in node.outputs]
        if is_view(node.operator) or not node.inputs or all(t.numel <= 1 for t in outputs):
            continue
        rule = rule_for(call_of(graph, node))
        if can_share(rule, axes.sizes):
            demands["operator", node.name] = ShareDemand(prod(rule.sizes.values()))
    return demands
