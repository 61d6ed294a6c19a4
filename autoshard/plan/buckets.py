"""Which conversions of parameters run their collectives together, and when these begin.

A collective of a few bytes takes as long as its latency, and a model has many small parameters.
Conversions of parameters that take the same steps are therefore put into *buckets*: one
collective moves what all of them need. What a parameter is converted from is there from the
start, so a bucket can begin ahead of its first reader, and the reduction of its gradients can
trail behind it.

All follows from the stage: the runtime, the count of collectives and the memory timeline ask
here.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autoshard.graph import Graph, find_blocks
from autoshard.layouts import Action, makes_whole, parse_type
from autoshard.mesh import Mesh
from autoshard.plan.document import Conversion, PlannedStep, Stage, Use
from autoshard.plan.memory.spans import checkpoint_spans, readers_inside

SMALL = 2 * 2**20
"""Bytes of a whole parameter up to which a copy of it costs less than a collective's latency."""

LARGEST = 8 * 2**20
"""Bytes of the whole parameters of a bucket. The first reader waits for all of it, and in
backward nothing of it moves before the last gradient is there."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Conversions whose collectives run together, step by step.

    Attributes:
        conversions: in the order in which they are first read; their steps are on the same axes,
            with the same actions.
        begins: number of the node before which it begins.
        reader: number of the node that reads it first; as many as there are nodes if that is
            the program's end.
    """

    conversions: tuple[Conversion, ...]
    begins: int
    reader: int

    @property
    def uses(self) -> tuple[Use, ...]:
        """What the conversions are for."""
        return tuple(conversion.use for conversion in self.conversions)

    @property
    def again(self) -> bool:
        """Whether backward runs its forward steps once more."""
        return self.conversions[0].again

    @property
    def steps(self) -> Iterator[tuple[PlannedStep, int]]:
        """A step of the first conversion, and the bytes of this step in all of them."""
        for steps in zip(*(conversion.steps for conversion in self.conversions), strict=True):
            yield steps[0], sum(step.nbytes for step in steps)


def carried_beside(graph: Graph, mesh: Mesh) -> Mapping[str, float]:
    """How many times its own bytes a full bucket moves, by parameter that shares one.

    What a parameter's conversion is priced by: what it shares a collective with is not known
    before there is a plan, and the price of a layer should not depend on the layers around it.
    Published prices are those of one collective per tensor.
    """
    if mesh.collectives is not None:
        return {}
    tensors = {parameter.name: graph.values[parameter.name] for parameter in graph.parameters}
    return {name: LARGEST / t.nbytes for name, t in tensors.items() if 0 < t.nbytes <= SMALL}


def buckets_of(stage: Stage, graph: Graph) -> tuple[Bucket, ...]:
    """The buckets of a stage, in the order in which they are first read.

    A conversion is in one if it makes a parameter whole, and no other one of the parameter
    comes before it. Inside a checkpoint none is: its conversions run once more with it.

    What runs again is together with what the same repetition of a block reads. Whatever gathers
    begins when the gather before it is read, so that one bucket is gathered
    ahead; what only reduces gradients begins with the program.

    Raises:
        PlanError: the stage's checkpoints do not fit its program.
    """
    spans = checkpoint_spans(graph, stage)
    insides = readers_inside(graph, stage, spans)
    starts = {number: span.start for span in spans for number in span}
    shared = {c.value for c in stage.conversions if c.consumer is None}
    blocks = _blocks(graph) if any(c.again for c in stage.conversions) else {}
    found: list[tuple[int, int, Conversion, Hashable]] = []
    parameters = {placed.name for placed in stage.parameters}
    for order, (conversion, inside) in enumerate(zip(stage.conversions, insides, strict=True)):
        own = conversion.consumer is None or conversion.value not in shared
        key = _key(conversion, stage, graph)
        if conversion.value in parameters and own and inside is None and key is not None:
            reader = _first_reader(conversion, graph)
            # What runs again does so for memory: only what a block needs is made at one time.
            block = blocks.get(reader, -1) if conversion.again else None
            found.append((starts.get(reader, reader), order, conversion, (key, block)))
    found.sort(key=lambda entry: entry[:2])
    return tuple(_beginning(_packed([(r, c, key) for r, _, c, key in found], graph)))


def _key(conversion: Conversion, stage: Stage, graph: Graph) -> Hashable | None:
    """What conversions of a bucket have in common; None of one that is in none."""
    sizes = dict(stage.axes)
    shape = graph.values[conversion.value].shape
    chain = []
    for step in conversion.steps:
        source, target = parse_type(step.source), parse_type(step.target)
        size = sizes.get(step.axis, 1)
        uneven = source.is_shard and shape[source.dim] % size
        if not makes_whole(source, target) or size == 1 or uneven:
            return None
        chain.append((step.axis, source.kind, step.forward, step.backward))
    tensor = graph.values[conversion.value]
    return (*chain, conversion.again, tensor.dtype, tensor.requires_grad) if chain else None


def _blocks(graph: Graph) -> dict[int, int]:
    """The repetition of a block that each node is in."""
    repetitions = (nodes for block in find_blocks(graph) for nodes in block.instances())
    return {node: number for number, nodes in enumerate(repetitions) for node in nodes}


def _first_reader(conversion: Conversion, graph: Graph) -> int:
    end = len(graph.nodes)
    if conversion.consumer is not None:
        return graph.numbers.get(conversion.consumer, end)
    return min((number for number, _ in graph.consumers.get(conversion.value, ())), default=end)


def _packed(
    found: Sequence[tuple[int, Conversion, Hashable]], graph: Graph
) -> list[tuple[int, list[Conversion]]]:
    """The first reader of each bucket, and its conversions."""
    packed: list[tuple[int, list[Conversion]]] = []
    open_buckets: dict[Hashable, tuple[list[Conversion], int]] = {}
    for reader, conversion, key in found:
        nbytes = graph.values[conversion.value].nbytes
        members, held = open_buckets.get(key, ([], LARGEST))
        if nbytes > SMALL:
            packed.append((reader, [conversion]))
        elif held + nbytes > LARGEST:
            packed.append((reader, [conversion]))
            open_buckets[key] = packed[-1][1], nbytes
        else:
            members.append(conversion)
            open_buckets[key] = members, held + nbytes
    return packed


def _beginning(packed: Sequence[tuple[int, Sequence[Conversion]]]) -> Iterator[Bucket]:
    before = 0
    for reader, members in packed:
        bucket = Bucket(tuple(members), 0, reader)
        if any(step.forward != Action.NOTHING for step, _ in bucket.steps):
            bucket, before = replace(bucket, begins=before), reader
        yield bucket
