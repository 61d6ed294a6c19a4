"""Checks reshardings of a plan: their steps, their prices and how often they run."""

from collections.abc import Hashable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import isclose, prod
from typing import NamedTuple

from autoshard.constraints import PlanConstraints
from autoshard.constraints.nontrivial_axes import NontrivialAxes
from autoshard.costs import GATHERED_ONCE, Frequency, StepCommunication
from autoshard.graph import DType, Tensor
from autoshard.graph.gradients import Gradient
from autoshard.layouts import STEPS, Action, Charge, Layout, Step, is_padded, parse_type
from autoshard.mesh import Mesh
from autoshard.plan.stage import PlannedStep, Resharding
from autoshard.pricing.prices import communication_of

TOLERANCE = 1e-6
"""Maximum relative difference between stated and computed seconds: sums of the same seconds in
another order differ by their rounding."""


class ReshardedValue(NamedTuple):
    """A value that is resharded, with what its tensor, gradient and charges allow.

    Attributes:
        tensor: the value.
        gradient: its gradient.
        fixed_dims: dims that must not be resharded.
        charge: what is charged of its collectives.
        of_parameter: True if it is a parameter as it is stored.
        reduced: element type in which its gradient is reduced.
    """

    tensor: Tensor
    gradient: Gradient
    fixed_dims: AbstractSet[int]
    charge: Charge
    of_parameter: bool
    reduced: DType


@dataclass(frozen=True, slots=True)
class CheckedResharding:
    """The result of checking one resharding.

    Attributes:
        source: layout before its first step.
        findings: errors in its steps.
        is_sound: True if its memory can be computed.
        communication: its seconds.
    """

    source: Layout
    findings: tuple[str, ...]
    is_sound: bool
    communication: StepCommunication[float]


class ReshardingCheck:
    """Checks the steps of reshardings and their stated costs; equal reshardings once.

    Args:
        mesh: the devices.
        constraints: the constraints of the plan, which may forbid collectives.
        micro_batches: number of micro-batches of a training step.
    """

    def __init__(self, mesh: Mesh, constraints: PlanConstraints, micro_batches: int) -> None:
        self._mesh = mesh
        self._num = micro_batches
        self._axes = NontrivialAxes.of(mesh)
        self._constraints = constraints
        self._checked: dict[Hashable, CheckedResharding] = {}

    def check(self, resharding: Resharding, value: ReshardedValue) -> CheckedResharding:
        """Check one resharding of a value."""
        forbidden = self._constraints.forbidden(resharding.value)
        chain = resharding.source, resharding.target, resharding.steps
        key = (value, forbidden, *chain, resharding.frequency)
        if key not in self._checked:
            self._checked[key] = self._check(resharding, value)
        return self._checked[key]

    def _check(self, resharding: Resharding, value: ReshardedValue) -> CheckedResharding:
        source = Layout.parse(resharding.source)
        findings: list[str] = []
        path: list[Step] = []
        end = source
        is_sound = True
        for stated in resharding.steps:
            try:
                step, after = self._follow(stated, end, value.tensor, value.reduced)
            except ValueError as error:
                findings.append(str(error))
                is_sound = False
                break
            findings += self._step_findings(stated, step, end, value.gradient, resharding.value)
            if {step.source.dim, step.target.dim} & value.fixed_dims:
                findings.append(f"{stated.source} -> {stated.target} moves rows of experts")
            path.append(step)
            end = after
        communication, times = communication_of(
            path,
            self._mesh,
            charge=value.charge,
            of_parameter=value.of_parameter,
            micro_batches=self._num,
            frequency=resharding.frequency,
            contention=self._mesh.topology.device.contention,
        )
        if not is_sound:
            return CheckedResharding(source, tuple(findings), False, communication)
        for stated, seconds in zip(resharding.steps, times, strict=True):
            if not isclose(seconds, stated.time, rel_tol=TOLERANCE):
                findings.append(f"a step takes {seconds} s, not {stated.time}")
        findings += self._frequency_findings(resharding, path, of_parameter=value.of_parameter)
        if str(end) != resharding.target:
            findings.append(f"it ends in {end}, not {resharding.target}")
        return CheckedResharding(source, tuple(findings), True, communication)

    def _frequency_findings(
        self, resharding: Resharding, path: Sequence[Step], *, of_parameter: bool
    ) -> Iterator[str]:
        """Only reshardings of parameters that are in a bucket can run once per training step."""
        if resharding.frequency is Frequency.MICRO_BATCH:
            return
        gathered = resharding.frequency in GATHERED_ONCE
        gathers = any(step.forward is not Action.NOTHING for step in path)
        in_bucket = of_parameter and all(step.is_bucketable for step in path)
        fits = in_bucket and (not gathered or (gathers and not resharding.regather))
        if self._num == 1 or not fits:
            yield f"it runs {resharding.frequency.value!r}, which is for gathers of parameters"

    def _follow(
        self, stated: PlannedStep, layout: Layout, tensor: Tensor, reduced: DType
    ) -> tuple[Step, Layout]:
        """A stated step with the bytes computed from the layout before it, and the layout after it.

        Raises:
            ValueError: the axis, a type or an action does not exist, or the layout after the step
                is illegal for the tensor.
        """
        axes = tuple(map(self._mesh.axis_names.index, stated.axes))
        if len(axes) > 1 and axes not in self._mesh.axis_groups:
            raise ValueError(f"the axes {stated.axis} do not communicate as one group")
        source, target = parse_type(stated.source), parse_type(stated.target)
        after = layout.replace_all(axes, target)
        sizes = self._mesh.axis_sizes
        before, behind = (x.local_shape(tensor.shape, sizes) for x in (layout, after))
        # From the layouts on both sides, not from the planner's table of steps: a mistake there
        # must not be made twice.
        elements, num_ranks = prod(before), prod(sizes[axis] for axis in axes)
        # Uneven slices are padded to the largest one.
        if target.is_shard and source.is_shard:
            elements = elements // before[target.dim] * behind[target.dim] * num_ranks
        elif target.is_shard or source.is_shard:
            elements = prod(behind if target.is_shard else before) * num_ranks
        actions = Action(stated.forward), Action(stated.backward)
        padded = is_padded(source, target, tensor.shape, num_ranks)
        nbytes = elements * tensor.dtype.itemsize
        gradient = None if reduced is tensor.dtype else elements * reduced.itemsize
        return Step(axes, source, target, nbytes, *actions, padded, gradient), after

    def _step_findings(
        self, stated: PlannedStep, step: Step, before: Layout, gradient: Gradient, value: str
    ) -> Iterator[str]:
        found = before.types[step.axes[0]]
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
        if stated.gradient_nbytes != step.gradient_nbytes:
            yield (
                f"a step moves {step.gradient_nbytes} bytes of gradients, "
                f"not {stated.gradient_nbytes}"
            )
        for action in (step.forward, step.backward):
            for label in self._constraints.forbidding(action, self._axes, step.axes, value):
                yield f"a step runs {action} on {stated.axis} against the {label}"
