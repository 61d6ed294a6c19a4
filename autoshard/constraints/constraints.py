"""Constraints on a plan: allowed strategies of each variable, and forbidden collectives.

The constrained problem has the same variables as the free one with fewer strategies, and its
certificate has the same meaning. The planner and the checker evaluate the same constraint objects.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.base.arrays import FloatArray
from autoshard.constraints.nontrivial_axes import NontrivialAxes
from autoshard.errors import OptionError
from autoshard.layouts import Action, AxisType, Pricer
from autoshard.ops import AxisRule, OperatorRule, Strategy, axis_rules

ChoiceId = tuple[str, str]
"""Role (input, operator, shared, output) and name of a variable, see `Variable`."""

Dim = tuple[int, int]
"""Index of a tensor of a call, inputs before outputs, and one of its dims."""

Collective = tuple[str, int]
"""A collective, and the index of a non-trivial axis."""

StrategyConstraint = Callable[[Strategy], bool]
"""Predicate of strategies over the non-trivial axes; hashable, and equal ones are run once."""


@dataclass(frozen=True, slots=True)
class ShardingConstraint:
    """A constraint on the dims that each axis shards.

    Attributes:
        allowed: for each axis, the dims that it may shard; None if it may shard any.
        required: for each axis, dims of which it must shard at least one; may be empty.
    """

    allowed: tuple[frozenset[Dim] | None, ...]
    required: tuple[frozenset[Dim], ...]

    def __call__(self, strategy: Strategy) -> bool:
        """True if every axis shards a required dim and no dim that is not allowed."""
        tensors = (*strategy.inputs, *strategy.outputs)
        return all(
            self._allows(axis, (layout.types[axis] for layout in tensors))
            for axis in range(len(self.allowed))
        )

    def with_axis(
        self, axis: int, allowed: frozenset[Dim] | None, required: frozenset[Dim]
    ) -> "ShardingConstraint":
        """This constraint with other dims for one axis."""
        may, must = list(self.allowed), list(self.required)
        may[axis], must[axis] = allowed, required
        return ShardingConstraint(tuple(may), tuple(must))

    def allows(self, axis: int, option: AxisRule) -> bool:
        """True if strategies may have an option of an axis."""
        return self._allows(axis, (*option.inputs, *option.outputs))

    def _allows(self, axis: int, types: Iterable[AxisType]) -> bool:
        """True if an axis may have these types of the tensors."""
        allowed, required = self.allowed[axis], self.required[axis]
        sharded = {(i, t.dim) for i, t in enumerate(types) if t.is_shard}
        if allowed is not None and not sharded <= allowed:
            return False
        return not required or not sharded.isdisjoint(required)


def shard_any(rule: OperatorRule, num_ranks: int, dims: frozenset[Dim]) -> OperatorRule | None:
    """The rule of the operator on one rank if an axis shards one of these dims; None if it cannot.

    Args:
        rule: the operator's rule.
        num_ranks: size of the axis.
        dims: dims of the operator's tensors.
    """
    for option in axis_rules(rule, num_ranks):
        types = (*option.inputs, *option.outputs)
        if option.letter and any(types[i].is_shard and types[i].dim == d for i, d in dims):
            return rule.sharded(option.letter, num_ranks)
    return None


@dataclass(frozen=True, eq=False)
class Constraint:
    """One constraint that the user set.

    Attributes:
        label: its name in messages.
        strategies: the constraint on the strategy of each variable that it concerns.
        collectives: forbidden collectives, each with the index of a non-trivial axis.
        inside: further collectives that are forbidden inside operators.
        values: further collectives, by value, that are forbidden in the reshardings of the value.
    """

    label: str
    strategies: Mapping[ChoiceId, StrategyConstraint] = field(default_factory=dict)
    collectives: frozenset[Collective] = frozenset()
    inside: frozenset[Collective] = frozenset()
    values: Mapping[str, frozenset[Collective]] = field(default_factory=dict)


class PlanConstraints:
    """All constraints of one plan.

    Args:
        constraints: the constraints; a plan must satisfy all of them.
    """

    def __init__(self, constraints: Sequence[Constraint] = ()) -> None:
        self.constraints = tuple(constraints)
        self._forbidden = frozenset(c for x in self.constraints for c in x.collectives)
        self._inside = self._forbidden.union(*(x.inside for x in self.constraints))
        self._forbidden_of: dict[str, frozenset[Collective]] = {}
        # Strategies and costs are stored with the result, so that their ids are not reused.
        self._applied: dict[
            tuple[object, ...], tuple[tuple[Strategy, ...], FloatArray, FloatArray]
        ] = {}

    def only(self, kept: Collection[Constraint]) -> "PlanConstraints":
        """A subset of the constraints."""
        return PlanConstraints([c for c in self.constraints if c in kept])

    def apply(
        self, choice: ChoiceId, strategies: tuple[Strategy, ...], costs: FloatArray
    ) -> FloatArray:
        """The costs of a variable's strategies, shape [S], with infinity for forbidden ones.

        Identical arguments give the same array, so that variables still share their costs.

        Raises:
            OptionError: a single constraint forbids all strategies.
        """
        concerned = [c for c in self.constraints if choice in c.strategies]
        communicates = self._inside and any(s.collectives for s in strategies)
        if not concerned and not communicates:
            return costs
        key = (id(strategies), id(costs), *(c.strategies[choice] for c in concerned))
        if key not in self._applied:
            allowed = np.array([not self._runs_forbidden(s) for s in strategies], dtype=np.bool_)
            for constraint in concerned:
                alone = [constraint.strategies[choice](strategy) for strategy in strategies]
                if not any(alone):
                    raise OptionError(_nothing_allowed(constraint, choice, strategies))
                allowed &= alone
            self._applied[key] = strategies, costs, np.where(allowed, costs, np.inf)
        return self._applied[key][-1]

    def of(self, choice: ChoiceId) -> tuple[StrategyConstraint, ...]:
        """The constraints on the strategy of a variable."""
        return tuple(c.strategies[choice] for c in self.constraints if choice in c.strategies)

    def forbidden(self, value: str) -> frozenset[Collective]:
        """The collectives that may not run in reshardings of a value."""
        if value not in self._forbidden_of:
            found = (c.values[value] for c in self.constraints if value in c.values)
            forbidden = self._forbidden.union(*found)
            self._forbidden_of[value] = forbidden
        return self._forbidden_of[value]

    def pricer(self, axes: NontrivialAxes, forbidden: frozenset[Collective]) -> Pricer:
        """A pricer for which these collectives cost infinity."""
        return _ConstrainedPricer(axes, forbidden) if forbidden else axes

    def violated(self, choice: ChoiceId, strategy: Strategy) -> tuple[str, ...]:
        """Labels of the constraints that a strategy violates."""
        return tuple(
            c.label
            for c in self.constraints
            if choice in c.strategies and not c.strategies[choice](strategy)
        )

    def forbidding(
        self, action: str, axes: NontrivialAxes, group: Sequence[int], value: str | None = None
    ) -> tuple[str, ...]:
        """Labels of the constraints that forbid an action on axes of the whole mesh.

        Args:
            action: the action.
            axes: the mesh.
            group: indices of axes of the whole mesh.
            value: the resharded value; None for a collective inside an operator.
        """
        collectives = {(action, axes.axes.index(axis)) for axis in group if axis in axes.axes}
        return tuple(
            c.label
            for c in self.constraints
            if collectives & {*c.collectives}
            or collectives & {*(c.inside if value is None else c.values.get(value, ()))}
        )

    def _runs_forbidden(self, strategy: Strategy) -> bool:
        return any((c.operation.action, c.axis) in self._inside for c in strategy.collectives)


UNCONSTRAINED = PlanConstraints()


@dataclass(frozen=True)
class _ConstrainedPricer:
    axes: NontrivialAxes
    forbidden: frozenset[Collective]

    def collective_time(
        self, action: Action, axis: int | tuple[int, ...], nbytes: int, *, inner: bool = False
    ) -> float:
        axes = (axis,) if isinstance(axis, int) else axis
        if any((action, a) in self.forbidden for a in axes):
            return float("inf")
        return self.axes.collective_time(action, axis, nbytes, inner=inner)

    def copy_time(self, nbytes: int) -> float:
        return self.axes.copy_time(nbytes)


def _nothing_allowed(
    constraint: Constraint, choice: ChoiceId, strategies: Sequence[Strategy]
) -> str:
    shown = [str(s) for s in strategies[:8]]
    more = f", and {len(strategies) - len(shown)} more" if len(strategies) > len(shown) else ""
    return (
        f"{constraint.label}: {choice[0]} {choice[1]!r} has no such strategy; over the axes of "
        f"more than one rank its strategies are {'; '.join(shown)}{more}"
    )
