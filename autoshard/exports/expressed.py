"""The share of a plan that an export expresses."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import fsum, prod

from autoshard.constraints import BatchSharding, ShardingConstraint, dim_origins
from autoshard.exports.outline import Outline, OwnedParameter, pattern
from autoshard.graph import Node
from autoshard.layouts import Layout
from autoshard.ops import Strategy

_PERCENT = 0.01
_SHOWN = 3
"""Number of parts that a message names."""


@dataclass(frozen=True)
class Expressed:
    """The parts of a plan that the result of an export reproduces.

    Attributes:
        parameters: names of the parameters with the planned placements on all axes.
        operators: names of the operators that run on the planned shards.
        parameter_share: share of the bytes of all parameters that is in these parameters, and is
            read by these operators only.
        compute_share: share of the predicted compute time that is in these operators.
        nbytes: bytes of all parameters.
        seconds: predicted compute time of all operators.
        missing: the largest parts that are not reproduced, as text.
    """

    parameters: frozenset[str]
    operators: frozenset[str]
    parameter_share: float
    compute_share: float
    nbytes: float
    seconds: float
    missing: str = ""

    @property
    def share(self) -> float:
        """The smaller one of both shares."""
        return min(self.parameter_share, self.compute_share)

    def __str__(self) -> str:
        return (
            f"{percent(self.share)} of the plan: {percent(self.parameter_share)} of the bytes of "
            f"parameters are placed and used as planned, and operators with "
            f"{percent(self.compute_share)} of the compute time run on the planned shards"
        )


def percent(share: float) -> str:
    """A share as a percentage, rounded down, so that only all is 100 %."""
    return "less than 1 %" if 0 < share < _PERCENT else f"{int(share * 100 + 1e-9)} %"


def headline(expressed: Expressed) -> str:
    """The first sentence of an export."""
    return f"Expresses {expressed}."


def operators_on_shards(
    outline: Outline, *, data: Collection[int], tensor: int | None, on_shards: Collection[str]
) -> frozenset[str]:
    """The operators that a target runs on the planned shards.

    The target divides the batch over the data-parallel axes, runs some operators on shards of the
    tensor-parallel axis, and everything else replicated.

    Args:
        outline: the plan.
        data: the data-parallel axes of the target.
        tensor: its tensor-parallel axis.
        on_shards: operators that run on shards of the tensor-parallel axis as planned.
    """
    batch = _BatchCheck(outline, data)
    found = set()
    for node in outline.graph.nodes:
        placed = outline.placed[node.name]
        inputs, outputs = (
            tuple(map(Layout.parse, texts)) for texts in (placed.inputs, placed.outputs)
        )
        replicated = [
            axis
            for axis in outline.active
            if axis not in data and not (axis == tensor and node.name in on_shards)
        ]
        layouts = (*inputs, *outputs)
        if all(x.types[axis].is_replicated for x in layouts for axis in replicated) and batch.holds(
            node, Strategy(inputs, outputs, {})
        ):
            found.add(node.name)
    return frozenset(found)


class _BatchCheck:
    """Checks that operators shard the batch, and nothing else, over data-parallel axes."""

    def __init__(self, outline: Outline, data: Collection[int]) -> None:
        self._sizes = outline.sizes
        axes = tuple(axis for axis in outline.active if axis in data)
        self._batch = BatchSharding(outline.graph, self._sizes, axes, dim_origins(outline.graph))

    def holds(self, node: Node, strategy: Strategy) -> bool:
        """True if a call shards its batch over all data-parallel axes that can shard it."""
        batch, sharding = self._batch.of_call(node)
        axes = range(len(self._sizes))
        none: frozenset[tuple[int, int]] = frozenset()
        return ShardingConstraint(
            tuple(batch if axis in self._batch.axes else None for axis in axes),
            tuple(batch if axis in sharding else none for axis in axes),
        )(strategy)


def expressed(
    outline: Outline, placed: Iterable[OwnedParameter], operators: Collection[str]
) -> Expressed:
    """The share of a plan in parameters that are placed, and operators that run, as planned.

    Args:
        outline: the plan.
        placed: the parameters that the target places as planned.
        operators: the operators that it runs as planned.
    """
    names = frozenset(parameter.name for parameter in placed)
    used: dict[str, float] = {}
    kept = total = 0.0
    for parameter in outline.stage.parameters:
        readers = outline.readers.get(parameter.name, ())
        nbytes = prod(parameter.shape) * outline.graph.values[parameter.name].dtype.itemsize
        total += nbytes
        if {parameter.target, *parameter.aliases} <= names and all(
            node.name in operators for node in readers
        ):
            kept += nbytes
        else:
            used[pattern(parameter.target)] = used.get(pattern(parameter.target), 0.0) + nbytes
    seconds = {node.name: node.time + node.communication for node in outline.stage.nodes}
    run = fsum(seconds[name] for name in operators)
    whole = fsum(seconds.values())
    apart: dict[str, float] = {}
    for node in outline.graph.nodes:
        if node.name not in operators:
            name = pattern(node.module) or node.operator
            apart[name] = apart.get(name, 0.0) + seconds[node.name]
    return Expressed(
        names,
        frozenset(operators),
        min(1.0, kept / total) if total else 1.0,
        min(1.0, run / whole) if whole else 1.0,
        total,
        whole,
        "; ".join(
            [
                *_largest("the compute of", apart, whole),
                *_largest("the parameters", used, total),
            ]
        ),
    )


def joined(stages: Sequence[Expressed]) -> Expressed:
    """The share of a plan of several stages, from those of the stages."""
    nbytes, seconds = (fsum(x) for x in zip(*((s.nbytes, s.seconds) for s in stages), strict=True))
    return Expressed(
        frozenset().union(*(stage.parameters for stage in stages)),
        frozenset().union(*(stage.operators for stage in stages)),
        fsum(s.parameter_share * s.nbytes for s in stages) / nbytes if nbytes else 1.0,
        fsum(s.compute_share * s.seconds for s in stages) / seconds if seconds else 1.0,
        nbytes,
        seconds,
        min(stages, key=lambda stage: stage.share).missing,
    )


def _largest(what: str, parts: dict[str, float], whole: float) -> list[str]:
    largest = sorted(parts, key=lambda name: -parts[name])[:_SHOWN]
    shown = [f"{name} ({percent(parts[name] / whole)})" for name in largest if whole]
    return [f"{what} {', '.join(shown)}"] if shown else []
