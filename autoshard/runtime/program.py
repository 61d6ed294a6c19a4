"""A planned stage as a program on local tensors: no DTensor, nothing decided while it runs."""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from autoshard.errors import PlanError
from autoshard.graph import graph_from_json
from autoshard.plan import Stage
from autoshard.runtime.compiler import Compiler
from autoshard.runtime.instructions import execute, mark_last_reads
from autoshard.runtime.kernels import draws_random_numbers
from autoshard.runtime.local_node import MeshRanks, Place


class LocalProgram:
    """What one rank runs for a stage.

    Args:
        stage: of a plan; carries its program.
        mesh: the stage's devices, with the stage's axes.
        seed: of random operators such as dropout; must be the same on all ranks.
        custom_operators: `namespace::name`, or a namespace, of operators that the program may
            call though they are not of ATen.
        bucketed: whether reshardings of parameters share collectives and run beside other work,
            as the plan counts them; if not, each runs by itself where it is first read.

    Raises:
        PlanError: the mesh is not the stage's, the stage contradicts itself, or it calls
            an operator that may not be called.

    Attributes:
        graph: the program that is run.
        instructions: what runs, in order.
        is_random: whether it draws random numbers.
        place: where on the mesh this rank is.
    """

    def __init__(
        self,
        stage: Stage,
        mesh: DeviceMesh,
        *,
        seed: int = 0,
        custom_operators: Collection[str] = (),
        bucketed: bool = True,
    ) -> None:
        self.graph = graph_from_json(stage.program)
        self.is_random = any(draws_random_numbers(node) for node in self.graph.nodes)
        self.place = _place(stage, mesh, seed)
        custom = frozenset(
            node.operator for node in self.graph.nodes if _may_call(node.operator, custom_operators)
        )
        compiler = Compiler(stage, self.graph, mesh, self.place, custom=custom, bucketed=bucketed)
        compiler.compile()
        self.instructions = tuple(compiler.instructions)
        self._outputs = tuple(compiler.output_slots)
        outputs = {slot for slot in self._outputs if slot is not None}
        self._entering = mark_last_reads(self.instructions, outputs)

    def __call__(self, inputs: Iterable[torch.Tensor], *, step: int = 0) -> tuple[Any, ...]:
        """Run on this rank's tensors.

        Args:
            inputs: this rank's slices of `stage.inputs`, in order. What an iterator gives and
                nobody else holds is freed after its last use.
            step: number of the training step. Random numbers follow from it and the seed,
                so that recomputing a step draws the same ones.

        Returns:
            One entry per output of the graph: this rank's slice, or the literal.
        """
        registers = {slot: tensor for slot, tensor in enumerate(inputs) if slot in self._entering}
        execute(self.instructions, registers, step)
        return tuple(
            registers[slot] if slot is not None else output.literal
            for slot, output in zip(self._outputs, self.graph.outputs, strict=True)
        )


def _may_call(operator: str, allowed: Collection[str]) -> bool:
    namespace, _, rest = operator.partition(".")
    packet = rest.partition(".")[0]
    return namespace in allowed or f"{namespace}::{packet}" in allowed


def _place(stage: Stage, mesh: DeviceMesh, seed: int) -> Place:
    names, sizes = zip(*stage.axes, strict=True) if stage.axes else ((), ())
    if mesh.mesh_dim_names != names or tuple(mesh.shape) != sizes:
        wanted = ", ".join(f"{name}={size}" for name, size in stage.axes)
        raise PlanError(
            f"the plan is for a mesh with the axes {wanted}; this one has the shape "
            f"{tuple(mesh.shape)} and the axis names {mesh.mesh_dim_names}: make it with "
            f"init_device_mesh({mesh.device_type!r}, {sizes}, mesh_dim_names={names})"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise PlanError("this rank is not part of the device mesh")
    return Place(
        axis_sizes=sizes,
        coordinate=tuple(coordinate),
        device=torch.device(mesh.device_type),
        seed=seed,
        ranks=MeshRanks(mesh),
    )
