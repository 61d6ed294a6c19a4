"""The patterns of DDP, FSDP2 and HSDP as constraints, for use as baselines.

All axes shard the batch. DDP (Li et al., VLDB 2020) replicates parameters. FSDP2, the `fully_shard`
of PyTorch (ZeRO-3; Rajbhandari et al., SC 2020), shards each over all axes, along dim 0 where that
divides, and gathers it before use. HSDP shards parameters over the last axis only, and replicates
them over the others.
"""

from collections.abc import Sequence
from math import prod

from autoshard.constraints.batch import BatchSharding, DimOrigins, dim_origins, outermost_dims
from autoshard.constraints.constraints import (
    ChoiceId,
    Dim,
    ShardingConstraint,
    StrategyConstraint,
)
from autoshard.constraints.nontrivial_axes import NontrivialAxes
from autoshard.errors import OptionError
from autoshard.graph import Graph, Input, InputKind, Node, Origin
from autoshard.layouts import Action, can_be_sharded
from autoshard.plan.options import Family

_NONE: frozenset[Dim] = frozenset()
_DATA = frozenset({InputKind.USER, InputKind.PREPARED})


def data_parallel_constraints(
    graph: Graph, axes: NontrivialAxes, pattern: Family, sharding: Sequence[int]
) -> dict[ChoiceId, StrategyConstraint]:
    """The pattern as constraints on inputs and operators.

    Args:
        graph: the program.
        axes: the mesh.
        pattern: ddp, fsdp2 or hsdp.
        sharding: the axes that shard parameters.

    Raises:
        OptionError: the batch does not divide over the devices, or the mesh has too few axes.
    """
    if pattern == "hsdp" and len(axes.sizes) < 2:  # noqa: PLR2004  one to shard, one to replicate
        raise OptionError(
            "HSDP needs two mesh axes of several devices, one to shard parameters and one to "
            "replicate them; with one axis it is FSDP2"
        )
    origins = dim_origins(graph)
    check_batch(origins, axes.sizes)
    found = _DataParallelPattern(graph, origins, axes.sizes, sharding)
    constraints: dict[ChoiceId, StrategyConstraint] = {
        ("operator", node.name): found.node(node) for node in graph.nodes
    }
    for entering in graph.inputs:
        constraint = found.input(entering)
        if constraint is not None:
            constraints["input", entering.name] = constraint
    shared = {("shared", value): found.shared(value) for value in graph.values}
    return constraints | shared


def check_batch(origins: DimOrigins, sizes: Sequence[int]) -> None:
    """Check that axes of these sizes can shard the batch together.

    Raises:
        OptionError: there is no batch, or they cannot.
    """
    batch, devices = origins.batch_size, prod(sizes)
    if devices == 1:
        return
    if batch is None:
        raise OptionError("there is no batch to shard: no user input has dims")
    if batch % devices and not (len(sizes) == 1 and can_be_sharded(batch, devices)):
        raise OptionError(f"the batch of {batch} does not divide over {devices} devices")


def data_parallel_forbids(
    axes: NontrivialAxes, sharding: Sequence[int]
) -> frozenset[tuple[str, int]]:
    """Collectives that a pattern does not use, each with the index of a non-trivial axis.

    Gradients are all-reduced along axes that replicate parameters, and not reduce-scattered.

    Args:
        axes: the mesh.
        sharding: the axes that shard parameters.
    """
    numbers = range(len(axes.sizes))
    replicating = [axis for axis in numbers if axis not in sharding]
    forbidden: list[tuple[str, int]] = [(Action.ALL_TO_ALL, axis) for axis in numbers]
    return frozenset([*forbidden, *((Action.REDUCE_SCATTER, axis) for axis in replicating)])


def sharding_axes(axes: NontrivialAxes, pattern: Family) -> tuple[int, ...]:
    """The non-trivial axes that shard parameters in a data-parallel pattern."""
    numbers = range(len(axes.sizes))
    return {"ddp": (), "fsdp2": tuple(numbers), "hsdp": tuple(numbers[-1:])}.get(pattern, ())


