"""Parameters that several stages hold: their gradients are summed, once per step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from autoshard.errors import PlanError
from autoshard.plan import PlacedInput, Plan
from autoshard.runtime.global_tensors.dtensors import local_tensor
from autoshard.runtime.pipelining.devices import StageDevices
from autoshard.runtime.pipelining.routes import Route, TransferEnd, exchange
from autoshard.runtime.recorder import CONTENTS, not_recorded

_TAG = CONTENTS.index("tied gradient")


class TiedCopies:
    """A parameter with copies on several pipeline ranks.

    Every rank with a copy receives the gradients of the other copies, and adds all of them in the
    order of the stages, so that equal copies stay equal.

    Args:
        placed: the copy of each stage that holds the parameter, by stage, ascending.
        devices: of the stages.

    Attributes:
        names: its names in the state dict.
        stage: number of the first stage that holds it.
    """

    def __init__(self, placed: dict[int, PlacedInput], devices: StageDevices) -> None:
        self.stage, first = next(iter(placed.items()))
        self.names = (first.target, *first.aliases)
        self._device = torch.device(devices.whole.device_type)
        self._group = devices.group
        ends = {
            stage: TransferEnd(devices.ranks[stage], tuple(devices.meshes[stage].shape), one.layout)
            for stage, one in placed.items()
        }
        own = [stage for stage in placed if stage in devices.own_stages]
        self.stages = tuple(placed)
        self._own = own[0] if own else None
        dtype: torch.dtype = getattr(torch, first.dtype)
        self._pairs = [(a, b) for a in placed for b in placed if a != b]
        self._routes = [Route.of(first.shape, dtype, ends[a], ends[b]) for a, b in self._pairs]

    @property
    def is_held(self) -> bool:
        """True if this rank has a copy."""
        return self._own is not None

    @property
    def is_first(self) -> bool:
        """True if this rank has the copy of the first stage."""
        return self._own == self.stage

    def received(self, own: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all copies as this rank's shards, in the order of stages.

        Args:
            own: this rank's shard.
        """
        assert self._own is not None
        given = [own if a == self._own else None for a, _ in self._pairs]
        arrived = exchange(given, self._routes, self._device, self._group, _TAG)
        copies = {self._own: own}
        for (source, target), tensor in zip(self._pairs, arrived, strict=True):
            if target == self._own and tensor is not None:
                copies[source] = tensor
        return [copies[stage] for stage in self.stages]


class TiedParameters:
    """All tied parameters of a model that this rank has copies of.

    Args:
        plan: with several stages.
        devices: of the stages.
        model: the model, whose parameters are DTensors.
    """

    def __init__(self, plan: Plan, devices: StageDevices, model: nn.Module) -> None:
        assert plan.pipeline is not None
        self._model = model
        self.all = [
            TiedCopies(placed, devices)
            for tied in plan.pipeline.tied
            if len(placed := _distinct(plan, tied.target, tied.stages, devices)) > 1
        ]
        self._own = [tied for tied in self.all if tied.is_held]
        self._compared = False

    @contextmanager
    def summing(self) -> Iterator[None]:
        """A context for a step, at whose end the gradients of the step are those of all copies."""
        self._check_equal()
        # Gradients of earlier steps have been summed over the copies already, so they are put aside
        # and added afterwards.
        earlier = {}
        for tied in self._own:
            parameter = self._parameter(tied)
            earlier[tied], parameter.grad = parameter.grad, None
        try:
            yield
            for tied in self._own:
                self._sum(self._parameter(tied), tied)
        finally:
            for tied, gradient in earlier.items():
                _add(self._parameter(tied), gradient)

    @torch.no_grad()
    def _sum(self, parameter: nn.Parameter, tied: TiedCopies) -> None:
        if not parameter.requires_grad:
            return
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        first, *others = tied.received(local_tensor(parameter.grad))
        total = first.clone()
        for other in others:
            total += other
        local_tensor(parameter.grad).copy_(total)

    @torch.no_grad()
    @not_recorded()
    def _check_equal(self) -> None:
        """Check before the first step that all copies are equal.

        Raises:
            PlanError: they are not.
        """
        if self._compared:
            return
        self._compared = True
        for tied in self._own:
            first, *others = tied.received(local_tensor(self._parameter(tied)))
            if any(not torch.equal(first, other) for other in others):
                raise PlanError(
                    f"the copies of parameter {tied.names[0]!r} on stages {list(tied.stages)} "
                    f"differ: load one checkpoint on all ranks, or initialise the model with one "
                    f"seed before the plan is applied"
                )

    def _parameter(self, tied: TiedCopies) -> nn.Parameter:
        return self._model.get_parameter(tied.names[0])

    @property
    def copies(self) -> frozenset[str]:
        """Names of the parameters of which an earlier stage on other ranks has a copy too."""
        return frozenset(name for tied in self._own if not tied.is_first for name in tied.names)


def _add(parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
    if gradient is None:
        return
    if parameter.grad is not None:
        gradient = gradient + parameter.grad
    parameter.grad = gradient


def _distinct(
    plan: Plan, target: str, stages: Sequence[int], devices: StageDevices
) -> dict[int, PlacedInput]:
    """The copies of a parameter by stage, without those of stages on the same ranks as another.

    Raises:
        PlanError: two stages on the same ranks store it differently.
    """
    found: dict[int, PlacedInput] = {}
    for stage in stages:
        placed = next(p for p in plan.stages[stage].parameters if p.target == target)
        same = next((s for s in found if devices.ranks[s] == devices.ranks[stage]), None)
        if same is None:
            found[stage] = placed
        elif (found[same].layout, devices.meshes[same]) != (placed.layout, devices.meshes[stage]):
            raise PlanError(
                f"stages {same} and {stage} have the same devices, but store the parameter "
                f"{target!r} as {found[same].layout} and {placed.layout}; give it one layout"
            )
    return found
