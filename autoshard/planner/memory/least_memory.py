"""The memory that a program needs at least, known before any problem is built.

Each device holds its share of all that is in memory at a time, however it is sharded, so the one
that holds the most holds at least the sum divided by the devices. It is counted at the optimizer's
step, when all gradients are there, and where forward turns into backward, with the activations that
no recomputation avoids.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from autoshard.base.quantities import format_bytes, unit_hint
from autoshard.costs import OptimizerSpec, parameter_bytes
from autoshard.graph import Graph, InputKind
from autoshard.mesh import Mesh
from autoshard.plan.options import PlanOptions
from autoshard.planner.memory.least_activations import least_activations
from autoshard.pricing.prices import optimizer_of

_BUFFERS = frozenset({InputKind.BUFFER, InputKind.CONSTANT, InputKind.PREPARED})


class _Part(NamedTuple):
    """Something in memory at one moment, with its bytes on all devices together."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class LeastMemory:
    """Bytes of what all devices together hold, each element once.

    Attributes:
        parameters: bytes of parameters.
        gradients: bytes of their gradients.
        optimizer: bytes of the optimizer's state.
        buffers: bytes of buffers and constants.
        inputs: bytes of the inputs of a micro-batch.
        activations: bytes between forward and backward that no recomputation avoids.
        accumulates: true if gradients are summed over micro-batches, and so held in backward too.
        num_devices: number of devices.
        budget: memory budget of a device.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    inputs: int
    activations: int
    accumulates: bool
    num_devices: int
    budget: int

    @classmethod
    def of(cls, graph: Graph, mesh: Mesh, options: PlanOptions) -> "LeastMemory":
        """The memory of a program under some options.

        Activations are counted if the budget could be too small for all values of the program.

        Raises:
            OptionError: the optimizer is unknown.
        """
        training, optimizer = options.mode == "training", optimizer_of(options)
        budget = options.memory.budget or mesh.topology.device.memory
        least = _stored(graph, optimizer if training else None, mesh.num_devices, budget)
        least = replace(least, accumulates=options.training.micro_batches > 1)
        most = least.total + sum(tensor.nbytes for tensor in graph.values.values())
        if not training or not least.fits or most <= mesh.num_devices * budget:
            return least
        return replace(least, activations=least_activations(graph, options))

    @property
    def _parts(self) -> list[_Part]:
        """The contents of memory at the moment that needs the most."""
        held = [
            _Part("parameters", self.parameters),
            _Part("optimizer state", self.optimizer),
            _Part("buffers", self.buffers),
            _Part("inputs", self.inputs),
        ]
        gradients = _Part("gradients", self.gradients)
        activations = _Part("activations that no recomputation avoids", self.activations)
        if self.accumulates:
            return [*held, gradients, activations]
        return [*held, max(gradients, activations, key=lambda part: part.nbytes)]

    @property
    def stored(self) -> int:
        """Bytes of what is in memory at the optimizer's step, whatever the batch."""
        return self.parameters + self.gradients + self.optimizer + self.buffers

    @property
    def total(self) -> int:
        """Bytes of all that is in memory at the same time."""
        return sum(part.nbytes for part in self._parts)

    @property
    def least_per_device(self) -> int:
        """Bytes of the device that holds the most, at least."""
        return -(-self.total // self.num_devices)

    @property
    def fits(self) -> bool:
        """False if no plan can fit the budget."""
        return self.least_per_device <= self.budget

    @property
    def statement(self) -> str:
        """Parts of the least memory."""
        listed = [f"{name} {format_bytes(nbytes)}" for name, nbytes in self._parts if nbytes]
        without = "" if self.activations else ", without activations"
        return (
            f"{', '.join(listed)} are {format_bytes(self.total)}, so with {self.num_devices:,} "
            f"devices one of them holds at least {self.least_per_device:,} bytes{without}"
        )

    @property
    def reason(self) -> str:
        """The reason why no plan fits, and what to change."""
        hint = unit_hint(self.budget)
        return (
            f"no plan fits the memory budget of {self.budget:,} bytes per device"
            f"{f' ({hint})' if hint else ''}: {self.statement}; "
            f"use at least {-(-self.total // self.budget):,} devices, or raise memory_budget"
        )


def _stored(
    graph: Graph, optimizer: OptimizerSpec | None, num_devices: int, budget: int
) -> LeastMemory:
    """The memory without activations."""
    parameters = gradients = state = buffers = inputs = 0
    for entering in graph.inputs:
        if entering.kind is InputKind.LITERAL:
            continue
        tensor = graph.values[entering.name]
        if entering.kind in _BUFFERS:
            buffers += tensor.nbytes
        elif entering.kind is InputKind.PARAMETER:
            stored = graph.stored_dtype(entering.name)
            held = parameter_bytes(
                tensor.shape, stored, optimizer if tensor.requires_grad else None
            )
            parameters += held.parameter
            gradients += held.gradient
            state += held.optimizer
        else:
            inputs += tensor.nbytes
    return LeastMemory(
        parameters,
        gradients,
        state,
        buffers,
        inputs,
        activations=0,
        accumulates=False,
        num_devices=num_devices,
        budget=budget,
    )
