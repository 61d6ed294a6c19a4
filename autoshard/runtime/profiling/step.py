"""A step of a plan that needs nothing but the plan."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from autoshard.graph import Graph
from autoshard.layouts import Layout
from autoshard.plan import PlacedInput, Plan
from autoshard.plan.memory.schedule import Phase
from autoshard.runtime.profiling.optimizers import local_optimizer
from autoshard.runtime.profiling.probe import Part, Probe
from autoshard.runtime.program import LocalProgram


class MadeUpStep:
    """One step of a plan on this rank, on made-up tensors.

    Parameters and inputs are random numbers; so are ids that choose rows of a table, for which
    all ranks draw the same; other indices and labels are zero.

    Args:
        plan: carries its program.
        mesh: with the axes of the plan.
        bucketed: as `LocalProgram` takes it.
        custom_operators: `namespace::name`, or a namespace, of operators that the plan may call
            though they are not of ATen.

    Raises:
        PlanError: the plan calls an operator that may not be called.

    Attributes:
        program: what runs.
    """

    def __init__(
        self,
        plan: Plan,
        mesh: DeviceMesh,
        *,
        bucketed: bool = True,
        custom_operators: Collection[str] = (),
    ) -> None:
        (stage,) = plan.stages
        self.program = LocalProgram(
            stage, mesh, bucketed=bucketed, custom_operators=custom_operators
        )
        self._training = plan.options.mode == "training"
        graph = self.program.graph
        self._tables = rows_to_choose_from(graph)
        self._ids = torch.Generator().manual_seed(0)
        self._inputs = [self._made_up(placed, graph) for placed in stage.inputs]
        trained = [
            tensor
            for placed, tensor in zip(stage.inputs, self._inputs, strict=True)
            if placed.kind == "parameter" and tensor.requires_grad
        ]
        self._optimizer = local_optimizer(plan.options.optimizer, trained)
        self._number = 0

    def __call__(self, probe: Probe | None = None) -> None:
        """Run forward, backward and the optimizer, the last of them measured by a probe."""
        with torch.set_grad_enabled(self._training):
            outputs = self.program(self._inputs, step=self._number)
        self._number += 1
        if not self._training:
            return
        self._backward(outputs)
        if self._optimizer is None:
            return
        if probe is None:
            self._optimizer.step()
        else:
            with probe.measured(Part(Phase.OPTIMIZER, "optimizer", "parameters")):
                self._optimizer.step()
        self._optimizer.zero_grad()

    def _backward(self, outputs: Sequence[Any]) -> None:
        """From the scalar outputs that require a gradient, or from all that do."""
        found = [x for x in outputs if isinstance(x, torch.Tensor) and x.requires_grad]
        entries = [x for x in found if x.dim() == 0] or found
        torch.autograd.backward(entries, [torch.ones_like(x) for x in entries])

    def _made_up(self, placed: PlacedInput, graph: Graph) -> torch.Tensor:
        place, tensor = self.program.place, graph.values[placed.name]
        slices = Layout.parse(placed.layout).local_slices(
            tensor.shape, place.axis_sizes, place.coordinate
        )
        shape = [sum(part.stop - part.start for part in parts) for parts in slices]
        dtype: torch.dtype = getattr(torch, placed.dtype)
        if placed.name in self._tables:
            # The whole is drawn, so that ranks with the same slice have the same ids.
            seeded = torch.Generator().manual_seed(len(shape))
            whole = torch.randint(self._tables[placed.name], tensor.shape, generator=seeded)
            for dim, parts in enumerate(slices):
                whole = torch.cat(
                    [whole.narrow(dim, p.start, p.stop - p.start) for p in parts], dim
                )
            return whole.to(place.device, dtype)
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype, device=place.device)
        # Variances among the buffers have to be positive.
        made = torch.rand(shape, device=place.device).mul_(0.02).add_(0.01).to(dtype)
        return made.requires_grad_(self._training and tensor.requires_grad)


def rows_to_choose_from(graph: Graph) -> Mapping[str, int]:
    """Inputs that are ids of rows, with the rows of the smallest table that they choose from."""
    entering = {given.name for given in graph.inputs}
    found: dict[str, int] = {}
    for node in graph.nodes:
        if node.operator == "aten.embedding.default":
            table, ids = node.inputs
            rows = graph.values[table].shape[0]
            if ids in entering and rows:
                found[ids] = min(rows, found.get(ids, rows))
    return found
