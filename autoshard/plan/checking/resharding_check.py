"""The checker's view of one resharding: are its steps legal, and do they cost what they say?"""

from collections.abc import Hashable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import isclose, prod

from autoshard.costs import Passes
from autoshard.graph import Tensor
from autoshard.layouts import (
    STEPS,
    Action,
    Layout,
    Step,
    again_price,
    is_padded,
    parse_type,
    step_price,
)
from autoshard.mesh import Mesh
from autoshard.plan.constraints import PlanConstraints
from autoshard.plan.document import PlannedStep, Resharding
from autoshard.plan.gradients import Gradient
from autoshard.plan.nontrivial_axes import NontrivialAxes

TOLERANCE = 1e-6
"""Relative difference that stated seconds may have from those found."""


@dataclass(frozen=True, slots=True)
class CheckedResharding:
    """A resharding looked at by itself.

    Attributes:
        source: where it starts.
        findings: what is wrong with its steps.
        is_sound: whether its steps can be followed at all.
        passes: seconds that it takes forward and backward.
    """

    source: Layout
    findings: tuple[str, ...]
    is_sound: bool
    passes: Passes[float]


class ReshardingCheck:
    """Looks at reshardings by themselves, at those that are alike once.

    Args:
        mesh: the devices.
        constraints: what is forbidden.
    """

    def __init__(self, mesh: Mesh, constraints: PlanConstraints) -> None:
        self._mesh = mesh
        self._axes = NontrivialAxes.of(mesh)
        self._constraints = constraints
        self._checked: dict[Hashable, CheckedResharding] = {}

    def of(
        self,
        resharding: Resharding,
        tensor: Tensor,
        gradient: Gradient,
        *,
        still: AbstractSet[int] = frozenset(),
        carried: float = 1.0,
    ) -> CheckedResharding:
        """A resharding of a tensor that backward meets in some way.

        Args:
            resharding: as the plan says it.
            tensor: what is resharded.
            gradient: how backward meets it.
            still: dims whose slices stay where they are.
            carried: how many times its own bytes the collectives carry that it can share.
        """
        what = tensor, gradient, still, carried
        key = (*what, resharding.source, resharding.target, resharding.steps)
        if key not in self._checked:
            self._checked[key] = self._check(resharding, *what)
        return self._checked[key]

    def _check(
        self,
        resharding: Resharding,
        tensor: Tensor,
        gradient: Gradient,
        still: AbstractSet[int],
        carried: float,
    ) -> CheckedResharding:
        source = Layout.parse(resharding.source)
        findings, end, forward, both = [], source, 0.0, 0.0
        for stated in resharding.steps:
            try:
                step, after = self._followed(stated, end, tensor)
            except ValueError as error:
                findings.append(str(error))
                return CheckedResharding(source, tuple(findings), False, Passes(0.0, 0.0))
            findings += self._step_findings(stated, step, end, gradient)
            findings += self._price_findings(stated, step, carried)
            if {step.source.dim, step.target.dim} & still:
                findings.append(f"{stated.source} -> {stated.target} moves rows of experts")
            forward += again_price(step, self._mesh, carried)
            both += step_price(step, self._mesh, carried)
            end = after
        if str(end) != resharding.target:
            findings.append(f"it ends in {end}, not {resharding.target}")
        passes = Passes(forward, max(both - forward, 0.0))
        return CheckedResharding(source, tuple(findings), True, passes)

    def _followed(self, stated: PlannedStep, layout: Layout, tensor: Tensor) -> tuple[Step, Layout]:
        """A step on a layout, with the bytes that it really moves, and the layout behind it.

        Raises:
            ValueError: it names no axis, type or action, or makes no layout of this tensor.
        """
        axis = self._mesh.axis_names.index(stated.axis)
        source, target = parse_type(stated.source), parse_type(stated.target)
        after = layout.replace(axis, target)
        sizes = self._mesh.axis_sizes
        before, behind = (x.local_shape(tensor.shape, sizes) for x in (layout, after))
        elements = prod(before)
        # Each rank sends or receives as many slices as there are, all as long as the largest.
        if target.is_shard and source.is_shard:
            elements = elements // before[target.dim] * behind[target.dim] * sizes[axis]
        elif target.is_shard or source.is_shard:
            elements = prod(behind if target.is_shard else before) * sizes[axis]
        actions = Action(stated.forward), Action(stated.backward)
        padded = is_padded(source, target, tensor.shape, sizes[axis])
        nbytes = elements * tensor.dtype.itemsize
        return Step(axis, source, target, nbytes, *actions, padded), after

    def _step_findings(
        self, stated: PlannedStep, step: Step, before: Layout, gradient: Gradient
    ) -> Iterator[str]:
        found = before.types[step.axis]
        if step.source != found:
            yield f"a step on {stated.axis} starts from {step.source}, not {found}"
        actions = STEPS.get((step.source.kind, step.target.kind))
        if actions is None:
            yield f"there is no step from {step.source} to {step.target}"
            return
        backward = actions[1] if gradient is Gradient.FLOWS else Action.NOTHING
        if (step.forward, step.backward) != (actions[0], backward):
            yield (
                f"{step.source} -> {step.target} runs {actions[0]} and {backward}, not as stated"
            )
        if stated.nbytes != step.nbytes:
            yield f"a step moves {step.nbytes} bytes, not {stated.nbytes}"
        for action in (step.forward, step.backward):
            for label in self._constraints.forbidding(action, self._axes, step.axis):
                yield f"a step runs {action} on {stated.axis} against the {label}"

    def _price_findings(self, stated: PlannedStep, step: Step, carried: float) -> Iterator[str]:
        time = step_price(step, self._mesh, carried)
        if not isclose(time, stated.time, rel_tol=TOLERANCE):
            yield f"a step takes {time} s, not {stated.time}"
