"""Which reshardings of parameters run their collectives together, and when these begin.

A collective of a few bytes takes as long as its latency, and a model has many small parameters.
ReshardingTable of parameters that take the same steps are therefore put into *buckets*: one
collective moves what all of them need. What a parameter is resharded from is there from the
start, so a bucket can begin ahead of its first reader, and the reduction of its gradients can
trail behind it.

All follows from the stage: the runtime, the count of collectives and the memory timeline ask
here.
"""

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoshard.graph import Graph, find_blocks
from autoshard.layouts import Action, is_padded, makes_whole, parse_type
from autoshard.mesh import Mesh
from autoshard.plan.document import PlannedStep, Resharding, Stage, Use
from autoshard.plan.memory.recompute import recomputed
from autoshard.plan.memory.spans import checkpoint_spans, readers_inside

SMALL = 2 * 2**20
"""Bytes of a whole parameter up to which a copy of it costs less than a collective's latency."""

LARGEST = 8 * 2**20
"""Bytes of the whole parameters of a bucket. The first reader waits for all of it, and in
backward nothing of it moves before the last gradient is there."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """ReshardingTable whose collectives run together, step by step.

    Attributes:
        reshardings: in the order in which they are first read; their steps are on the same axes,
            with the same actions.
        begins: number of the node before which it begins.
        reader: number of the node that reads it first; as many as there are nodes if that is
            the program's end.
        checkpoint: number of the checkpoint inside of which it runs; -1 for none.
    """

    reshardings: tuple[Resharding, ...]
    begins: int
    reader: int
    checkpoint: int = -1

    @property
    def uses(self) -> tuple[Use, ...]:
        """What the reshardings are for."""
        return tuple(resharding.use for resharding in self.reshardings)

    @property
    def regather(self) -> bool:
        """Whether backward runs its forward steps once more, apart from a checkpoint."""
        return self.reshardings[0].regather

    @property
    def steps(self) -> Iterator[tuple[PlannedStep, int]]:
        """A step of the first resharding, and the bytes of this step in all of them."""
        for steps in zip(*(resharding.steps for resharding in self.reshardings), strict=True):
            yield steps[0], sum(step.nbytes for step in steps)


def carried_beside(graph: Graph, mesh: Mesh) -> Mapping[str, float]:
    """How many times its own bytes a full bucket moves, by parameter that shares one.

    What a parameter's resharding is priced by: what it shares a collective with is not known
    before there is a plan, and the price of a layer should not depend on the layers around it.
    Published prices are those of one collective per tensor.
    """
    if mesh.collectives is not None:
        return {}
    tensors = {parameter.name: graph.values[parameter.name] for parameter in graph.parameters}
    return {name: LARGEST / t.nbytes for name, t in tensors.items() if 0 < t.nbytes <= SMALL}


def buckets_of(stage: Stage, graph: Graph) -> tuple[Bucket, ...]:
    """The buckets of a stage, in the order in which they are first read.

    A resharding is in one if it makes a parameter whole, and no other one of the parameter
    comes before it.

    What runs again is together with what the same repetition of a block reads, and what runs
    again with a checkpoint with what else of the checkpoint does. Whatever gathers begins when
    the gather before it is read, so that one bucket is gathered ahead; inside a checkpoint the
    first begins with it. What only reduces gradients begins with the program, and is read before
    a checkpoint, since running it once more would do nothing.

    Raises:
        PlanError: the stage's checkpoints do not fit its program.
    """
    spans = checkpoint_spans(graph, stage)
    insides = readers_inside(graph, stage, spans)
    number_of = {node: number for number, span in enumerate(spans) for node in span}
    shared = {c.value for c in stage.reshardings if c.consumer is None}
    blocks = _blocks(graph) if any(c.regather for c in stage.reshardings) else {}
    once_more = recomputed(graph, stage).reshardings if spans else frozenset()
    found: list[_Member] = []
    parameters = {placed.name for placed in stage.parameters}
    for resharding, inside in zip(stage.reshardings, insides, strict=True):
        own = resharding.consumer is None or resharding.value not in shared
        steps = _key(resharding, stage, graph)
        if resharding.value not in parameters or not own or steps is None:
            continue
        reader = _first_reader(resharding, graph)
        if inside is None or not _gathers(resharding):
            # What runs again does so for memory: only what a block needs is made at one time.
            block = blocks.get(reader, -1) if resharding.regather else None
            if reader in number_of:
                reader = spans[number_of[reader]].start
            found.append(_Member(reader, resharding, -1, (steps, block)))
        else:
            key = steps, number_of[reader], resharding.use in once_more
            found.append(_Member(reader, resharding, number_of[reader], key))
    found.sort(key=lambda member: member.reader)
    return tuple(_beginning(_packed(found, graph), spans, once_more))


class _Member(NamedTuple):
    """A resharding that is in a bucket.

    Attributes:
        reader: number of the node before which it must have come.
        resharding: which one.
        checkpoint: number of the checkpoint inside of which it runs; -1 for none.
        key: what it has in common with the others of its bucket.
    """

    reader: int
    resharding: Resharding
    checkpoint: int
    key: Hashable


def _gathers(resharding: Resharding) -> bool:
    return any(step.forward != Action.NOTHING for step in resharding.steps)


def _key(resharding: Resharding, stage: Stage, graph: Graph) -> Hashable | None:
    """What reshardings of a bucket have in common; None of one that is in none."""
    sizes = dict(stage.axes)
    shape = graph.values[resharding.value].shape
    chain = []
    for step in resharding.steps:
        source, target = parse_type(step.source), parse_type(step.target)
        size = sizes.get(step.axis, 1)
        is_even = not is_padded(source, target, shape, size)
        if not (makes_whole(source, target) and is_even and size > 1):
            return None
        chain.append((step.axis, source.kind, step.forward, step.backward))
    tensor = graph.values[resharding.value]
    return (*chain, resharding.regather, tensor.dtype, tensor.requires_grad) if chain else None


def _blocks(graph: Graph) -> dict[int, int]:
    """The repetition of a block that each node is in."""
    repetitions = (nodes for block in find_blocks(graph) for nodes in block.instances())
    return {node: number for number, nodes in enumerate(repetitions) for node in nodes}


def _first_reader(resharding: Resharding, graph: Graph) -> int:
    end = len(graph.nodes)
    if resharding.consumer is not None:
        return graph.numbers.get(resharding.consumer, end)
    return min((number for number, _ in graph.consumers.get(resharding.value, ())), default=end)


def _packed(found: Sequence[_Member], graph: Graph) -> list[list[_Member]]:
    """The members of each bucket."""
    packed: list[list[_Member]] = []
    open_buckets: dict[Hashable, tuple[list[_Member], int]] = {}
    for member in found:
        nbytes = graph.values[member.resharding.value].nbytes
        members, held = open_buckets.get(member.key, ([], LARGEST))
        if nbytes > SMALL:
            packed.append([member])
        elif held + nbytes > LARGEST:
            packed.append([member])
            open_buckets[member.key] = packed[-1], nbytes
        else:
            members.append(member)
            open_buckets[member.key] = members, held + nbytes
    return packed


def _beginning(
    packed: Sequence[Sequence[_Member]], spans: Sequence[range], once_more: Collection[Use]
) -> Iterator[Bucket]:
    before = {-1: 0} | {number: span.start for number, span in enumerate(spans)}
    for members in packed:
        reader, first, checkpoint, _ = members[0]
        begins = 0
        if checkpoint >= 0 and first.use not in once_more:
            # Backward runs the checkpoint up to where this is read: it must not have begun.
            begins = reader
        elif _gathers(first):
            begins, before[checkpoint] = before[checkpoint], reader
        yield Bucket(tuple(m.resharding for m in members), begins, reader, checkpoint)