def parameter_shards(shape: Sequence[int], sizes: Sequence[int]) -> tuple[int | None, ...]:
    """The dim of a parameter that each axis shards; None if it shards none.

    All axes shard dim 0 if they can, as FSDP2 does, else the first dim that they can, else several.
    Several axes shard a dim together only if it divides; one axis alone also if it does not.

    Args:
        shape: of the parameter.
        sizes: of the axes.
    """
    for dim, size in enumerate(shape):
        if shards_together(size, sizes):
            return (dim,) * len(sizes)
    return _several_dims(shape, sizes)


def shards_together(size: int, sizes: Sequence[int]) -> bool:
    """True if axes of these sizes can shard a dim together."""
    return size % prod(sizes) == 0 or (len(sizes) == 1 and can_be_sharded(size, sizes[0]))


def _several_dims(shape: Sequence[int], sizes: Sequence[int]) -> tuple[int | None, ...]:
    """A dim for each axis, from the last axis to the first; None where none divides."""
    groups: list[list[int]] = [[] for _ in shape]
    dims: list[int | None] = []
    for axis_size in reversed(sizes):
        fits = [d for d, size in enumerate(shape) if shards_together(size, [*groups[d], axis_size])]
        dims.append(fits[0] if fits else None)
        if fits:
            groups[fits[0]].append(axis_size)
    return tuple(reversed(dims))


class _DataParallelPattern:
    """The constraints of a data-parallel pattern.

    Args:
        graph: the program.
        origins: of its dims.
        sizes: of all non-trivial axes.
        sharding: the axes that shard parameters.
    """

    def __init__(
        self, graph: Graph, origins: DimOrigins, sizes: Sequence[int], sharding: Sequence[int]
    ) -> None:
        self._graph = graph
        self._origins = origins
        self._sizes = sizes
        self._sharding = sharding
        self._batch = BatchSharding(graph, tuple(sizes), tuple(range(len(sizes))), origins)

    def input(self, entering: Input) -> ShardingConstraint | None:
        """The constraint on an input; None if it may have any layout."""
        if entering.kind is InputKind.PARAMETER:
            return self._parameter(self._graph.values[entering.name].shape)
        if entering.kind in _DATA:
            batch = self._origins.of_input(entering.name, Origin.BATCH)
            return self._on_all_axes(batch, range(len(self._sizes)))
        # Statistics of batch norm are replicated; key-value caches are sharded along their batch.
        if entering.name in self._graph.updated and not self._is_cache(entering):
            return self._on_all_axes(_NONE, ())
        return None

    def node(self, node: Node) -> ShardingConstraint:
        """The constraint on an operator: as many axes as possible shard its batch dims."""
        batch, sharding = self._batch.of_call(node)
        return self._on_all_axes(batch, sharding)

    def shared(self, value: str) -> ShardingConstraint:
        """The constraint on the layout in which all consumers of a value get it."""
        batch = outermost_dims(self._origins.of_value(value), Origin.BATCH)
        # Its strategy has the layout as input and as output.
        both = frozenset((i, dim) for i in range(2) for dim in batch)
        return self._on_all_axes(both, ())

    def _parameter(self, shape: Sequence[int]) -> ShardingConstraint:
        found = parameter_shards(shape, [self._sizes[axis] for axis in self._sharding])
        dims = dict(zip(self._sharding, found, strict=True))
        one = [
            _NONE if dims.get(axis) is None else frozenset({(0, dims[axis] or 0)})
            for axis in range(len(self._sizes))
        ]
        return ShardingConstraint(tuple(one), tuple(one))

    def _is_cache(self, buffer: Input) -> bool:
        shape = self._graph.values[buffer.name].shape
        return bool(shape) and shape[0] == self._origins.batch_size

    def _on_all_axes(self, batch: frozenset[Dim], required: Sequence[int]) -> ShardingConstraint:
        """Every axis may shard batch dims and nothing else; the required ones must."""
        axes = range(len(self._sizes))
        return ShardingConstraint(
            tuple(batch for _ in axes), tuple(batch if a in required else _NONE for a in axes)
        )
