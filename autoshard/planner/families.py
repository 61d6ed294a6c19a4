"""The forms of usual kinds of parallelism: meshes and settings that each is planned with."""

from collections.abc import Iterator
from math import gcd, log2
from typing import NamedTuple

from autoshard.constraints.megatron import DATA_AXIS, EXPERT_AXIS
from autoshard.graph import Graph
from autoshard.graph.experts import GROUPED_MM
from autoshard.mesh import Axis, Mesh
from autoshard.plan.options import Family

WEIGHT_AXIS = "tp"
"""Name of the axis that shards weights in the patterns of Megatron-LM."""


class Form(NamedTuple):
    """A mesh and a setting of a family.

    Attributes:
        mesh: the devices of a request, in the axes of the family.
        distributed: True to shard parameters and optimizer over the data-parallel axes (ZeRO-1).
    """

    mesh: Mesh
    distributed: bool = False

    @property
    def data_sizes(self) -> tuple[int, ...]:
        """Sizes of the axes that shard the batch."""
        return tuple(axis.size for axis in self.mesh.axes if axis.name != WEIGHT_AXIS)


def family_forms(graph: Graph, mesh: Mesh, family: Family) -> tuple[Form, ...]:
    """The forms of a family on the devices of a mesh, those that are usually fast first.

    DDP and FSDP2 have one axis of all devices. HSDP shards over any part of them. Megatron-LM
    shards weights over any part of a node, with and without a distributed optimizer (ZeRO-1); in a
    mixture of experts the other ranks share experts too. A mesh whose prices are given per axis is
    taken as it is.

    Args:
        graph: the program.
        mesh: of the request.
        family: the value of the option `algo`.
    """
    if mesh.collectives is not None:
        return (Form(mesh),)
    return tuple(
        Form(Mesh(tuple(Axis(name, size) for name, size in axes), mesh.topology), distributed)
        for axes, distributed in _forms(graph, mesh, family)
    )


_Axes = tuple[tuple[str, int], ...]


def _forms(graph: Graph, mesh: Mesh, family: Family) -> Iterator[tuple[_Axes, bool]]:
    number = mesh.num_devices
    node = min(mesh.devices_per_node or number, number)
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    if family in {"ddp", "fsdp2"}:
        yield ((DATA_AXIS, number),), False
    elif family == "hsdp":
        for size in sorted(divisors[1:-1], key=lambda size: abs(log2(size / node))):
            yield (("replicate", number // size), ("shard", size)), False
    else:
        experts = num_experts(graph)
        for size in divisors if experts else divisors[1:]:
            if size <= node or node == 1:
                for axes in _megatron_axes(number // size, size, experts):
                    is_replicated = size < number
                    yield from ((axes, True), (axes, False)) if is_replicated else ((axes, False),)


def _megatron_axes(data: int, weights: int, experts: int) -> Iterator[_Axes]:
    """Axes for a number of data-parallel ranks, and of those that shard weights."""
    shared = gcd(data, experts) if experts else 1
    sizes = [((DATA_AXIS, data // shared), (EXPERT_AXIS, shared))] if shared > 1 else []
    for outer in [*sizes, ((DATA_AXIS, data),)]:
        axes = tuple(axis for axis in (*outer, (WEIGHT_AXIS, weights)) if axis[1] > 1)
        if any(name != DATA_AXIS for name, _ in axes):
            yield axes


def num_experts(graph: Graph) -> int:
    """The number of experts of a mixture; 0 for other models."""
    shapes = (graph.values[n.inputs[1]].shape for n in graph.nodes if n.operator == GROUPED_MM)
    return next((shape[0] for shape in shapes if shape), 0)
