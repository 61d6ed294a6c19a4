"""The memory that the state of a program needs at least, known before any problem is built.

Each device holds its share of all parameters, gradients, optimizer state and buffers, however they
are sharded, so the device that holds the most holds at least their sum divided by the devices.
"""

from dataclasses import dataclass

from autoshard.costs import OptimizerSpec, parameter_bytes
from autoshard.graph import Graph, InputKind
from autoshard.mesh import Mesh
from autoshard.plan.options import PlanOptions
from autoshard.plan.pricing import optimizer_of
from autoshard.quantities import format_bytes, unit_hint

_BUFFERS = frozenset({InputKind.BUFFER, InputKind.CONSTANT, InputKind.PREPARED})


@dataclass(frozen=True, slots=True)
class StoredState:
    """Bytes of what all devices together hold during the whole step, each element once.

    Attributes:
        parameters: bytes of parameters.
        gradients: bytes of their gradients.
        optimizer: bytes of the optimizer's state.
        buffers: bytes of buffers and constants.
        num_devices: number of devices.
        budget: memory budget of a device.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    num_devices: int
    budget: int

    @classmethod
    def of(cls, graph: Graph, mesh: Mesh, options: PlanOptions) -> "StoredState":
        """The state of a program under some options.

        Raises:
            OptionError: the optimizer is unknown.
        """
        training, optimizer = options.mode == "training", optimizer_of(options)
        budget = options.memory_budget or mesh.topology.device.memory
        return _summed(graph, optimizer if training else None, mesh.num_devices, budget)

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.parameters + self.gradients + self.optimizer + self.buffers

    @property
    def least_per_device(self) -> int:
        """Bytes of the device that holds the most, at least."""
        return -(-self.total // self.num_devices)

    @property
    def fits(self) -> bool:
        """False if no plan can fit the budget."""
        return self.least_per_device <= self.budget

    @property
    def reason(self) -> str:
        """Why no plan fits, and what to change."""
        parts = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
            "buffers": self.buffers,
        }
        listed = [f"{name} {format_bytes(nbytes)}" for name, nbytes in parts.items() if nbytes]
        hint = unit_hint(self.budget)
        return (
            f"no plan fits the memory budget of {self.budget:,} bytes per device"
            f"{f' ({hint})' if hint else ''}: {', '.join(listed)} are {format_bytes(self.total)}, "
            f"so with {self.num_devices:,} devices one of them holds at least "
            f"{self.least_per_device:,} bytes, without any activations; use at least "
            f"{-(-self.total // self.budget):,} devices, or raise memory_budget"
        )


def _summed(
    graph: Graph, optimizer: OptimizerSpec | None, num_devices: int, budget: int
) -> StoredState:
    parameters = gradients = state = buffers = 0
    for entering in graph.inputs:
        if entering.kind in _BUFFERS:
            buffers += graph.values[entering.name].nbytes
        elif entering.kind is InputKind.PARAMETER:
            tensor = graph.values[entering.name]
            stored = graph.stored_dtype(entering.name)
            held = parameter_bytes(
                tensor.shape, stored, optimizer if tensor.requires_grad else None
            )
            parameters += held.parameter
            gradients += held.gradient
            state += held.optimizer
    return StoredState(parameters, gradients, state, buffers, num_devices, budget)
